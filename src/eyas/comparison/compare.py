"""Two runs, figure by figure: the verdicts, the other figures that differ, and whether a gate lets the second one through.

Takes two `Side`s; gives a `Comparison`. A figure has a verdict if its metrics file has ``<key>_low`` and ``<key>_high`` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eyas.comparison.changes import Changes, changes, leaves
from eyas.comparison.judgement import Figure, judge_counts, judge_figures, lower_is_better, travels
from eyas.comparison.sides import Side

_HELDOUT = "heldout"
_HEAD = "eagle3"
# what the head is for; grid and categories cut the same answers finer, and would only add chances of a false alarm
_GATED = {
    ("train", "heldout_acceptance_length"),
    ("benchmark", _HEAD, "acceptance_length"),
    ("benchmark", _HEAD, "output_tokens_per_s"),
}


@dataclass(frozen=True)
class Line:
    """One judged figure: where it stands, both values, the word, and how the word was found.

    Attributes:
        how: ``paired by prompt``, ``by intervals``, ``other machine`` (shown, never gated) or ``missing``.
    """

    name: str
    before: Figure
    after: Figure | None
    word: str
    how: str
    gated: bool


@dataclass(frozen=True)
class Comparison:
    """The whole answer."""

    before: str
    after: str
    lines: list[Line]
    others: dict[str, tuple[Any, Any]]
    changes: Changes

    @property
    def regressions(self) -> list[Line]:
        """Gated figures that are worse beyond noise, or gone."""
        return [line for line in self.lines if line.gated and line.word in ("worse", "missing")]

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "regressions": [line.name for line in self.regressions]}


def _figures(metrics: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Figure]]:
    """Path and value of each number that has an interval beside it."""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _figures(value, (*path, str(key)))
        elif f"{key}_low" in metrics and f"{key}_high" in metrics:
            yield (*path, key), Figure(value, metrics[f"{key}_low"], metrics[f"{key}_high"])


def _place(path: tuple[str, ...]) -> tuple[str, str] | None:
    """Method and set of a figure ``(stage, method, key)`` or ``(stage, "sets", set, method, key)``."""
    if len(path) == 3:
        return path[1], _HELDOUT
    if len(path) == 5 and path[1] == "sets":
        return path[3], path[2]
    return None


def compare(a: Side, b: Side) -> Comparison:
    """Judge ``b`` against ``a``."""
    before, after = dict(_figures(a.metrics)), dict(_figures(b.metrics))
    changed = changes(a, b)
    # plain decoding's acceptance length is 1 by definition, which needs no verdict
    judged = {path: figure for path, figure in before.items() if not _by_definition(path)}
    lines = [_line(path, figure, after.get(path), a, b, bool(changed.machine)) for path, figure in judged.items()]
    lines.sort(key=lambda line: not line.gated)
    return Comparison(a.name, b.name, lines, _others(a, b), changed)


def _line(path: tuple[str, ...], before: Figure, after: Figure | None, a: Side, b: Side, moved: bool) -> Line:
    name, key, place = ".".join(path), path[-1], _place(path)
    gated = _is_gated(path) and (travels(key) or not moved)
    if after is None:
        return Line(name, before, None, "missing", "missing", gated)
    if not travels(key) and moved:
        return Line(name, before, after, "–", "other machine", gated=False)
    if key == "acceptance_length" and place in a.counts and place in b.counts:
        said = judge_counts(a.counts[place], b.counts[place])
    else:
        said = judge_figures(before, after, lower_better=lower_is_better(key))
    return Line(name, before, after, said.word, "paired by prompt" if said.paired else "by intervals", gated)


def _by_definition(path: tuple[str, ...]) -> bool:
    return "plain" in path and path[-1] == "acceptance_length"


def _is_gated(path: tuple[str, ...]) -> bool:
    of_set = len(path) == 5 and path[1] == "sets" and path[3:] == (_HEAD, "acceptance_length")
    return path in _GATED or of_set


def _others(a: Side, b: Side) -> dict[str, tuple[Any, Any]]:
    """Figures without an interval that differ: shown, since nothing says how much of the difference is noise."""
    before, after = dict(leaves(a.metrics)), dict(leaves(b.metrics))
    judged = {".".join(path) for path, _ in _figures(a.metrics)}
    judged |= {f"{name}_{end}" for name in judged for end in ("low", "high")}
    return {
        key: (before.get(key), after.get(key))
        for key in sorted({*before, *after} - judged)
        if before.get(key) != after.get(key)
    }
