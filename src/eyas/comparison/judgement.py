"""Better, worse, or not distinguishable: one figure of two runs.

Takes counts by prompt of both, or the two figures with their 95 % intervals; gives a `Judgement`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eyas.benchmark.statistics import Verdict, ratio, verdict

_LOWER_IS_BETTER = ("ttft", "tpot", "step_cost", "waste", "seconds", "loss", "heldout_loss", "looped", "final_loss")
_TRAVELS = ("acceptance_", "heldout_acceptance")


@dataclass(frozen=True)
class Figure:
    """A measured value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Judgement:
    """What is said of the second run against the first."""

    word: Verdict
    paired: bool


def lower_is_better(key: str) -> bool:
    """Whether a figure of this name is a cost."""
    return key.startswith(_LOWER_IS_BETTER)


def travels(key: str) -> bool:
    """Whether a figure of this name is the same on any machine: acceptance is, speed is not."""
    return key.startswith(_TRAVELS)


def judge_counts(before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]) -> Judgement:
    """Acceptance lengths, paired by prompt.

    Args:
        before: emitted tokens and target steps by prompt.
        after: the same prompts of the second run; a prompt that one side lacks is left out.
    """
    shared = [name for name in before if name in after]
    a, b = ([(side[name][0], side[name][1]) for name in shared] for side in (before, after))
    return Judgement(verdict(b, a), paired=True)


def acceptance_length(counts: Mapping[str, Sequence[int]]) -> float:
    """Emitted tokens per target step of counts by prompt."""
    return ratio([(c[0], c[1]) for c in counts.values()])


def judge_figures(before: Figure, after: Figure, *, lower_better: bool = False) -> Judgement:
    """Two figures by their intervals, as of independent samples.

    The interval of the difference is made from both intervals' halves (MOVER: Zou and Donner 2008), which is narrower than
    "do they overlap" and keeps 95 % where the halves are unequal.
    """
    difference = after.value - before.value
    low = difference - math.hypot(after.value - after.low, before.high - before.value)
    high = difference + math.hypot(after.high - after.value, before.value - before.low)
    if low > 0:
        return Judgement("worse" if lower_better else "better", paired=False)
    if high < 0:
        return Judgement("better" if lower_better else "worse", paired=False)
    return Judgement("not distinguishable", paired=False)
