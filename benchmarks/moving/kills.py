"""Kill runs, pushes and pulls at random moments; look for anything half written under an object's name; run them again to the end.

python benchmarks/moving/kills.py [KILLS] [SEED]   # one line a turn and a sum, in benchmarks/moving/results/kills.json; needs 500 MB

`dvc`: SIGKILL for DVC alone, under `make repro`. `stage`: for the stage alone. `repro`: for all three at once. The recovery is the
documented one: `make adopt`, then `make repro`; for `push` and `pull`, the same command again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.moving_checkout import TinyCheckout
from tests.stub_pipeline import StubCheckout

SHARD_MIB = 24
SHARDS = 6
RESULT = Path(__file__).parent / "results/kills.json"
MOVING = (sys.executable, "-m", "eyas.moving")


def unsound(top: Path) -> list[str]:
    """Objects whose bytes are not those that their name says; temporary files have other names."""
    faults = []
    for file in top.rglob("*") if top.exists() else ():
        name = (file.parent.name + file.name).removesuffix(".dir")
        is_object = file.is_file() and len(name) == 32 and not file.name.startswith(".")
        if is_object and hashlib.md5(file.read_bytes()).hexdigest() != name:
            faults.append(str(file))
    return faults


class Transfers:
    """Pushes and pulls of a few large files, in turn."""

    def __init__(self, top: Path, chance: random.Random) -> None:
        self.checkout, self.remote, self.chance = TinyCheckout(top / "eyas"), top / "remote", chance
        for index in range(SHARDS):
            (self.checkout.folder / f"data/input/{index}.h5").write_bytes(chance.randbytes(SHARD_MIB * 2**20))
        assert self.checkout.moving("repro", "one").returncode == 0
        assert self.checkout.moving("set", str(self.remote)).returncode == 0
        started = time.monotonic()
        assert self.checkout.moving("push", "one").returncode == 0
        self.whole = time.monotonic() - started

    def turn(self, verb: str) -> tuple[bool, str]:
        """Whether it was killed, and what is wrong afterwards."""
        if verb == "push":
            shutil.rmtree(self.remote / "files")
        else:
            shutil.rmtree(self.checkout.objects)
            shutil.rmtree(self.checkout.folder / "data/one")
        process = subprocess.Popen(
            [*MOVING, verb, "one"],
            cwd=self.checkout.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(self.chance.uniform(0.3, 1.1) * self.whole)
            killed = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            killed = True
        faults = unsound(self.remote) + unsound(self.checkout.objects)
        started = time.monotonic()
        for arguments in ([verb, "one"], ["check", "one", "--content"]):
            result = self.checkout.moving(*arguments)
            faults += [f"{arguments}: {result.stderr[-500:]}"] if result.returncode else []
            if arguments[0] == verb:
                self.whole = time.monotonic() - started  # a busy machine gets slower and faster
        if not (self.checkout.folder / "data/one/hidden_states").is_dir():
            faults.append("the checkout has no store")
        return killed, "; ".join(faults + unsound(self.checkout.objects))


class Runs:
    """`make repro` of the project's own pipeline, with stages that write the real outputs' names in half a second."""

    def __init__(self, top: Path, chance: random.Random) -> None:
        self.checkout, self.chance, self.rate = StubCheckout(top), chance, 0.0
        started = time.monotonic()
        assert self.checkout.run(*MOVING, "repro", "smoke", STUB_SECONDS="0.5").returncode == 0
        self.whole = time.monotonic() - started
        self.cache = self.checkout.folder / ".dvc/cache/files/md5"

    def turn(self, what: str) -> tuple[bool, str]:
        """Whether it was killed, and what is wrong afterwards."""
        self.rate += 1e-6
        params = self.checkout.folder / "params.yaml"
        content = YAML(typ="safe").load(params)
        content["profiles"]["smoke"]["responses"]["temperature"] = round(0.5 + self.rate, 6)  # most stages are due
        YAML().dump(content, params)
        self.checkout.tell_params()
        before = {path.relative_to(self.cache) for path in self.cache.rglob("*") if path.is_file()}
        process = self.checkout.start(*MOVING, "repro", "smoke", STUB_SECONDS="0.5")
        time.sleep(self.chance.uniform(0.15, 0.9) * self.whole)
        killed = self._kill(process, what)
        process.communicate()
        faults = unsound(self.cache)
        lost = before - {path.relative_to(self.cache) for path in self.cache.rglob("*") if path.is_file()}
        faults += [f"lost: {path}" for path in lost]
        self.checkout.run("eyas", "cache", "adopt", "smoke")  # refuses what did not finish
        again = self.checkout.run(*MOVING, "repro", "smoke")
        faults += [f"repro: {again.stderr[-500:]}"] if again.returncode else []
        status = self.checkout.dvc("status", "report@smoke", "--with-deps").stdout
        faults += [] if "up to date" in status else [status]
        return killed, "; ".join(faults + unsound(self.cache))

    @staticmethod
    def _kill(process: subprocess.Popen[str], what: str) -> bool:
        """Kill it or a process below it, as soon as there is that one; false if it ended before."""
        depth = {"repro": 0, "dvc": 1, "stage": 2}[what]
        while process.poll() is None:
            try:
                found = [psutil.Process(process.pid)]
                for _ in range(depth):
                    found = [child for parent in found for child in parent.children()]
                if found and what == "repro":
                    os.killpg(process.pid, 9)
                elif found:
                    found[0].kill()
                if found:
                    return True
            except psutil.NoSuchProcess:
                continue
            time.sleep(0.01)
        return False


def main() -> None:
    kills, seed = (int(value) for value in [*sys.argv[1:], *["50", "0"][len(sys.argv) - 1 :]])
    chance = random.Random(seed)
    landed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "runs").mkdir()
        transfers, runs = Transfers(top, chance), Runs(top / "runs", chance)
        turn = 0
        while landed.total() < kills:
            what = ("push", "dvc", "pull", "stage", "repro")[turn % 5]
            killed, fault = (transfers if what in ("push", "pull") else runs).turn(what)
            landed[what] += killed
            print(f"{turn}: {what} {'killed' if killed else 'had ended'}: {fault or 'recovered'}", flush=True)
            if fault:
                sys.exit(f"turn {turn}: {fault}")
            turn += 1
    result = {"turns": turn, "seed": seed, "killed": dict(landed), "unsound": 0, "lost": 0, "not_recovered": 0}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    print(f"{landed.total()} of {turn} were killed; nothing unsound or lost; every recovery completed")


if __name__ == "__main__":
    main()
