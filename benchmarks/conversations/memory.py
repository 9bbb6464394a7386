"""How fast the stages `prepare` and `encode` are, and how much memory they take, by the number of rows.

    python benchmarks/conversations/memory.py --prepare 20000 100000 400000 --out benchmarks/conversations/results/memory-prepare.json
    python benchmarks/conversations/memory.py --prepare --encode 400000 --out benchmarks/conversations/results/memory-encode.json

The rows are made up: two or three user turns with answers, four turns of 40 words on average, out of 20,000 words as frequent as
those of a language; 3 in 100 are copies of earlier rows, 3 in 100 near copies, and 10 in 100 open with one of a few instructions,
which gives the search for near copies many pairs to look at. `encode` reads rows of the same kind whose answers are kept, with the
tokenizer and the template of the smoke profile's target. Each size runs in a process of its own. `peak_mib` is that process's
largest resident set, `worker_peak_mib` the largest of one that it started.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eyas.conversations.dataset import prepare_dataset
from eyas.files import value_hash, write_json_atomic
from eyas.params import DatasetParams, Machine, SourceParams, load_profile
from eyas.stage import Stage, machine_description
from eyas.tables import KEPT, RESPONSES, table_writer
from eyas.targets.resolve import describe_target, resolve_target

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE = Path("data/input/made_up.jsonl")
_RESPONSES = Path("data/smoke/responses/responses.parquet")
_VOCABULARY = 20_000
_INSTRUCTIONS = [
    "Translate the following sentence into plain English and explain in a few words what each part of it means to you:",
    "Write a short summary of the following paragraph for a reader who knows nothing about the subject, in three sentences:",
    "You are given a list of words. Put them into an order that makes sense, and say why you chose this one:",
]


class _Author:
    """Makes up conversations, from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        ranks = np.arange(1, _VOCABULARY + 1)
        self._weights = np.cumsum(1 / ranks) / np.sum(1 / ranks)
        self._words = np.array([f"w{rank:x}" for rank in ranks])

    def _text(self, words: int) -> list[str]:
        found: list[str] = self._words[np.searchsorted(self._weights, self._random.random(words))].tolist()
        return found

    def turns(self) -> list[list[str]]:
        """Words of user turns and answers, in turn."""
        turns = [self._text(int(self._random.integers(20, 61))) for _ in range(2 * int(self._random.integers(1, 4)))]
        if self._random.random() < 0.1:
            turns[0] = [_INSTRUCTIONS[int(self._random.integers(len(_INSTRUCTIONS)))], *turns[0][:15]]
        return turns

    def rows(self, rows: int) -> Iterator[list[dict[str, str]]]:
        """The messages of so many conversations."""
        earlier: list[list[list[str]]] = []
        for number in range(rows):
            kind = self._random.random()
            turns = earlier[int(self._random.integers(len(earlier)))] if kind < 0.06 and earlier else self.turns()
            if 0.03 <= kind < 0.06:
                turns = [[*turns[0][:-1], "otherwise"], *turns[1:]]
            if number % 50 == 0:
                earlier.append(turns)
            roles = ("user", "assistant")
            yield [{"role": roles[i % 2], "content": " ".join(turn)} for i, turn in enumerate(turns)]


def write_source(rows: int, seed: int) -> Path:
    """JSON lines for `prepare`."""
    _SOURCE.parent.mkdir(parents=True)
    with _SOURCE.open("w", encoding="ascii") as stream:
        stream.writelines(json.dumps({"messages": messages}) + "\n" for messages in _Author(seed).rows(rows))
    return _SOURCE


def write_responses(rows: int, seed: int) -> Path:
    """The table that `encode` reads, and what the target is."""
    shutil.copy(_ROOT / "params.yaml", "params.yaml")
    target = load_profile("smoke").target
    write_json_atomic(Path("data/smoke/target.json"), describe_target(target, resolve_target(target)))
    _RESPONSES.parent.mkdir(parents=True)
    fixed = {"split": "train", "source": "made up", "kind": KEPT, "tools": "[]", "turns": []}
    with table_writer(_RESPONSES, RESPONSES) as add:
        for number, messages in enumerate(_Author(seed).rows(rows)):
            add([fixed | {"conversation_id": value_hash(number), "messages": json.dumps(messages)}])
    return _RESPONSES


def _peak_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def prepare(workers: int) -> dict[str, Any]:
    """Prepare the source."""
    params = DatasetParams(sources=[SourceParams(source=str(_SOURCE))], max_turns=8)
    folder = Path("made")
    folder.mkdir()
    metrics = prepare_dataset(params, folder, Path("scratch"), workers)
    return {name: metrics[name] for name in ("rows", "kept", "reasons")}


def encode(workers: int) -> dict[str, Any]:
    """Run the stage `encode`."""
    from stages.encode import run

    params = load_profile("smoke")
    kept = params.responses.model_copy(update={"mode": "keep"})
    run(Stage("encode", "smoke", params.model_copy(update={"responses": kept}), Machine(threads=workers)))
    metrics = json.loads(Path("metrics/smoke/encode.json").read_text())
    return {name: metrics[name] for name in ("rows", "tokens", "left_out_too_long")}


_STAGES = {"prepare": (write_source, prepare), "encode": (write_responses, encode)}


def measure(stage: str, workers: int) -> dict[str, Any]:
    """Run a stage in this process."""
    before = _peak_mib()
    started, cpu = time.monotonic(), time.process_time()
    found = _STAGES[stage][1](workers)
    seconds = time.monotonic() - started
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return found | {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(sum(one.ru_utime + one.ru_stime for one in usage) - cpu, 2),
        "start_mib": before,
        "peak_mib": _peak_mib(),
        "worker_peak_mib": usage[1].ru_maxrss // 1024,
    }


def measure_apart(stage: str, rows: int, seed: int, workers: int) -> dict[str, Any]:
    """Make the input up, and run the stage in a process of its own."""
    here = Path.cwd()
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(Path(__file__).resolve()), "--stage", stage, "--workers", str(workers)]
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            size = _STAGES[stage][0](rows, seed).stat().st_size
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths[::-1])}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            os.chdir(here)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"input_rows": rows, "input_mib": size >> 20, "rows_per_second": round(rows / found["seconds"])} | found


def main() -> None:
    """Measure each size and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=int, nargs="*", default=[20_000, 100_000, 400_000], metavar="ROWS")
    parser.add_argument("--encode", type=int, nargs="*", default=[20_000, 100_000], metavar="ROWS")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stage", choices=_STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        print(json.dumps(measure(options.stage, options.workers)))
        return
    report: dict[str, Any] = {"machine": machine_description(), "workers": options.workers, "seed": options.seed}
    for stage in _STAGES:
        report[stage] = []
        for rows in getattr(options, stage):
            report[stage].append(measure_apart(stage, rows, options.seed, options.workers))
            print(json.dumps({"stage": stage} | report[stage][-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
