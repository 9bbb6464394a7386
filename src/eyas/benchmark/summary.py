"""The benchmark in a table and a few sentences, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from eyas.benchmark.methods import EAGLE3, METHODS, NGRAM
from eyas.benchmark.prompts import HELDOUT
from eyas.console import console


def speed_sentence(method: str, measured: Mapping[str, Any]) -> str:
    """Whether a method slows serving down, and why: what a step yields against what it costs."""
    length, cost, speedup = measured["acceptance_length"], measured["step_cost"], measured["speedup"]
    yields = f"a target step yields {length:.2f} tokens and takes {cost:.2f}x the time of a plain one"
    if speedup < 1:
        drafting = "drafting and verifying" if method == EAGLE3 else "looking up and verifying"
        return (
            f"{method} slows serving down on this machine, to {speedup:.2f}x of plain decoding: {yields} for {drafting}; "
            f"it pays from an acceptance length of {cost:.2f} on"
        )
    return f"{method} serves {speedup:.2f}x as fast as plain decoding: {yields}"


def _row(method: str, m: Mapping[str, Any]) -> list[str]:
    return [
        method,
        f"{m['acceptance_length']:.2f} ({m['acceptance_length_low']:.2f}-{m['acceptance_length_high']:.2f})",
        " ".join(f"{share:.2f}" for share in m["acceptance_by_position"].values()),
        f"{m['output_tokens_per_s']:,.1f}",
        f"{m['speedup']:.2f}x",
        f"{m['identical_share']:.0%}",
        f"{m['looped_share']:.0%}",
    ]


def print_summary(
    metrics: Mapping[str, Any], verdicts: Mapping[str, str], differences: Sequence[Mapping[str, Any]]
) -> None:
    """Print the held-out prompts' and every set's table, the verdicts, and whether and why a method slows serving."""
    for name, methods in {HELDOUT: metrics, **metrics["sets"]}.items():
        console.print(f"\n[bold]{name}[/], {methods[EAGLE3]['prompts']} prompts")
        table = Table(box=None, pad_edge=False)
        for heading in ("method", "tokens/step (95 %)", "by position", "tokens/s", "speed", "identical", "looped"):
            table.add_column(heading, no_wrap=True)
        for method in METHODS:
            table.add_row(*_row(method, methods[method]))
        console.print(table)
    for pair, words in verdicts.items():
        console.print(f"{pair}, by acceptance length: {words}", soft_wrap=True)
    if differences:
        earliest = min(differences, key=lambda d: d["position"])
        console.print(
            f"{len(differences)} answers differ from plain decoding's; the earliest, {earliest['method']} on "
            f"{earliest['set']} {earliest['prompt_id']}, at token {earliest['position']}",
            soft_wrap=True,
        )
    for method in (NGRAM, EAGLE3):
        console.print(speed_sentence(method, metrics[method]), soft_wrap=True)
