"""Kill pushes and pulls at random moments; look for anything half written under an object's name; run them again to the end.

python benchmarks/moving/kills.py [TIMES] [SEED]   # prints one line a kill and a sum; needs 500 MB under the folder for temporary files
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.moving_checkout import TinyCheckout

SHARD_MIB = 24
SHARDS = 6


def timed(checkout: TinyCheckout, *arguments: str, kill_after: float | None = None) -> tuple[int, float]:
    """Run a command; its status and its seconds. With ``kill_after`` it and its children get SIGKILL then."""
    started = time.monotonic()
    command = [sys.executable, "-m", "eyas.moving", *arguments]
    process = subprocess.Popen(
        command, cwd=checkout.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        status = process.wait(kill_after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        status = process.wait()
    return status, time.monotonic() - started


def unsound(top: Path) -> list[Path]:
    """Objects whose bytes are not those that their name says; temporary files have other names."""
    faults = []
    for file in top.rglob("*"):
        name = (file.parent.name + file.name).removesuffix(".dir")
        is_object = file.is_file() and len(name) == 32 and not file.name.startswith(".")
        if is_object and hashlib.md5(file.read_bytes()).hexdigest() != name:
            faults.append(file)
    return faults


def main() -> None:
    times, seed = (int(value) for value in [*sys.argv[1:], *["50", "0"][len(sys.argv) - 1 :]])
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        checkout = TinyCheckout(top / "eyas")
        for index in range(SHARDS):
            (checkout.folder / f"data/input/{index}.h5").write_bytes(chance.randbytes(SHARD_MIB * 2**20))
        assert checkout.moving("repro", "one").returncode == 0
        assert checkout.moving("set", str(top / "remote")).returncode == 0
        _, whole = timed(checkout, "push", "one")
        landed = 0
        for turn in range(times):
            verb = ("push", "pull")[turn % 2]
            if verb == "push":
                shutil.rmtree(top / "remote/files")
                place = top / "remote/files"
            else:
                shutil.rmtree(checkout.objects)
                shutil.rmtree(checkout.folder / "data/one")
                place = checkout.objects
            after = chance.uniform(0.3, 1.1) * whole
            status, _ = timed(checkout, verb, "one", kill_after=after)
            landed += status == -9
            objects = sum(f.is_file() for f in place.rglob("*")) if place.exists() else 0
            faults = unsound(place) if place.exists() else []
            again, _ = timed(checkout, verb, "one")
            good = checkout.moving("check", "one", "--content").returncode == 0
            here = (checkout.folder / "data/one/hidden_states").is_dir() and not unsound(checkout.objects)
            print(
                f"{turn}: {verb} killed after {after:.2f} s: {objects} files there, {len(faults)} unsound", flush=True
            )
            if faults or again or not good or not here:
                sys.exit(f"turn {turn}: faults {faults}, again {again}, remote good {good}, checkout good {here}")
        print(f"{landed} of {times} runs were killed; nothing unsound under an object's name; every rerun completed")


if __name__ == "__main__":
    main()
