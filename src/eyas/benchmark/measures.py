"""What was served, in numbers: ``benchmark.json``, ``acceptance.csv``, the outputs' rows, differences and verdicts.

Takes `Served` by method and set. Acceptance length = tokens that the target steps emitted / target steps, over all
target steps of a prompt, drafted or not; the prefill and its token are left out on both sides, and a last step that
the answer's end cuts short counts as one step with the tokens that it did emit. Plain decoding has 1 by definition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.benchmark.acceptance import Trace, count
from eyas.benchmark.methods import EAGLE3, NGRAM, PLAIN, Served
from eyas.benchmark.prompts import HELDOUT
from eyas.benchmark.statistics import Counts, interval, ratio, verdict
from eyas.conversations.loops import is_looped

Runs = Mapping[str, Mapping[str, Served]]
"""`Served` by method and set."""

_DIGITS = 6


def counts(traces: Sequence[Trace]) -> Counts:
    """Emitted tokens and target steps by prompt."""
    return [(t.emitted, t.target_steps) for t in traces]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two answers differ (the shorter one's end is a difference), or None."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _rate(served: Served) -> float:
    return sum(len(t.token_ids) for t in served.traces) / served.seconds


def _seconds_per_step(served: Served) -> float:
    return served.seconds / sum(t.target_steps for t in served.traces)


def measure(served: Served, plain: Served, positions: int) -> dict[str, Any]:
    """One method on one set.

    Returns:
        The named numbers. Beside those that explain themselves: ``acceptance_by_position`` is the share of *drafted*
        steps that accepted the drafted token of a position and all before it, ``acceptance_by_position_all_steps``
        the same share of all target steps (both empty for plain decoding); ``step_cost`` is the time of a target
        step against plain's, which is the acceptance length from which the method pays. Without a prompt that does
        not loop there is no ``acceptance_length_without_loops``.

    Raises:
        EyasError: no answer has more than one token.
    """
    traces = served.traces
    total = count(traces, positions)
    low, high = interval(counts(traces))
    steps = sum(t.target_steps for t in traces)
    looped = [is_looped(t.token_ids) for t in traces]
    same = [first_difference(t.token_ids, p.token_ids) is None for t, p in zip(traces, plain.traces, strict=True)]
    values: dict[str, Any] = {
        "acceptance_length": ratio(counts(traces)),
        "acceptance_length_low": low,
        "acceptance_length_high": high,
        "output_tokens_per_s": _rate(served),
        "speedup": _rate(served) / _rate(plain),
        "step_cost": _seconds_per_step(served) / _seconds_per_step(plain),
        "identical_share": sum(same) / len(same),
        "looped_share": sum(looped) / len(looped),
        "seconds": served.seconds,
    }
    unlooped = [c for c, loops in zip(counts(traces), looped, strict=True) if not loops]
    if sum(s for _, s in unlooped) > 0:
        values["acceptance_length_without_loops"] = ratio(unlooped)
    drafted = total.drafted_steps > 0
    by_position = list(enumerate(total.accepted_by_position, 1)) if drafted else []
    return {name: round(value, _DIGITS) for name, value in values.items()} | {
        "prompts": len(traces),
        "tokens": sum(len(t.token_ids) for t in traces),
        "target_steps": steps,
        "drafted_steps": total.drafted_steps,
        "drafted_tokens": total.drafted_tokens,
        "accepted_tokens": total.accepted_tokens,
        "acceptance_by_position": {str(k): round(n / total.drafted_steps, _DIGITS) for k, n in by_position},
        "acceptance_by_position_all_steps": {str(k): round(n / steps, _DIGITS) for k, n in by_position},
    }


def benchmark_metrics(runs: Runs, positions: int) -> dict[str, Any]:
    """The content of ``benchmark.json``: the held-out prompts by method, and every other set by method."""
    values: dict[str, Any] = {"sets": {}}
    for method, sets in runs.items():
        for name, served in sets.items():
            place = values if name == HELDOUT else values["sets"].setdefault(name, {})
            place[method] = measure(served, runs[PLAIN][name], positions)
    return values


def acceptance_csv(metrics: Mapping[str, Any], positions: int) -> str:
    """The series ``acceptance.csv``: share of drafted steps of the held-out prompts that accepted up to a position."""
    lines = [f"position,{NGRAM},{EAGLE3}"]
    for position in map(str, range(1, positions + 1)):
        shares = [metrics[m]["acceptance_by_position"].get(position, 0.0) for m in (NGRAM, EAGLE3)]
        lines.append(",".join([position, *map(str, shares)]))
    return "\n".join(lines) + "\n"


def output_rows(runs: Runs) -> list[dict[str, Any]]:
    """Rows of ``outputs.parquet``, by method, set and prompt in the order of serving."""
    return [
        {"method": method, "set": name, "prompt_id": prompt.prompt_id, "token_ids": trace.token_ids}
        for method, sets in runs.items()
        for name, served in sets.items()
        for prompt, trace in zip(served.prompts, served.traces, strict=True)
    ]


def differences(runs: Runs) -> list[dict[str, Any]]:
    """Every answer that is not plain decoding's, with the position of its first other token."""
    return [
        {"method": method, "set": name, "prompt_id": prompt.prompt_id, "position": position}
        for method, sets in runs.items()
        for name, served in sets.items()
        for prompt, trace, plain in zip(served.prompts, served.traces, runs[PLAIN][name].traces, strict=True)
        if (position := first_difference(trace.token_ids, plain.token_ids)) is not None
    ]


def verdicts(runs: Runs) -> dict[str, str]:
    """How the head's acceptance length on the held-out prompts stands against each other method's."""
    head = counts(runs[EAGLE3][HELDOUT].traces)
    return {
        f"{EAGLE3} against {method}": verdict(head, counts(sets[HELDOUT].traces))
        for method, sets in runs.items()
        if method != EAGLE3
    }
