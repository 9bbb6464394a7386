"""Which candidates stay: the first of equal ones and of near copies, then so many of each source, then so many of all.

Takes a `Spill`; gives the chosen rows, and counts why the others are left out; memory holds a window of the rows. First means: in the order of the
sources, then by id. So the order of the rows in a source does not matter, and a cap takes a random sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eyas.console import Progress
from eyas.conversations.near_duplicates import BANDED, mark_copies
from eyas.conversations.sorting import Flags, Records, Sorter, read_blocks
from eyas.conversations.spill import RANKED, ROW, WINDOW, Spill
from eyas.params import DatasetParams

KEPT, DUPLICATE, NEAR_DUPLICATE, OVER_CAP, SAMPLED_OUT = range(5)
REASONS = ("kept", "duplicate", "near_duplicate", "over_cap", "sampled_out")

_RANK = np.dtype([("number", ">u8"), ("rank", ">i8")])
_UNRANKED = -1  # not looked at for near copies

Counts = npt.NDArray[np.int64]


@dataclass
class Selection:
    """The chosen rows, to be read once, by id; and counts: of each source by reason, and of the chosen rows."""

    kept: Sorter
    counts: Counts  # [sources, reasons]
    validation: int = 0
    multi_turn: int = 0
    user_turns: int = 0

    def add(self, rows: Records) -> None:
        """Choose rows."""
        self.validation += int(rows["validation"].sum())
        self.multi_turn += int((rows["user_turns"] > 1).sum())
        self.user_turns += int(rows["user_turns"].sum(dtype=np.int64))
        self.count(rows, KEPT)
        self.kept.add(_as(ROW, rows))

    def count(self, rows: Records, reason: int) -> None:
        """Say what became of rows."""
        self.counts[:, reason] += _by_source(rows, len(self.counts))


def _as(dtype: np.dtype[np.void], rows: Records) -> Records:
    """The same fields in another order."""
    same = np.empty(len(rows), dtype=dtype)
    for name in dtype.names or ():
        same[name] = rows[name]
    return same


def _by_source(rows: Records, sources: int) -> Counts:
    return np.bincount(rows["source"].astype(np.int64), minlength=sources)


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


def _ranks(rows: Records, ranks: npt.NDArray[np.int64]) -> Records:
    found = np.empty(len(rows), dtype=_RANK)
    found["number"], found["rank"] = rows["number"], ranks
    return found


def _rank(spill: Spill, selection: Selection) -> None:
    """Write the rows in order of preference, equal ones once, and for each row, as they came, its rank."""
    ordered = Sorter(spill.folder / "ordered", RANKED, "id")
    ranks = Sorter(spill.folder / "unordered_ranks", _RANK, "number")
    last = None
    for block in spill.rows():
        ids = block["id"]
        repeated = np.concatenate(([ids[0] == last], ids[1:] == ids[:-1]))
        selection.count(block[repeated], DUPLICATE)
        ranks.add(_ranks(block[repeated], np.full(int(repeated.sum()), _UNRANKED)))
        ordered.add(_as(RANKED, block[~repeated]))
        last = ids[-1]
    rank = 0
    with (spill.folder / "ranked").open("wb") as file:
        for block in ordered.sorted():
            block.tofile(file)
            worded = block["worded"]  # a text without words is like no other
            ranks.add(_ranks(block, np.where(worded, np.arange(rank, rank + len(block)), _UNRANKED)))
            rank += len(block)
    with (spill.folder / "ranks").open("wb") as file:
        for block in ranks.sorted():
            block["rank"].astype(np.int64).tofile(file)


def _banded(spill: Spill, band: int) -> Iterator[Records]:
    """The rows to look at for near copies, with their keys of one band."""
    ranks = read_blocks(spill.folder / "ranks", np.dtype(np.int64), WINDOW)
    for rank, (keys, sketches) in zip(ranks, spill.sketched(band), strict=True):
        found = np.empty(len(rank), dtype=BANDED)
        found["key"], found["rank"], found["sketch"] = keys, rank, sketches
        yield found[rank != _UNRANKED]


def _originals(spill: Spill, copied: Flags, selection: Selection | None = None) -> Iterator[Records]:
    """The ranked rows that are no copies; the copies are counted."""
    start = 0
    for block in read_blocks(spill.folder / "ranked", RANKED, WINDOW):
        flags = copied.read(start, len(block))
        if selection is not None:
            selection.count(block[flags], NEAR_DUPLICATE)
        yield block[~flags]
        start += len(block)


def _limits(have: Counts, params: DatasetParams) -> tuple[Counts, Counts]:
    """How many rows of each source its own cap lets through, and how many of those the cap on all."""
    caps = [min(source.cap or count, count) for source, count in zip(params.sources, have.tolist(), strict=True)]
    taken = caps if params.cap is None else quotas(caps, [source.weight for source in params.sources], params.cap)
    return np.array(caps, dtype=np.int64), np.array(taken, dtype=np.int64)


def select(spill: Spill, params: DatasetParams) -> Selection:
    """Choose from all that the spill holds."""
    sources = len(params.sources)
    counts = np.zeros((sources, len(REASONS)), dtype=np.int64)
    selection = Selection(Sorter(spill.folder / "kept", ROW, "number"), counts)
    _rank(spill, selection)
    with Flags(spill.folder / "copied") as copied:
        if spill.bands:
            with Progress("near duplicates", spill.bands, "bands") as progress:
                bands = (_banded(spill, band) for band in range(spill.bands))
                mark_copies(bands, copied, spill.folder, params.near_duplicate, progress.advance)
        have = np.zeros(sources, dtype=np.int64)
        for rows in _originals(spill, copied, selection):
            have += _by_source(rows, sources)
        caps, taken = _limits(have, params)
        starts = np.cumsum(have) - have
        done = 0
        for rows in _originals(spill, copied):
            source = rows["source"].astype(np.int64)
            place = np.arange(done, done + len(rows)) - starts[source]  # in its own source
            over = place >= caps[source]
            sampled_out = ~over & (place >= taken[source])
            selection.count(rows[over], OVER_CAP)
            selection.count(rows[sampled_out], SAMPLED_OUT)
            selection.add(rows[~over & ~sampled_out])
            done += len(rows)
    return selection
