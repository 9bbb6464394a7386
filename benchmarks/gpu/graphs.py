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

_WARM_UP, _PASSES, _ROUNDS = 3, 6, 5


def measure(name: str, float8: bool) -> dict[str, Any]:
    """One batch, all of it supervised, both ways."""
    shape = SHAPES[name]
    model = make_model(shape, torch.device("cuda"))
    batch = make_batches(shape, 1.0, 1)[0]
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
    graph.replay()
    if loss.item() != expected:
        raise RuntimeError(f"the graph's loss is {loss.item()}, launched it was {expected}")
    ways: dict[str, Callable[[], Any]] = {"launched": launched, "replayed": graph.replay}
    milliseconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, run in ways.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(_PASSES):
                run()
            torch.cuda.synchronize()
            milliseconds[way].append((time.perf_counter() - began) / _PASSES * 1e3)
    medians = {way: statistics.median(values) for way, values in milliseconds.items()}
    note(f"{name}, float8 {float8}: {medians}")
    return {"milliseconds": milliseconds, "medians": medians, "loss": expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    results: dict[str, dict[str, Any]] = {}
    for name in ("qwen3-8b", "kimi-k2.5"):
        for kind in ("bfloat16", "float8"):
            results[f"{name}, {kind}"] = measure(name, kind == "float8")
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
