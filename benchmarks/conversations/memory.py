"""How fast `prepare` reads conversations, and how much memory it takes, by the number of rows.

    python benchmarks/conversations/memory.py --rows 20000 100000 400000 --out benchmarks/conversations/results/memory.json

The rows are made up: two or three user turns with answers, four turns of 40 words on average, out of 20,000 words as frequent as
those of a language; 3 in 100 are copies of earlier rows, 3 in 100 near copies, and 10 in 100 open with one of a few instructions,
which gives the search for near copies many pairs to look at. Each size runs in a process of its own. `peak_mib` is that process's
largest resident set, `worker_peak_mib` the largest of one that it started.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from eyas.conversations.dataset import prepare_dataset
from eyas.params import DatasetParams, SourceParams
from eyas.stage import machine_description

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

    def write(self, rows: int, stream: TextIO) -> None:
        """Write JSON lines."""
        earlier: list[list[list[str]]] = []
        for number in range(rows):
            kind = self._random.random()
            turns = earlier[int(self._random.integers(len(earlier)))] if kind < 0.06 and earlier else self.turns()
            if 0.03 <= kind < 0.06:
                turns = [[*turns[0][:-1], "otherwise"], *turns[1:]]
            if number % 50 == 0:
                earlier.append(turns)
            roles = ("user", "assistant")
            messages = [{"role": roles[i % 2], "content": " ".join(turn)} for i, turn in enumerate(turns)]
            stream.write(json.dumps({"messages": messages}) + "\n")


def _peak_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def measure(source: str, workers: int) -> dict[str, Any]:
    """Prepare one source in this process."""
    params = DatasetParams(sources=[SourceParams(source=source)], max_turns=8)
    folder = Path("made")
    folder.mkdir()
    before = _peak_mib()
    started, cpu = time.monotonic(), time.process_time()
    metrics = prepare_dataset(params, folder, Path("scratch"), workers)
    seconds = time.monotonic() - started
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "rows": metrics["rows"],
        "kept": metrics["kept"],
        "reasons": metrics["reasons"],
        "seconds": round(seconds, 2),
        "rows_per_second": round(metrics["rows"] / seconds),
        "cpu_seconds": round(sum(one.ru_utime + one.ru_stime for one in usage) - cpu, 2),
        "start_mib": before,
        "peak_mib": _peak_mib(),
        "worker_peak_mib": usage[1].ru_maxrss // 1024,
    }


def main() -> None:
    """Measure each size and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 100_000, 400_000])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        print(json.dumps(measure(options.source, options.workers)))
        return
    results = []
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "data" / "input" / "made_up.jsonl"
            path.parent.mkdir(parents=True)
            with path.open("w", encoding="ascii") as stream:
                _Author(options.seed).write(rows, stream)
            script = [sys.executable, str(Path(__file__).resolve()), "--source", str(path.relative_to(name))]
            done = subprocess.run(
                [*script, "--workers", str(options.workers)], cwd=name, stdout=subprocess.PIPE, text=True, check=True
            )
            results.append(json.loads(done.stdout) | {"input_mib": path.stat().st_size >> 20})
            print(json.dumps(results[-1]))
    if options.out:
        report = {"machine": machine_description(), "workers": options.workers, "seed": options.seed, "sizes": results}
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
