"""What launching costs a training step on a GPU: forward and backward pass of one batch, launched anew and replayed as a CUDA graph.

    python benchmarks/gpu/graphs.py --out FILE

The replayed graph knows its one batch's shapes, which real packs do not share, so that the difference is what graphs could give at
most. Both pass the same batch through the same weights by turns; the median over the turns counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from common import note, print_table, write_report
from step import DEPTHS, make_batches, planned_loss
from training import SHAPES, make_model

from eyas.drafting.gradients import Together
from eyas.drafting.planning import make_plan

_WARM_UP = 3


def measure(name: str, share: float, float8: bool, passes: int, rounds: int) -> dict[str, Any]:
    shape = SHAPES[name]
    model = make_model(shape, torch.device("cuda"))
    batch = make_batches(shape, share, 1)[0]
    plan = make_plan(batch, DEPTHS)
    together = Together(model, float8)

    def launched() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = planned_loss(together, batch, plan)
        loss.backward()
        return loss.detach()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP):
            expected = launched().item()
    torch.cuda.current_stream().wait_stream(aside)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = launched()
    captured = {weight: weight.grad for weight in model.parameters()}
    graph.replay()
    if loss.item() != expected:
        raise RuntimeError(f"the graph's loss is {loss.item()}, launched it was {expected}")
    ways: dict[str, Callable[[], Any]] = {"launched": launched, "replayed": graph.replay}
    milliseconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(passes):
                run()
            torch.cuda.synchronize()
            milliseconds[way].append((time.perf_counter() - began) / passes * 1e3)
    del captured  # the graph writes there
    medians = {way: statistics.median(values) for way, values in milliseconds.items()}
    note(f"{name}, {share:.0%} supervised, float8 {float8}: {medians}")
    return {"milliseconds": milliseconds, "medians": medians, "loss": expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-8b", "kimi-k2.5"])
    parser.add_argument("--share", type=float, default=1.0, help="supervised share")
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.shapes:
        for kind in ("bfloat16", "float8"):
            results[f"{name}, {kind}"] = measure(
                name, arguments.share, kind == "float8", arguments.passes, arguments.rounds
            )
            torch.cuda.empty_cache()
            write_report(arguments.out, Path(), {"results": results})
    print_table(
        ("shape, products", "launched, ms", "replayed, ms", "ratio"),
        [
            [key, *found["medians"].values(), found["medians"]["launched"] / found["medians"]["replayed"]]
            for key, found in results.items()
        ],
    )


if __name__ == "__main__":
    main()
