"""What was measured: cells of method, k, concurrency and set, each served some times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from eyas.benchmark.acceptance import Trace
from eyas.benchmark.prompts import Prompt


@dataclass(frozen=True)
class Repeat:
    """A set served once.

    Attributes:
        seconds: wall time from the first prompt to the last token, prefills included, warm-up and start excluded.
        traces: what each prompt's steps did, in the order of the prompts.
        step_s: median seconds of a step that only decoded, at full batch; None where there was none.
    """

    seconds: float
    traces: list[Trace]
    step_s: float | None = None


class Cell(NamedTuple):
    """What was measured: a method with k draft tokens, at a concurrency, on a set."""

    method: str
    k: int
    concurrency: int
    set: str


@dataclass(frozen=True)
class Served:
    """A cell, served some times.

    Attributes:
        prompts: what was served, in order.
        repeats: each time; the same index is the same round for every cell.
    """

    prompts: list[Prompt]
    repeats: list[Repeat]

    @property
    def traces(self) -> list[Trace]:
        """What the first repeat's steps did; the same prompt gives the same steps again, but for numeric ties."""
        return self.repeats[0].traces


Runs = Mapping[Cell, Served]
