"""Whether drafting changes the answers, and whether a change is a numeric tie or a fault.

Takes what was served; gives each answer that is not plain decoding's, with its first other token and how close that was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.benchmark.methods import PLAIN
from eyas.benchmark.process import EngineProcess
from eyas.benchmark.runs import Runs

_TIE = {"float32": 1e-3}  # in log-probability
_TIE_16 = 0.25  # two steps of bfloat16 at logits of 16 to 32


@dataclass(frozen=True)
class Difference:
    """An answer that is not plain decoding's.

    Attributes:
        position: index of the first other token; the shorter answer's end is one.
        text: prompt and answer up to there.
        own: plain decoding's token, None at its end.
        other: the method's token.
        gap: between their log-probabilities, by plain decoding; None where an answer ended there or nobody asked.
    """

    method: str
    k: int
    concurrency: int
    set: str
    prompt_id: str
    position: int
    text: list[int]
    own: int | None
    other: int | None
    gap: float | None = None

    def tied(self, dtype: str) -> bool:
        """Whether rounding may have chosen between the two."""
        return self.gap is not None and self.gap <= _TIE.get(dtype, _TIE_16)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two answers differ (the shorter one's end is a difference), or None."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def find_differences(runs: Runs) -> list[Difference]:
    """Every answer of the first repeat that is not plain decoding's at the same concurrency, without its gap."""
    found = []
    for cell, served in runs.items():
        plain = runs[cell._replace(method=PLAIN, k=0)]
        for prompt, trace, own in zip(served.prompts, served.traces, plain.traces, strict=True):
            position = first_difference(trace.token_ids, own.token_ids)
            if position is not None:
                sides = (t.token_ids[position] if position < len(t.token_ids) else None for t in (own, trace))
                text = [*prompt.token_ids, *own.token_ids[:position]]
                where = (cell.method, cell.k, cell.concurrency, cell.set, prompt.prompt_id)
                found.append(Difference(*where, position, text, *sides))
    return found


def with_gaps(differences: Sequence[Difference], plain: EngineProcess) -> list[Difference]:
    """The differences, each with its gap where both answers have a token there.

    Raises:
        EyasError: the engine failed.
    """
    asked = [d for d in differences if d.own is not None and d.other is not None]
    gaps = plain.gaps([{"text": d.text, "own": d.own, "other": d.other} for d in asked]) if asked else []
    by_case = {id(d): gap for d, gap in zip(asked, gaps, strict=True)}
    return [replace(d, gap=by_case.get(id(d))) for d in differences]


def difference_rows(differences: Sequence[Difference], dtype: str) -> list[Mapping[str, Any]]:
    """For the provenance: where, how close, and whether that is a tie."""
    names = ("method", "k", "concurrency", "set", "prompt_id", "position", "gap")
    return [{name: getattr(d, name) for name in names} | {"tied": d.tied(dtype)} for d in differences]
