"""Kills the real `extract` stage, vLLM and all, at random moments; every rerun must end in the bytes of an uninterrupted run.

    python benchmarks/extraction/kills.py PROFILE --kills 10

Run it from the root of a checkout where `encode@PROFILE` is up to date. It works in a copy without `dvc.lock`, so that nothing is
taken from DVC's cache. Each kill is SIGKILL to the stage and all its processes. After each completed run: the store's files byte for
byte those of the first, uninterrupted run, and no row recorded that was whole in the scratch before. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eyas.store.format import Manifest
from eyas.store.spool import RowSpool


def copy_checkout(folder: Path, profile: str) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True).stdout.decode().split("\0")
    inputs = [path for path in Path("data/input").rglob("*") if path.is_file()]
    made = [path for path in Path("data", profile).rglob("*") if path.is_file() and "hidden_states" not in path.parts]
    for path in [*map(Path, filter(None, listed)), *inputs, *made]:
        if path.name != "dvc.lock" and path.is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path)


def digests(store: Path) -> dict[str, str]:
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in sorted(store.iterdir())}


def run_stage(folder: Path, profile: str, kill_after: float | None) -> int:
    """Exit status of the stage, which is killed with everything it started after so many seconds."""
    command = [sys.executable, "-m", "stages.extract", profile]
    stage = subprocess.Popen(command, cwd=folder, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = stage.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        os.killpg(stage.pid, signal.SIGKILL)
        _, errors = stage.communicate()
    if stage.returncode not in (0, -signal.SIGKILL):
        print(errors)
    return stage.returncode


def kept_tokens(work: Path, store: Manifest) -> int:
    """Tokens of whole rows in the scratch, probe rows too."""
    folder = work / store.spec.fingerprint[:16] / "rows"
    if not folder.exists():
        return 0
    spool = RowSpool(folder, store.spec)
    whole = spool.keys()
    return sum(spool.length(key) or 0 for key in whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    source, violations, kills, completed = random.Random(arguments.seed), [], 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_checkout(folder, arguments.profile)
        store, work = (
            folder / "data" / arguments.profile / "hidden_states",
            folder / ".work" / arguments.profile / "extract",
        )
        metrics = folder / "metrics" / arguments.profile / "extract.json"
        started = time.monotonic()
        if run_stage(folder, arguments.profile, None):
            return 1
        seconds = time.monotonic() - started
        expected, manifest = digests(store), Manifest.read(store)
        recorded = json.loads(metrics.read_text())["recorded_tokens"]
        print(
            f"uninterrupted: {seconds:.0f} s, {recorded:,} tokens in {len(manifest.rows)} rows and the probes",
            flush=True,
        )
        shutil.rmtree(work)
        shutil.rmtree(store)
        while kills < arguments.kills or completed == 0:
            kept = kept_tokens(work, manifest)
            moment = source.uniform(0, 1.1 * seconds) if kills < arguments.kills else None
            status = run_stage(folder, arguments.profile, moment)
            if status == -signal.SIGKILL:
                kills += 1
                print(
                    f"kill {kills} after {moment:.0f} s; {kept_tokens(work, manifest):,} tokens are whole", flush=True
                )
            elif status:
                violations.append(f"exit status {status}")
            else:
                completed += 1
                again = json.loads(metrics.read_text())["recorded_tokens"]
                print(f"completed: {kept:,} tokens were there, {again:,} were recorded", flush=True)
                if digests(store) != expected:
                    violations.append("other bytes than the uninterrupted run's")
                if kept + again != recorded:
                    violations.append(f"{kept} tokens were whole, {again} were recorded, of {recorded}")
                shutil.rmtree(work)
                shutil.rmtree(store)
    print(json.dumps({"kills": kills, "completed": completed, "violations": violations}))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
