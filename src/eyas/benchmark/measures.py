"""One cell in numbers: acceptance, speed, latency, sameness, with intervals. ``docs/benchmark.md`` names every key.

Acceptance length = tokens that the target steps emitted / target steps, over all target steps of a prompt, drafted or not; the
prefill and its token are left out on both sides, and a last step that the answer's end cuts short counts as one step
with the tokens that it did emit. Plain decoding has 1 by definition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.benchmark.acceptance import Counters, Trace, count
from eyas.benchmark.runs import Served
from eyas.benchmark.statistics import (
    Counts,
    Noise,
    Verdict,
    against,
    interval,
    median_interval,
    noisy_interval,
    ratio,
)
from eyas.conversations.loops import is_looped

_DIGITS = 6
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Noises:
    """Noise between repeats of output tokens/s, and of its quotient to plain decoding's in the same round."""

    speed: Noise | None
    speedup: Noise | None


def counts(served: Served) -> Counts:
    """Emitted tokens and target steps by prompt, over all repeats."""
    by_prompt = zip(*(repeat.traces for repeat in served.repeats), strict=True)
    return [(sum(t.emitted for t in some), sum(t.target_steps for t in some)) for some in by_prompt]


def speeds(served: Served) -> list[float]:
    """Output tokens/s in each repeat."""
    return [sum(len(t.token_ids) for t in repeat.traces) / repeat.seconds for repeat in served.repeats]


def speedups(served: Served, plain: Served) -> list[float]:
    """Against plain decoding in each round."""
    return [a / b for a, b in zip(speeds(served), speeds(plain), strict=True)]


def _seconds(served: Served) -> float:
    return sum(repeat.seconds for repeat in served.repeats)


def _tokens_and_shares(served: Served) -> tuple[list[float], list[float]]:
    """By prompt, over all repeats: tokens of the answer, and the prompt's part of the wall time."""
    by_prompt = list(zip(*(repeat.traces for repeat in served.repeats), strict=True))
    return [sum(len(t.token_ids) for t in some) for some in by_prompt], [
        sum(t.share_s for t in some) for some in by_prompt
    ]


def speedup_interval(served: Served, plain: Served, noise: Noise | None) -> tuple[float, float] | None:
    """The interval of `speedup`, paired by prompt and round; None where there was one repeat alone."""
    columns = (*_tokens_and_shares(served), *_tokens_and_shares(plain))
    return noisy_interval(columns, lambda t, s, plain_t, plain_s: t / s * (plain_s / plain_t), noise)


def speed_verdict(served: Served, plain: Served, noise: Noise | None) -> Verdict:
    """Whether a method serves faster than another."""
    return against(speedup_interval(served, plain, noise), 1.0)


def _ends(name: str, ends: tuple[float, float] | None) -> dict[str, float]:
    return {} if ends is None else {f"{name}_low": ends[0], f"{name}_high": ends[1]}


def _latency(name: str, values: Sequence[Sequence[float]]) -> dict[str, float]:
    """Percentiles over prompts and repeats, in ms; the median with its interval by prompt."""
    every = [1000 * value for row in values for value in row]
    if not every:
        return {}
    found = {f"{name}_ms_p{p}": float(np.percentile(every, p)) for p in _PERCENTILES}
    means = [1000 * sum(row) / len(row) for row in values if row]
    found[f"{name}_ms_p50"] = float(np.median(means))  # of prompts, as its interval is
    return found | _ends(f"{name}_ms_p50", median_interval(means))


def latencies(served: Served) -> dict[str, float]:
    """Time per output token and time to the first token."""
    by_prompt = list(zip(*(repeat.traces for repeat in served.repeats), strict=True))
    return _latency("tpot", [[s for t in some if (s := t.per_token_s) is not None] for some in by_prompt]) | _latency(
        "ttft", [[t.first_s for t in some] for some in by_prompt]
    )


def _conditional(traces: Sequence[Trace], positions: int) -> dict[str, float]:
    """By position: of the steps that drafted it and accepted all before it, the share that accepted it."""
    steps = [(d, a) for t in traces for d, a in zip(t.drafted, t.accepted, strict=True)]
    found = {}
    for position in range(1, positions + 1):
        reached = [a for d, a in steps if d >= position and a >= position - 1]
        if reached:
            found[str(position)] = sum(a >= position for a in reached) / len(reached)
    return found


