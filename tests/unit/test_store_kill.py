"""Kill -9 at random moments: the rerun ends in the bytes of an uninterrupted run and repeats only rows in flight.

`benchmarks/store/kills.py` does more of it, to more processes.
"""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from eyas.store.format import StoreSpec, row_key
from eyas.store.spool import RowSpool
from eyas.store.writer import Sealer, publish

ROWS = 60
SPEC = StoreSpec((1, 2, 3, 4), 128, "lossless", {"engine": "fixed"}, 1)


def fixed_engine(number: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(number)
    tokens = 80 + number * 53 % 240
    values = source.standard_normal((tokens, 4, 128)).astype(np.float32)
    return source.integers(0, 1000, tokens).astype(np.int32), (values.view(np.uint32) >> 16).astype(np.uint16)


def extract(folder: Path) -> None:
    """What the stage does, with a log line for every row that the engine had to compute."""
    spool = RowSpool(folder / "work" / "rows", SPEC)
    keys = [row_key(SPEC.fingerprint, fixed_engine(number)[0]) for number in range(ROWS)]
    todo = [number for number in range(ROWS) if not spool.has(keys[number])]
    random.shuffle(todo)
    lengths = {key: len(fixed_engine(number)[0]) for number, key in enumerate(keys)}
    with Sealer(spool, SPEC, lengths, workers=1):
        for number in todo:
            ids, hidden = fixed_engine(number)
            with (folder / "log").open("a") as log:
                log.write(f"{number}\n")
            spool.write(ids, hidden)
            time.sleep(0.01)
    publish(spool, folder / "store", SPEC, keys)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_kills_at_random_moments_end_in_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    started = time.monotonic()
    extract(tmp_path / "plain")
    seconds = time.monotonic() - started
    folder = tmp_path / "killed"
    folder.mkdir()
    source = random.Random(0)
    kills = 0
    while kills < 10:
        # the child says when its imports are over, so that the kill falls into the work
        child = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(source.uniform(0, seconds / 4 if kills < 8 else seconds))
        child.send_signal(signal.SIGKILL)
        kills += child.wait() == -signal.SIGKILL
        child.stdout.close()
        if (folder / "store").exists():  # begin again: the next kill shall hit an unfinished run
            assert digests(folder / "store") == digests(tmp_path / "plain" / "store")
            subprocess.run(["rm", "-rf", folder], check=True)
            folder.mkdir()
    extract(folder)
    assert digests(folder / "store") == digests(tmp_path / "plain" / "store")
    assert not list((folder / "work" / "rows").iterdir())
    assert not list(folder.glob(".store.*"))
    computed = [int(line) for line in (folder / "log").read_text().split()]
    assert set(computed) == set(range(ROWS))
    assert len(computed) <= ROWS + kills


if __name__ == "__main__":
    print("ready", flush=True)
    extract(Path(sys.argv[1]))
