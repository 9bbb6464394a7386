"""How sure one may be of an acceptance length: bootstrap by prompt, and a verdict in words.

Steps of one prompt are alike, so prompts and not steps are what is drawn. Everything is seeded: same counts, same
interval.

Shape suffixes: P prompts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def _resampled(*columns_P: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Sums [R] of each column [P] over the same random draws of P prompts with replacement."""
    prompts = len(columns_P[0])
    generator = np.random.default_rng(_SEED)
    chunks = [generator.integers(0, prompts, (_CHUNK, prompts)) for _ in range(RESAMPLES // _CHUNK)]
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
    low, high = _quantiles(tokens_a_R / steps_a_R - tokens_b_R / steps_b_R, len(kept))
    if low > 0:
        return "better"
    return "worse" if high < 0 else "not distinguishable"
