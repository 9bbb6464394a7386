"""Near duplicates by MinHash: who is nearly a copy of a conversation that comes before it.

Takes sets of shingles; `Sketcher` gives each a row of band keys (rows that share one are compared) and a sketch (four bits
of each hash; the share of equal ones estimates the Jaccard similarity, to about 0.04). `copies` finds the copies.

Shape legend: N rows, B bands, S bytes of a sketch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import numpy as np
import numpy.typing as npt
import rensa

HASHES = 128
SKETCH_BYTES = HASHES // 2
_SEED = 1
_RECALL = 0.99
_BEFORE = 4  # rows before it in a bucket that a row is compared with, beside the first: work stays linear in a bucket
_PAIRS_AT_ONCE = 1 << 16
_MIX = np.uint64(0x9E3779B97F4A7C15)

Bytes = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


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


def _pairs(keys_N: Keys) -> npt.NDArray[np.int64]:
    """Pairs (earlier, later) of rows with the same key: each row with the first of its bucket, and with those before it."""
    order = np.argsort(keys_N, kind="stable")
    ordered = keys_N[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    position = np.arange(len(order))
    first = np.repeat(starts, np.diff(np.append(starts, len(order))))
    found = []
    for earlier in (first, *(position - back for back in range(1, _BEFORE + 1))):
        valid = (earlier >= first) & (earlier < position)
        found.append(np.stack((order[earlier[valid]], order[position[valid]]), axis=1))
    return np.concatenate(found)


def _alike(pairs: npt.NDArray[np.int64], sketches_NS: Bytes, rows: npt.NDArray[np.int64], similarity: float) -> Flags:
    """Which pairs have at least the similarity; four bits of unlike hashes are equal in one of 16 cases, which is taken off."""
    equal = HASHES * (1 / 16 + similarity * 15 / 16)
    alike = np.zeros(len(pairs), dtype=np.bool_)
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        earlier, later = rows[pairs[start : start + _PAIRS_AT_ONCE]].T
        differ = sketches_NS[earlier] ^ sketches_NS[later]
        same = np.count_nonzero(differ < 16, axis=1) + np.count_nonzero(differ & 15 == 0, axis=1)
        alike[start : start + len(same)] = same >= equal
    return alike


def copies(
    rows: npt.NDArray[np.int64],
    bands: Sequence[Callable[[], Keys]],
    sketches_NS: Bytes,
    similarity: float,
    advance: Callable[[int], None],
) -> Flags:
    """Which rows are nearly copies of an earlier one that is no copy itself.

    Args:
        rows: the rows to look at, indices into ``keys`` and ``sketches_NS``; the earlier one of two alike stays.
        bands: for each band, what reads all rows' keys.
        sketches_NS: all rows' sketches, in memory or mapped.
        similarity: Jaccard similarity from which two rows are alike.
        advance: called for each band.

    Returns:
        For each of ``rows``, whether it is a copy.
    """
    edges = np.empty(0, dtype=np.int64)  # pairs as one number: NumPy finds equal numbers much faster than equal pairs
    for keys in bands:
        pairs = _pairs(keys()[rows])
        earlier, later = pairs[_alike(pairs, sketches_NS, rows, similarity)].T
        edges = np.unique(np.concatenate((edges, later * len(rows) + earlier)))
        advance(1)
    later, earlier = np.divmod(edges, max(len(rows), 1))
    copied = np.zeros(len(rows), dtype=np.bool_)
    while True:  # each round settles one more step of the longest chain of rows alike
        settled = np.zeros_like(copied)
        settled[later[~copied[earlier]]] = True
        if np.array_equal(settled, copied):
            return copied
        copied = settled
