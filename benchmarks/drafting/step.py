"""Training steps of a profile on this machine, tokens/s: its own head, and others on the same rows.

    python benchmarks/drafting/step.py smoke --out FILE        at the root of a checkout whose `vocab` has run
    python benchmarks/drafting/step.py smoke --profile         what the profile's own step spends its time on

Each head (draft vocabulary, feed-forward width) takes the first steps of the first epoch with the project's reader, gradients and optimiser;
the heads take turns, and medians over the rounds count. Nothing is written below ``data``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import torch
from common import note, print_table, write_report

from eyas.drafting.data import by_key
from eyas.drafting.feeding import device_batches
from eyas.drafting.global_batch import Steps
from eyas.drafting.gradients import Together
from eyas.drafting.heads import make_head
from eyas.drafting.inputs import load_inputs
from eyas.drafting.ranks import Ranks, training_device
from eyas.drafting.state import TrainingState
from eyas.drafting.stepping import gradients
from eyas.params import Machine, Profile, load_machine, load_profile
from eyas.stage import process_environment
from eyas.store.batches import PackedBatches
from eyas.targets.resolve import open_target
from eyas.vocabulary import choose, load_vocabulary

_WARM_UP = 4


def measure(params: Profile, data: Path, machine: Machine, steps: int, head: tuple[int, int] | None) -> float:
    """Tokens/s of so many steps behind the warm-up; the profile's own head without ``head``."""
    made = load_inputs(data, machine, params.target, params.draft, params.train, params.responses.temperature, 1)
    model = made.model
    if head is not None:
        directory, target = open_target(params.target, data / "target.json")
        model = make_head(
            params.draft.model_copy(update={"intermediate_size": head[1]}),
            directory,
            target["source"],
            choose(load_vocabulary(data / "vocab" / "vocab.safetensors").counts_V, head[0], []),
            made.data.reader.spec.layers,
            ttt_steps=params.train.ttt_steps,
            seed=params.train.seed,
        )
    rows, device, ranks = by_key(made.data.train), training_device(), Ranks()
    plan = PackedBatches(made.data.reader, list(rows), params.train.pack_tokens, params.train.seed, 0)
    epoch = Steps(plan, params.train.packs_per_step, rows)
    model.to(device).train()
    state, together = TrainingState(model, params.train), Together(model)
    with (
        made.data.reader,
        device_batches(epoch.share_of(ranks, 0), rows, device, made.data.workers, params.train.ttt_steps) as batches,
    ):
        for place in range(_WARM_UP + steps):
            if place == _WARM_UP:
                began = time.perf_counter()
            gradients(
                together,
                batches,
                epoch.shares(place, ranks),
                epoch.label_counts(place, params.train.ttt_steps),
                len(epoch.packs(place)),
                params.train,
                ranks,
                (False, False),
                state.weights,
            )
            for optimizer in state.optimizers:
                optimizer.step()
        seconds = time.perf_counter() - began
    return sum(epoch.slots(place) for place in range(_WARM_UP, _WARM_UP + steps)) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--heads", nargs="*", default=["8192:1536", "3072:512"], help="draft vocabulary and feed-forward width"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    params, data, machine = load_profile(arguments.name), Path("data") / arguments.name, load_machine()
    environment = process_environment(machine)
    if any(os.environ.get(name) != value for name, value in environment.items()):  # as a stage's process has it
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
    if arguments.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            measure(params, data, machine, arguments.steps, None)
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=40))
        return
    heads: dict[str, tuple[int, int]] = {}
    for text in arguments.heads:
        vocabulary, width = text.split(":")
        heads[text] = (int(vocabulary), int(width))
    found: dict[str, list[float]] = {text: [] for text in heads}
    for _ in range(arguments.rounds):
        for text, head in heads.items():
            found[text].append(measure(params, data, machine, arguments.steps, head))
            note(f"{text}: {found[text][-1]:,.0f} tokens/s")
    results: dict[str, Any] = {
        text: {"tokens_per_s": values, "median": statistics.median(values)} for text, values in found.items()
    }
    write_report(arguments.out, data, {"profile": arguments.name, "steps": arguments.steps, "heads": results})
    print_table(("head", "tokens/s"), [[text, result["median"]] for text, result in results.items()])


if __name__ == "__main__":
    main()
