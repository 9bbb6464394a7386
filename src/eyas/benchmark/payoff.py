"""Why a method slows serving down, and where it would pay.

Takes the metrics; gives sentences. What a step yields stands against what it costs: a method pays where its acceptance length is
larger than its step cost. Measured cells come first; only where none pays is one modelled, and called so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eyas.benchmark.methods import EAGLE3, NGRAM, PLAIN
from eyas.benchmark.results import View


@dataclass(frozen=True)
class Point:
    """What a method does with k draft tokens at a concurrency."""

    k: int
    concurrency: int
    speedup: float


def speed_sentence(method: str, measured: Mapping[str, Any]) -> str:
    """Whether a method slows serving down, and why: what a step yields against what it costs."""
    length, cost, speedup = measured["acceptance_length"], measured["step_cost"], measured["speedup"]
    yields = f"a target step yields {length:.2f} tokens and takes {cost:.2f}x the time of a plain one"
    low, high = measured.get("speedup_low"), measured.get("speedup_high")
    span = "" if low is None else f" ({low:.2f} to {high:.2f})"
    if speedup < 1:
        drafting = "looking up and verifying" if method == NGRAM else "drafting and verifying"
        slows = f"{method} slows serving down on this machine, to {speedup:.2f}x{span} of plain decoding"
        if high is not None and high >= 1:
            slows = (
                f"{method} serves {speedup:.2f}x{span} as fast as plain decoding on this machine, which may be noise"
            )
        return f"{slows}: {yields} for {drafting}; it pays from an acceptance length of {cost:.2f} on"
    return f"{method} serves {speedup:.2f}x{span} as fast as plain decoding: {yields}"


def _points(grid: Mapping[str, Any]) -> Iterator[Point]:
    for k, loads in grid.items():
        for load, cell in loads.items():
            yield Point(int(k[1:]), int(load[1:]), cell["speedup"])


def best_measured(grid: Mapping[str, Any]) -> Point:
    """The cell with the largest speed-up."""
    return max(_points(grid), key=lambda p: p.speedup)


def modelled_k(grid: Mapping[str, Any], concurrency: int) -> Point:
    """The number of draft tokens with the largest modelled speed-up at a measured concurrency.

    Acceptance by position is that of the largest k, all of whose positions are measured. A step's cost is a straight line through the measured ones in k:
    a fixed part for plain decoding's own step (1 at k = 0), and as much again for each token drafted and verified.
    """
    load = f"c{concurrency}"
    cells = {int(k[1:]): loads[load] for k, loads in grid.items() if load in loads}
    largest = max(cells)
    shares = [cells[largest]["acceptance_by_position"].get(str(i), 0.0) for i in range(1, largest + 1)]
    # n-gram drafts in some steps alone: the shares of drafted steps are brought to all steps
    total = cells[largest]["acceptance_length"] - 1
    scale = total / sum(shares) if sum(shares) > 0 else 0.0
    costs = {0: 1.0} | {k: cell["step_cost"] for k, cell in cells.items()}
    return max(
        (Point(k, concurrency, (1 + scale * sum(shares[:k])) / _interpolated(costs, k)) for k in range(1, largest + 1)),
        key=lambda p: p.speedup,
    )


def _interpolated(costs: Mapping[int, float], k: int) -> float:
    for before, after in pairwise(sorted(costs)):
        if before <= k <= after:
            return costs[before] + (costs[after] - costs[before]) * (k - before) / (after - before)
    raise ValueError(f"k = {k} lies outside of what was measured")


def _where(method: str, grid: Mapping[str, Any]) -> str:
    best = best_measured(grid)
    loads = sorted({point.concurrency for point in _points(grid)})
    if best.speedup > 1:
        return f"with k = {best.k} at a batch of {best.concurrency} it does ({best.speedup:.2f}x, measured)"
    modelled = max((modelled_k(grid, load) for load in loads), key=lambda p: p.speedup)
    nowhere = (
        f"no measured k and batch size pays (best: k = {best.k} at a batch of {best.concurrency}, {best.speedup:.2f}x)"
    )
    if modelled.speedup > 1:
        return (
            f"{nowhere}; modelled from the step's cost, k = {modelled.k} at a batch of {modelled.concurrency} would "
            f"give {modelled.speedup:.2f}x, which is worth measuring"
        )
    smaller = "" if 1 in loads else "; a batch size of 1 was not measured: add it to benchmark.concurrency"
    return f"{nowhere}, nor does a smaller k by the model of a step's cost (k = {modelled.k}: {modelled.speedup:.2f}x){smaller}"


def advice(view: View, metrics: Mapping[str, Any]) -> list[str]:
    """A sentence for each method that drafts, the trained head first."""
    told = []
    for method in sorted(view.methods, key=lambda name: name != EAGLE3):
        if method == PLAIN:
            continue
        sentence = speed_sentence(method, metrics[method])
        if metrics[method]["speedup"] < 1:
            sentence += f"; {_where(method, metrics['grid'][method])}"
        told.append(sentence)
    return told