def acceptance(traces: Sequence[Trace], total: Counters, positions: int) -> dict[str, Any]:
    """Acceptance by position, of drafted steps and of all; empty mappings for plain decoding."""
    steps = sum(t.target_steps for t in traces)
    drafted = total.drafted_steps > 0
    by_position = list(enumerate(total.accepted_by_position, 1)) if drafted else []
    return {
        "acceptance_by_position": {str(i): n / total.drafted_steps for i, n in by_position},
        "acceptance_by_position_all_steps": {str(i): n / steps for i, n in by_position},
        "acceptance_by_position_conditional": _conditional(traces, positions),
    }


def _speed(served: Served, plain: Served, noises: Noises) -> dict[str, float]:
    seconds, plain_seconds = _seconds(served), _seconds(plain)
    rate = sum(speeds(served)) / len(served.repeats)
    step = seconds / sum(s for _, s in counts(served))
    step_times = [1000 * repeat.step_s for repeat in served.repeats if repeat.step_s is not None]
    values = {
        "output_tokens_per_s": rate,
        **_ends(
            "output_tokens_per_s",
            noisy_interval(_tokens_and_shares(served), lambda tokens, share: tokens / share, noises.speed),
        ),
        # the geometric mean, which does not favour one of the two
        "speedup": float(np.exp(np.mean(np.log(speedups(served, plain))))),
        "step_cost": step / (plain_seconds / sum(s for _, s in counts(plain))),
        "seconds": seconds / len(served.repeats),
        **latencies(served),
    }
    if served is not plain:
        values |= _ends("speedup", speedup_interval(served, plain, noises.speedup))
    if step_times:
        values["step_ms_p50"] = float(np.median(step_times))
    return values


def measure(served: Served, plain: Served, positions: int, noises: Noises) -> dict[str, Any]:
    """One method on one set, against plain decoding on the same set at the same concurrency.

    Raises:
        EyasError: no answer has more than one token.
    """
    traces = served.traces
    total = count(traces, positions)
    looped = [is_looped(t.token_ids) for t in traces]
    same = [t.token_ids == p.token_ids for t, p in zip(traces, plain.traces, strict=True)]
    by_prompt = counts(served)
    values: dict[str, Any] = {
        "acceptance_length": ratio(by_prompt),
        **_ends("acceptance_length", interval(by_prompt)),
        **_speed(served, plain, noises),
        "identical_share": sum(same) / len(same),
        "looped_share": sum(looped) / len(looped),
        "looped": sum(looped),
        **acceptance(traces, total, positions),
    }
    unlooped = [c for c, loops in zip(by_prompt, looped, strict=True) if not loops]
    if sum(s for _, s in unlooped) > 0:
        values["acceptance_length_without_loops"] = ratio(unlooped)
    if total.drafted_steps:
        values["acceptance_length_drafted"] = 1 + total.accepted_tokens / total.drafted_steps
        values["waste"] = 1 - total.accepted_tokens / total.drafted_tokens
        values["draft_tokens_per_s"] = total.drafted_tokens * len(served.repeats) / _seconds(served)
    return rounded(values) | {
        "prompts": len(traces),
        "tokens": sum(len(t.token_ids) for t in traces),
        "target_steps": sum(t.target_steps for t in traces),
        "drafted_steps": total.drafted_steps,
        "drafted_tokens": total.drafted_tokens,
        "accepted_tokens": total.accepted_tokens,
    }


def by_category(served: Served) -> dict[str, dict[str, Any]]:
    """Acceptance length by category of the prompts; empty where they have none, or all one."""
    categories = sorted({p.category for p in served.prompts})
    if len(categories) < 2:
        return {}
    found = {}
    for category in categories:
        some = [c for c, p in zip(counts(served), served.prompts, strict=True) if p.category == category]
        if sum(s for _, s in some) > 0:
            values = {"acceptance_length": ratio(some), **_ends("acceptance_length", interval(some))}
            found[category or "none"] = rounded(values) | {"prompts": len(some)}
    return found


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with six digits behind the point, nested ones too."""
    return {
        key: rounded(value)
        if isinstance(value, Mapping)
        else round(value, _DIGITS)
        if isinstance(value, float)
        else value
        for key, value in values.items()
    }
