"""How sure one may be of a figure: bootstrap by prompt, noise between repeats, and a verdict in words.

Steps of one prompt are alike, so prompts and not steps are what is drawn. Everything is seeded: same counts, same
interval.

Shape suffixes: P prompts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eyas.errors import EyasError

Verdict = Literal["better", "worse", "not distinguishable"]
Counts = Sequence[tuple[int, int]]
"""Per prompt: emitted tokens, target steps."""

RESAMPLES = 10_000
CONFIDENCE = 0.95
_SEED = 20_240_229
_CHUNK = 500


def ratio(counts: Counts) -> float:
    """Emitted tokens per target step over all prompts together.

    Raises:
        EyasError: there is no target step at all.
    """
    steps = sum(s for _, s in counts)
    if steps == 0:
        raise EyasError(
            "no answer is longer than one token, so there is no step to measure; raise benchmark.max_tokens"
        )
    return sum(t for t, _ in counts) / steps


def _tail(prompts: int) -> float:
    """The tail's share to cut off each side: wider than 2.5 % for few prompts, as Student's t is wider than a normal.

    A percentile interval of n values is too narrow by sqrt((n - 1) / n) and by z / t (Hesterberg 2015, section 5.3).
    """
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    v = prompts - 1
    # Cornish-Fisher expansion of Student's quantile
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    return NormalDist().cdf(-t * math.sqrt(prompts / v))


@lru_cache(maxsize=4)
def _draws(prompts: int, resamples: int) -> list[NDArray[np.int64]]:
    """Random draws of so many prompts with replacement, in chunks [some R, P]."""
    generator = np.random.default_rng(_SEED)
    return [generator.integers(0, prompts, (_CHUNK, prompts)) for _ in range(resamples // _CHUNK)]


def _resampled(*columns_P: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Sums [R] of each column [P] over the same random draws of P prompts with replacement."""
    chunks = _draws(len(columns_P[0]), RESAMPLES)
    return [np.concatenate([column_P[draw_RP].sum(axis=1) for draw_RP in chunks]) for column_P in columns_P]


def _quantiles(values_R: NDArray[np.float64], prompts: int) -> tuple[float, float]:
    tail = _tail(prompts)
    low, high = np.quantile(values_R, [tail, 1 - tail])
    return float(low), float(high)


def interval(counts: Counts) -> tuple[float, float]:
    """The 95 % bootstrap interval of `ratio` (in simulation it covers the truth 95 % of the time at 32 prompts, 93 % at 8).

    Prompts without a target step (an answer of one token) say nothing and are left out; one prompt alone has no
    interval, and both ends are its ratio.
    """
    kept = [(t, s) for t, s in counts if s > 0]
    if len(kept) < 2:
        return ratio(kept), ratio(kept)
    tokens_P, steps_P = np.asarray(kept, dtype=np.float64).T
    tokens_R, steps_R = _resampled(tokens_P, steps_P)
    return _quantiles(tokens_R / steps_R, len(kept))


@dataclass(frozen=True)
class Noise:
    """How much a speed differs from one repeat to the next.

    Attributes:
        sd: standard deviation of the logarithm of a speed in one repeat.
        freedom: degrees of freedom of its estimate.
        repeats: what a figure is the mean of.
    """

    sd: float
    freedom: int
    repeats: int


def noise_of(values: Sequence[Sequence[float]]) -> Noise | None:
    """Noise from positive figures, each measured in the same number of repeats; None if there was one repeat alone.

    The spread is pooled over the figures, since a few repeats of one tell little.
    """
    repeats = min((len(row) for row in values), default=0)
    if repeats < 2:
        return None
    logs = np.log(np.asarray(values, dtype=np.float64))
    freedom = len(values) * (repeats - 1)
    sd = math.sqrt(float(((logs - logs.mean(axis=1, keepdims=True)) ** 2).sum()) / freedom)
    return Noise(sd, freedom, repeats)


def noisy_interval(
    columns: Sequence[Sequence[float]],
    statistic: Callable[..., NDArray[np.float64]],
    noise: Noise | None,
) -> tuple[float, float] | None:
    """The 95 % interval of a speed: by prompt, and by what another run of as many repeats may change.

    So it holds what a repeated run would show, which is wider by sqrt(2) in the noise than where the mean of many runs would lie.

    Args:
        columns: figures by prompt, the same prompts in each.
        statistic: gives the speed [R] from the columns' sums [R] over drawn prompts.
        noise: between repeats.

    Returns:
        None where there is no noise to go by, or fewer than two prompts.
    """
    prompts = len(columns[0])
    if noise is None or prompts < 2:
        return None
    values_R = statistic(*_resampled(*(np.asarray(column, dtype=np.float64) for column in columns)))
    t_R = np.random.default_rng(_SEED + 1).standard_t(noise.freedom, len(values_R))
    return _quantiles(values_R * np.exp(noise.sd * math.sqrt(2 / noise.repeats) * t_R), prompts)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of a median over prompts; both ends are the median where there is one alone."""
    if len(values) < 2:
        return values[0], values[0]
    values_P = np.asarray(values, dtype=np.float64)
    medians_R = np.concatenate([np.median(values_P[draw_RP], axis=1) for draw_RP in _draws(len(values), RESAMPLES)])
    return _quantiles(medians_R, len(values))


def against(ends: tuple[float, float] | None, neutral: float) -> Verdict:
    """The word for a difference or a quotient with this interval, larger being better."""
    if ends is None or ends[0] <= neutral <= ends[1]:
        return "not distinguishable"
    return "better" if ends[0] > neutral else "worse"


def verdict(a: Counts, b: Counts) -> Verdict:
    """Whether ``a``'s acceptance length is better than ``b``'s, paired by prompt.

    "better" and "worse" are said where the 95 % interval of the difference leaves out zero.

    Args:
        a: counts by prompt.
        b: counts of the same prompts in the same order.

    Raises:
        EyasError: the prompts are not the same number.
    """
    if len(a) != len(b):
        raise EyasError(f"cannot compare {len(a)} prompts with {len(b)}: both sides must have served the same prompts")
    kept = [(*x, *y) for x, y in zip(a, b, strict=True) if x[1] > 0 and y[1] > 0]
    if len(kept) < 2:
        return "not distinguishable"
    tokens_a_R, steps_a_R, tokens_b_R, steps_b_R = _resampled(*np.asarray(kept, dtype=np.float64).T)
    return against(_quantiles(tokens_a_R / steps_a_R - tokens_b_R / steps_b_R, len(kept)), 0.0)
