"""Kill runs, pushes and pulls at random moments; look for anything half written under an object's name; run them again to the end.

    python benchmarks/moving/kills.py --kills 50 --seed 7 --out benchmarks/moving/results/kills.json    # 500 MB, half a minute a turn

`dvc`: SIGKILL for DVC alone, under `make repro`. `stage`: for the stage alone. `repro`: for all three at once. The recovery is the
documented one: `make adopt`, then `make repro`; for `push` and `pull`, the same command again.

After a kill and after its recovery: every object has the bytes of its name, and none that was there before is gone; after the
recovery the pipeline is up to date, or remote and checkout are whole. Prints a line for each turn, writes the results after each, and
ends with status 1 at the first fault.
"""

from __future__ import annotations

import argparse
import hashlib
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

from eyas.files import write_json_atomic
from eyas.stage import installed_versions, machine_description

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.moving_checkout import TinyCheckout
from tests.stub_pipeline import StubCheckout

SHARD_MIB = 24
SHARDS = 6
KINDS = ("push", "dvc", "pull", "stage", "repro")
MOVING = (sys.executable, "-m", "eyas.moving")


def objects(top: Path) -> dict[str, Path]:
    """The objects below a folder; temporary files have other names."""
    found = {file.parent.name + file.name: file for file in top.rglob("*") if file.is_file()}
    return {name: file for name, file in found.items() if len(name.removesuffix(".dir")) == 32 and "." not in name[:32]}


def unsound(top: Path) -> list[str]:
    """Objects whose bytes are not those that their name says."""
    return [
        f"unsound: {file}"
        for name, file in objects(top).items()
        if hashlib.md5(file.read_bytes()).hexdigest() != name.removesuffix(".dir")
    ]


def lost(before: dict[str, Path], top: Path) -> list[str]:
    """Objects that were there and are not any more."""
    return [f"lost: {top}/{name}" for name in sorted(before.keys() - objects(top).keys())]


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
        self.made = objects(
            self.remote
        )  # the cache has some that are no part of a profile, as records of what stages read

    def turn(self, verb: str) -> tuple[bool, list[str]]:
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
        for place in (self.remote, self.checkout.objects):
            faults += lost(self.made, place) + unsound(place)
        return killed, faults


class Runs:
    """`make repro` of the project's own pipeline, with stages that write the real outputs' names in half a second."""

    def __init__(self, top: Path, chance: random.Random) -> None:
        self.checkout, self.chance, self.rate = StubCheckout(top), chance, 0.0
        started = time.monotonic()
        assert self.checkout.run(*MOVING, "repro", "smoke", STUB_SECONDS="0.5").returncode == 0
        self.whole = time.monotonic() - started
        self.cache = self.checkout.folder / ".dvc/cache/files/md5"

    def turn(self, what: str) -> tuple[bool, list[str]]:
        """Whether it was killed, and what is wrong afterwards."""
        self.rate += 1e-6
        params = self.checkout.folder / "params.yaml"
        content = YAML(typ="safe").load(params)
        content["profiles"]["smoke"]["responses"]["temperature"] = round(0.5 + self.rate, 6)  # most stages are due
        YAML().dump(content, params)
        self.checkout.tell_params()
        before = objects(self.cache)
        process = self.checkout.start(*MOVING, "repro", "smoke", STUB_SECONDS="0.5")
        time.sleep(self.chance.uniform(0.15, 0.9) * self.whole)
        killed = self._kill(process, what)
        process.communicate()
        faults = lost(before, self.cache) + unsound(self.cache)
        self.checkout.run("eyas", "cache", "adopt", "smoke")  # refuses what did not finish
        again = self.checkout.run(*MOVING, "repro", "smoke")
        faults += [f"repro: {again.stderr[-500:]}"] if again.returncode else []
        status = self.checkout.dvc("status", "report@smoke", "--with-deps").stdout
        faults += [] if "up to date" in status else [status]
        return killed, faults + lost(before, self.cache) + unsound(self.cache)

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chance, started = random.Random(options.seed), time.monotonic()
    landed, recovered = Counter(dict.fromkeys(KINDS, 0)), Counter(dict.fromkeys(KINDS, 0))
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "runs").mkdir()
        transfers, runs = Transfers(top, chance), Runs(top / "runs", chance)
        turn = 0
        while landed.total() < options.kills and not faults:
            what = KINDS[turn % len(KINDS)]
            killed, faults = (transfers if what in ("push", "pull") else runs).turn(what)
            turn += 1
            landed[what] += killed
            recovered[what] += killed and not faults
            print(f"{turn}: {what} {'killed' if killed else 'had ended'}: {'; '.join(faults) or 'whole'}", flush=True)
            result = {
                "command": f"python benchmarks/moving/kills.py --kills {options.kills} --seed {options.seed}",
                "turns": turn,
                "total_kills": landed.total(),
                "killed": dict(landed),
                "recovered": dict(recovered),
                "lost": sum(fault.startswith("lost: ") for fault in faults),
                "faults": faults,
                "seconds": round(time.monotonic() - started),
                "machine": machine_description(),
                "versions": installed_versions(),
            }
            if options.out:
                write_json_atomic(options.out, result)
    print(f"{landed.total()} kills in {turn} turns, {recovered.total()} recovered, {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
