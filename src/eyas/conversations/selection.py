"""Which candidates stay: the first of equal ones and of near copies, then so many of each source, then so many of all.

Takes the rows of a `Spill`; gives the chosen ones and why each other row is left out. First means: in the order of the
sources, then by id. So the order of the rows in a source does not matter, and a cap takes a random sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eyas.console import Progress
from eyas.conversations.near_duplicates import copies
from eyas.conversations.spill import Rows, Spill
from eyas.params import DatasetParams

KEPT, DUPLICATE, NEAR_DUPLICATE, OVER_CAP, SAMPLED_OUT = range(5)
REASONS = ("kept", "duplicate", "near_duplicate", "over_cap", "sampled_out")

Indices = npt.NDArray[np.int64]


def quotas(available: Sequence[int], weights: Sequence[float], cap: int) -> list[int]:
    """How many conversations of each source a cap on all of them takes.

    In proportion to weight x available; what a source cannot fill goes to the others. Each source that has any gives
    at least one, if the cap allows.
    """
    have = np.array(available, dtype=np.int64)
    if have.sum() <= cap:
        return list(available)
    wanted = have * np.array(weights, dtype=np.float64)
    shares = np.zeros(len(have))
    unfilled = have > 0
    while True:
        rest = cap - have[(have > 0) & ~unfilled].sum()
        shares[unfilled] = rest * wanted[unfilled] / wanted[unfilled].sum()
        over = unfilled & (shares >= have)
        if not over.any():
            break
        shares[over] = have[over]
        unfilled &= ~over
        if not unfilled.any():
            break
    taken = np.maximum(np.floor(shares).astype(np.int64), np.minimum(have, 1))
    while taken.sum() > cap:
        taken[np.argmax(taken)] -= 1
    while taken.sum() < cap:
        taken[np.argmax(np.where(taken < have, shares - taken, -np.inf))] += 1
    return [int(count) for count in taken]


def _ranked(rows: Rows, verdicts: npt.NDArray[np.uint8]) -> Indices:
    """Rows in order of preference, equal ones once."""
    order = np.argsort(rows["id"], kind="stable")  # rows come in the order of the sources
    ids = rows["id"][order]
    repeated = np.concatenate(([False], ids[1:] == ids[:-1]))[: len(order)]
    verdicts[order[repeated]] = DUPLICATE
    unique = order[~repeated]
    ranked: Indices = unique[np.argsort(rows["source"][unique], kind="stable")]
    return ranked


def _within_source(rows: Rows, ranked: Indices, sources: int) -> tuple[Indices, Indices]:
    """The place of each ranked row in its own source, from 0, and how many ranked rows each source has."""
    counts = np.bincount(rows["source"][ranked], minlength=sources)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return np.arange(len(ranked)) - starts[rows["source"][ranked]], counts


def select(rows: Rows, spill: Spill, params: DatasetParams) -> npt.NDArray[np.uint8]:
    """For each row its verdict: an index into `REASONS`."""
    verdicts = np.zeros(len(rows), dtype=np.uint8)
    ranked = _ranked(rows, verdicts)
    if spill.bands:
        worded = ranked[rows["worded"][ranked]]  # a text without words is like no other
        with Progress("near duplicates", spill.bands, "bands") as progress:
            bands = [lambda band=band: spill.keys(band) for band in range(spill.bands)]
            copied = copies(worded, bands, spill.sketches(), params.near_duplicate, progress.advance)
        verdicts[worded[copied]] = NEAR_DUPLICATE
        ranked = ranked[verdicts[ranked] == KEPT]
    sources = params.sources
    place, counts = _within_source(rows, ranked, len(sources))
    caps = np.array([min(source.cap or count, count) for source, count in zip(sources, counts.tolist(), strict=True)])
    over = place >= caps[rows["source"][ranked]]
    verdicts[ranked[over]] = OVER_CAP
    if params.cap is not None:
        taken = np.array(quotas(caps.tolist(), [source.weight for source in sources], params.cap))
        verdicts[ranked[~over & (place >= taken[rows["source"][ranked]])]] = SAMPLED_OUT
    return verdicts
