"""What speculation must achieve on this machine before it pays, from the times of steps.

Per sequence, plain decoding gives one token a step of ``t1``; speculative decoding gives the acceptance length (AL) in tokens a
step of ``t_step = verify + draft``. They are equal at AL = t_step / t1, and AL is at most k + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

_MIN_STEPS = 5
GOALS = (1.0, 1.2, 1.5)
_STEADY = 0.15


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: the median, the quartiles, and how many steps they come from."""

    median: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class BreakEven:
    """One batch size and k; times in seconds a step.

    Attributes:
        verify: a step that verifies k + 1 tokens with n-gram drafts, which cost nearly nothing; None where too few were seen.
        step: a step that drafts k tokens with the head and verifies k + 1.
        acceptance_length: of the untrained head; it only shows that the step's time is no trained head's.
    """

    batch_size: int
    k: int
    plain: StepTime
    verify: StepTime | None
    step: StepTime
    acceptance_length: float

    @property
    def draft_seconds(self) -> float | None:
        """Seconds to draft k tokens: the step less verification; never below zero."""
        return None if self.verify is None else max(0.0, self.step.median - self.verify.median)

    def needed(self, speedup: float = 1.0) -> float:
        """The acceptance length at which decoding is ``speedup`` times as fast as plain."""
        return speedup * self.step.median / self.plain.median

    def reachable(self, speedup: float = 1.0) -> bool:
        """Whether that length is one that k drafts can give at all."""
        return self.needed(speedup) <= self.k + 1


def step_time(batch: dict[str, Any]) -> StepTime | None:
    """The time of the steps that drafted k tokens in (nearly) every sequence; None where there are fewer than five."""
    kept = [s for s, whole in zip(batch["seconds"], batch["drafted_all"], strict=True) if whole]
    if len(kept) < _MIN_STEPS:
        return None
    low, _, high = quantiles(kept, n=4, method="inclusive")
    return StepTime(median(kept), low, high, len(kept))


def acceptance_length(batch: dict[str, Any], batch_size: int) -> float:
    """Tokens a sequence and step."""
    return float(sum(batch["tokens"])) / (batch_size * len(batch["tokens"]))


def unsteady_words(rows: Sequence[BreakEven]) -> str | None:
    """A warning where the middle half of a kind of step spreads over more than 15 % of its median; None where all are steady."""
    times = [time for row in rows for time in (row.plain, row.verify, row.step) if time is not None]
    spread = max((time.high - time.low) / time.median for time in times)
    if spread <= _STEADY:
        return None
    return (
        f"unsteady: the middle half of the steps spreads over up to {spread:.0%} of the median; something else may use this "
        "machine, so measure again when it is quiet before you rely on these figures"
    )


def words(row: BreakEven) -> str:
    """What the figures mean, in a sentence."""
    start, best = f"batch {row.batch_size}, k {row.k}: ", (row.k + 1) / row.needed()
    if not row.reachable():
        return start + f"cannot pay: needs {row.needed():.2f} tokens a step, k + 1 = {row.k + 1} is the most there is"
    return start + f"pays above {row.needed():.2f} tokens a step; {best:.2f}x if every draft were accepted"


def measured_words(row: BreakEven, metrics: dict[str, Any]) -> str | None:
    """The trained head's measured acceptance length and speed-up against these figures; None where nothing was measured."""
    head = metrics.get("eagle3") or {}
    length, speedup = head.get("acceptance_length"), head.get("speedup")
    if length is None or speedup is None:
        return None
    expected = length / row.needed()
    return (
        f"the profile's trained head: {length:.2f} tokens a step, so {expected:.2f}x expected here; "
        f"its benchmark, prefill included, measured {speedup:.2f}x"
    )
