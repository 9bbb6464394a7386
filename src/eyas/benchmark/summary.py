"""The benchmark in a table and a few sentences, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from eyas.benchmark.methods import EAGLE3
from eyas.benchmark.prompts import HELDOUT
from eyas.console import console


def _spread(measured: Mapping[str, Any], key: str, form: str) -> str:
    low, high = measured.get(f"{key}_low"), measured.get(f"{key}_high")
    span = "" if low is None or low == high else f" ({low:{form}}-{high:{form}})"
    return f"{measured[key]:{form}}{span}"


def _row(method: str, m: Mapping[str, Any]) -> list[str]:
    return [
        method,
        _spread(m, "acceptance_length", ".2f"),
        " ".join(f"{share:.2f}" for share in m["acceptance_by_position"].values()),
        f"{m['output_tokens_per_s']:,.1f}",
        _spread(m, "speedup", ".2f"),
        f"{m['identical_share']:.0%}",
    ]


_HEADINGS = ("method", "tokens/step", "by position", "tokens/s", "speed-up", "same")


def _loops(measured: Mapping[str, Any]) -> str:
    looped = max(m["looped"] for m in measured.values() if isinstance(m, Mapping) and "looped" in m)
    return f", up to {looped} answers end in a loop, which flatters every method" if looped else ""


def _tell_differences(differences: Sequence[Mapping[str, Any]]) -> None:
    tied = sum(d["tied"] for d in differences)
    earliest = min(differences, key=lambda d: (d["tied"], d["position"]))
    gap = "unknown" if earliest["gap"] is None else f"{earliest['gap']:.4f}"
    console.print(
        f"{len(differences)} answers differ from plain decoding's, {tied} of them by a numeric tie; the first{' that is no tie' if tied < len(differences) else ''}: "
        f"{earliest['method']} (k = {earliest['k']}) on {earliest['set']} {earliest['prompt_id']}, token {earliest['position']}, "
        f"gap of log-probabilities {gap}",
        soft_wrap=True,
        markup=False,
    )


def print_summary(
    metrics: Mapping[str, Any],
    methods: Sequence[str],
    verdicts: Mapping[str, str],
    speed_verdicts: Mapping[str, str],
    differences: Sequence[Mapping[str, Any]],
    advice: Sequence[str],
) -> None:
    """Print the held-out prompts' and every set's table, the verdicts, what differs, and whether and why a method slows serving."""
    for name, measured in {HELDOUT: metrics, **metrics["sets"]}.items():
        console.print(f"\n[bold]{name}[/], {measured[EAGLE3]['prompts']} prompts, 95 % intervals{_loops(measured)}")
        table = Table(box=None, pad_edge=False)
        for heading in _HEADINGS:
            table.add_column(heading, no_wrap=True)
        for method in methods:
            table.add_row(*_row(method, measured[method]))
        console.print(table)
    for pair, words in verdicts.items():
        console.print(f"{pair}: {words} by acceptance length, {speed_verdicts[pair]} by speed", soft_wrap=True)
    if differences:
        _tell_differences(differences)
    for sentence in advice:
        console.print(sentence, soft_wrap=True, markup=False)
