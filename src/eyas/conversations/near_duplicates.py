"""Near duplicates by MinHash: who is nearly a copy of a conversation that comes before it.

Takes sets of shingles; `Sketcher` gives each a row of band keys (rows that share one are compared) and a sketch (four bits
of each hash; the share of equal ones estimates the Jaccard similarity, to about 0.04). `mark_copies` finds the copies, in
memory that the number of rows does not move.

Shape legend: N rows, B bands, S bytes of a sketch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path

import numpy as np
import numpy.typing as npt
import rensa

from eyas.conversations.sorting import Flags, Records, Sorter

HASHES = 128
SKETCH_BYTES = HASHES // 2
_SEED = 1
_RECALL = 0.99
_BEFORE = 4  # rows before it in a bucket that a row is compared with, beside the first: work stays linear in a bucket
_PAIRS_AT_ONCE = 1 << 14
_MIX = np.uint64(0x9E3779B97F4A7C15)

Bytes = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint64]
# a row in one band; the rank says who comes before whom
BANDED = np.dtype([("key", ">u8"), ("rank", ">u8"), ("sketch", np.uint8, SKETCH_BYTES)])
_ALIKE = np.dtype([("later", ">u8"), ("earlier", ">u8")])


def band_width(similarity: float) -> int:
    """Hashes in a band: the most for which two rows of this similarity share a band in 99 of 100 cases."""
    widths = range(1, HASHES + 1)
    return max((w for w in widths if 1 - (1 - similarity**w) ** (HASHES // w) >= _RECALL), default=1)


class Sketcher:
    """MinHash of sets of shingles, cut into bands for one similarity."""

    def __init__(self, similarity: float) -> None:
        self._width = band_width(similarity)
        self.bands = HASHES // self._width

    def __call__(self, grams: Sequence[Set[str]]) -> tuple[Keys, Bytes]:
        """Band keys [N, B] and sketches [N, S] of some sets."""
        digests = rensa.RMinHash.digests_from_token_sets(grams, HASHES, _SEED)
        hashes = np.array(digests, dtype=np.uint32).reshape(len(grams), HASHES)
        banded = hashes[:, : self.bands * self._width].reshape(len(grams), self.bands, self._width)
        keys_NB = np.zeros(banded.shape[:2], dtype=np.uint64)
        for column in range(self._width):
            keys_NB = (keys_NB ^ banded[:, :, column]) * _MIX
            keys_NB ^= keys_NB >> np.uint64(32)
        bits = (hashes & np.uint32(0xF)).astype(np.uint8)
        sketches_NS: Bytes = np.bitwise_or(bits[:, ::2] << np.uint8(4), bits[:, 1::2])
        return keys_NB, sketches_NS


def _pairs(records: Records, done: int) -> Iterator[tuple[Records, Records]]:
    """Rows with the same key, (earlier, later): each after the first ``done`` with the first of its bucket, and with those before it."""
    keys_N = records["key"]
    starts = np.flatnonzero(np.concatenate(([True], keys_N[1:] != keys_N[:-1])))
    position = np.arange(len(records))
    first = np.repeat(starts, np.diff(np.append(starts, len(records))))
    for earlier in (first, *(position - back for back in range(1, _BEFORE + 1))):
        valid = np.flatnonzero((earlier >= first) & (earlier < position) & (position >= done))
        for at in range(0, len(valid), _PAIRS_AT_ONCE):
            some = valid[at : at + _PAIRS_AT_ONCE]
            yield records[earlier[some]], records[some]


def _last_bucket(records: Records) -> Records:
    """What rows that go on the last bucket are compared with."""
    bucket = records[np.searchsorted(records["key"], records["key"][-1]) :]
    return np.concatenate((bucket[:1], bucket[1:][-_BEFORE:]), dtype=BANDED)


def _alike(blocks: Iterable[Records], similarity: float) -> Iterator[tuple[Keys, Keys]]:
    """Ranks (earlier, later) of rows of one band, sorted, that have at least the similarity.

    Four bits of unlike hashes are equal in one of 16 cases, which is taken off.
    """
    equal = HASHES * (1 / 16 + similarity * 15 / 16)
    open_bucket = np.empty(0, dtype=BANDED)
    for block in blocks:
        records = np.concatenate((open_bucket, block), dtype=BANDED)
        for earlier, later in _pairs(records, len(open_bucket)):
            differ = earlier["sketch"] ^ later["sketch"]
            same = np.count_nonzero(differ < 16, axis=1) + np.count_nonzero(differ & 15 == 0, axis=1)
            alike = same >= equal
            yield earlier["rank"][alike], later["rank"][alike]
        open_bucket = _last_bucket(records)


def mark_copies(
    bands: Iterable[Iterable[Records]], copied: Flags, folder: Path, similarity: float, advance: Callable[[int], None]
) -> None:
    """Put up the flags of the ranks of rows that are nearly copies of an earlier one that is no copy itself.

    Args:
        bands: for each band the rows to look at, of type `BANDED`, in any order and in small pieces.
        copied: a flag for each rank, all of them down.
        folder: where records are sorted.
        similarity: Jaccard similarity from which two rows are alike.
        advance: called for each band.
    """
    edges = Sorter(folder / "alike", _ALIKE, "earlier")
    for pieces in bands:
        banded = Sorter(folder / "banded", BANDED, "rank")
        for piece in pieces:
            banded.add(piece)
        for earlier, later in _alike(banded.sorted(), similarity):
            found = np.empty(len(later), dtype=_ALIKE)
            found["later"], found["earlier"] = later, earlier
            edges.add(found)
        advance(1)
    decided = -1  # all that comes before a row is settled when its turn comes
    for block in edges.sorted():
        for later, earlier in zip(block["later"].tolist(), block["earlier"].tolist(), strict=True):
            if later != decided and not copied.is_up(earlier):
                copied.put_up(later)
                decided = later
