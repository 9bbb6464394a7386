"""All cells in numbers and words: ``benchmark.json``, ``acceptance.csv``, the outputs' rows and the verdicts.

Takes `Runs`; the form is described in ``docs/benchmark.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.benchmark.losslessness import Difference
from eyas.benchmark.measures import Noises, by_category, counts, measure, speed_verdict, speeds, speedups
from eyas.benchmark.methods import EAGLE3, PLAIN
from eyas.benchmark.prompts import HELDOUT
from eyas.benchmark.runs import Cell, Runs, Served
from eyas.benchmark.statistics import Verdict, noise_of, verdict

_GRID = (
    *("acceptance_length", "acceptance_length_low", "acceptance_length_high", "acceptance_by_position"),
    *("output_tokens_per_s", "output_tokens_per_s_low", "output_tokens_per_s_high"),
    *("speedup", "speedup_low", "speedup_high", "step_cost", "step_ms_p50"),
    *("tpot_ms_p50", "tpot_ms_p50_low", "tpot_ms_p50_high", "ttft_ms_p50", "ttft_ms_p50_low", "ttft_ms_p50_high"),
)


@dataclass(frozen=True)
class View:
    """The runs, and which of their cells the main figures come from.

    Attributes:
        methods: in the order in which they are told, plain decoding first.
        k: number of draft tokens.
        concurrency: prompts at a time.
    """

    runs: Runs
    methods: Sequence[str]
    k: int
    concurrency: int

    def main(self, method: str, name: str = HELDOUT) -> Served:
        """What the main figures of a method on a set come from."""
        return self.runs[Cell(method, 0 if method == PLAIN else self.k, self.concurrency, name)]

    def plain_of(self, cell: Cell) -> Served:
        """Plain decoding on the same set at the same concurrency."""
        return self.runs[cell._replace(method=PLAIN, k=0)]

    @property
    def sets(self) -> list[str]:
        """The sets, the held-out prompts first."""
        return list(dict.fromkeys(cell.set for cell in self.runs))


def noises(runs: Runs) -> Noises:
    """Noise between repeats, pooled over all cells."""
    drafting = [(s, runs[c._replace(method=PLAIN, k=0)]) for c, s in runs.items() if c.method != PLAIN]
    return Noises(
        noise_of([speeds(served) for served in runs.values()]),
        noise_of([speedups(served, plain) for served, plain in drafting]),
    )


def benchmark_metrics(
    view: View, differences: Sequence[Difference], dtype: str, *, interleaved: bool
) -> dict[str, Any]:
    """The content of ``benchmark.json``.

    Raises:
        EyasError: no answer of a cell has more than one token.
    """
    noise = noises(view.runs)
    measured = {
        cell: measure(served, view.plain_of(cell), cell.k, noise)
        | _differences([d for d in differences if (d.method, d.k, d.concurrency, d.set) == cell], dtype)
        for cell, served in view.runs.items()
    }
    values: dict[str, Any] = {
        "interleaved": int(interleaved),
        "repeats": min(len(served.repeats) for served in view.runs.values()),
        "sets": {},
        "categories": {},
        "grid": {},
    }
    for cell, numbers in measured.items():
        if cell.concurrency == view.concurrency and cell.k in (0, view.k):
            place = values if cell.set == HELDOUT else values["sets"].setdefault(cell.set, {})
            place[cell.method] = numbers
            for category, told in by_category(view.runs[cell]).items():
                values["categories"].setdefault(cell.set, {}).setdefault(category, {})[cell.method] = told
        if cell.set == HELDOUT:
            some = {key: numbers[key] for key in _GRID if key in numbers}
            values["grid"].setdefault(cell.method, {}).setdefault(f"k{cell.k}", {})[f"c{cell.concurrency}"] = some
    return values


def _differences(found: Sequence[Difference], dtype: str) -> dict[str, int]:
    return {"differences": len(found), "differences_tied": sum(d.tied(dtype) for d in found)}


def acceptance_csv(metrics: Mapping[str, Any], view: View) -> str:
    """The series ``acceptance.csv``: share of drafted steps of the held-out prompts that accepted up to a position."""
    drafting = [method for method in view.methods if method != PLAIN]
    lines = [",".join(["position", *drafting])]
    for position in map(str, range(1, view.k + 1)):
        shares = [metrics[method]["acceptance_by_position"].get(position, 0.0) for method in drafting]
        lines.append(",".join([position, *map(str, shares)]))
    return "\n".join(lines) + "\n"


def output_rows(view: View) -> list[dict[str, Any]]:
    """Rows of ``outputs.parquet``, by method, set and prompt in the order of serving; nothing in them depends on time."""
    return [
        {
            "method": method,
            "set": prompt.set,
            "prompt_id": prompt.prompt_id,
            "token_ids": trace.token_ids,
            "step_tokens": trace.step_tokens,
            "drafted": trace.drafted,
            "accepted": trace.accepted,
        }
        for method in view.methods
        for served in (view.main(method, name) for name in view.sets)
        for prompt, trace in zip(served.prompts, served.traces, strict=True)
    ]


def verdicts(view: View) -> dict[str, Verdict]:
    """How the head's acceptance length on the held-out prompts stands against each other method's."""
    head = counts(view.main(EAGLE3))
    return {
        f"{EAGLE3} against {method}": verdict(head, counts(view.main(method)))
        for method in view.methods
        if method != EAGLE3
    }


def speed_verdicts(view: View) -> dict[str, Verdict]:
    """The same of output tokens/s, paired by prompt and round."""
    noise = noises(view.runs).speedup
    return {
        f"{EAGLE3} against {method}": speed_verdict(view.main(EAGLE3), view.main(method), noise)
        for method in view.methods
        if method != EAGLE3
    }
