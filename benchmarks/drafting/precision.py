"""Whole trainings of a profile in several compute types: held-out acceptance of each, over some seeds.

    python benchmarks/drafting/precision.py smoke --out FILE        at the root of a checkout whose `vocab` has run

The profile's own rows, head and settings but for `train.autocast` and `train.seed`. Two trainings at a time share the cores, so their
speeds say little. Nothing is written below ``data``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import torch
from common import cores, note, print_table, write_report

from eyas.drafting.inputs import load_inputs
from eyas.drafting.records import epoch_row
from eyas.drafting.training import fit
from eyas.params import TrainParams, load_machine, load_profile
from eyas.stage import process_environment

_AT_A_TIME = 2


def trained(name: str, seed: int, autocast: str) -> dict[str, Any]:
    """The epochs of one training, and the kept one."""
    torch.set_num_threads(max(1, cores() // _AT_A_TIME))
    profile, machine = load_profile(name), load_machine()
    params = TrainParams(**(profile.train.model_dump() | {"autocast": autocast, "seed": seed}))
    temperature = profile.responses.temperature
    made = load_inputs(Path("data") / name, machine, profile.target, profile.draft, params, temperature, _AT_A_TIME)
    with made.data.reader, tempfile.TemporaryDirectory() as work:
        training = fit(made.model, made.data, params, made.target, temperature, Path(work) / "train", machine)
    best = epoch_row(training.best)
    note(f"{autocast}, seed {seed}: {best}")
    return {"best": best, "epochs": [epoch_row(epoch) for epoch in training.epochs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--types", nargs="+", default=["bfloat16", "float8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    environment = process_environment(load_machine())
    if any(os.environ.get(name) != value for name, value in environment.items()):  # as a stage's process has it
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
    jobs = list(itertools.product(arguments.seeds, arguments.types))
    with ProcessPoolExecutor(_AT_A_TIME, get_context("spawn")) as pool:
        running = [pool.submit(trained, arguments.name, seed, autocast) for seed, autocast in jobs]
        trainings = [future.result() for future in running]
    found: dict[str, Any] = {}
    for (seed, autocast), training in zip(jobs, trainings, strict=True):
        found.setdefault(autocast, {})[f"seed {seed}"] = training
    means = {
        autocast: statistics.mean(training["best"]["heldout_acceptance_length"] for training in by_seed.values())
        for autocast, by_seed in found.items()
    }
    write_report(arguments.out, Path("data") / arguments.name, {"mean_acceptance_length": means, "trainings": found})
    print_table(
        ("type", *(f"seed {seed}" for seed in arguments.seeds), "mean acceptance length"),
        [
            [autocast, *(t["best"]["heldout_acceptance_length"] for t in by_seed.values()), means[autocast]]
            for autocast, by_seed in found.items()
        ],
    )


if __name__ == "__main__":
    main()
