"""Sorts records on the disk, in memory that no number of records moves: sorted runs in one file, merged block by block.

Takes records whose first fields decide the order; `Flags` is one bit of knowledge a record, on the disk too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[np.void]
MEMORY = 4 << 20  # bytes of records that a sorter holds; sorting takes three times as much


def read_blocks(path: Path, dtype: np.dtype[Any], count: int) -> Iterator[npt.NDArray[Any]]:
    """The records of a file, so many at a time."""
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, count)):
            yield block


class Sorter:
    """Records of one type, added in any order, and read once in the order of their first bytes.

    Bytes compare as numbers do where a field is unsigned and big-endian. Unlike records need unlike keys: the order of those
    with equal ones is left open.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], key: str, memory: int = MEMORY) -> None:
        """The key is everything up to and with the field of that name."""
        fields: Any = dtype.fields
        self._key_bytes = fields[key][1] + fields[key][0].itemsize
        self._path, self._dtype, self._most = path, dtype, max(memory // dtype.itemsize, 1)
        self._stream: BinaryIO = path.open("wb")
        self._waiting: list[Records] = []
        self._runs: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return sum(self._runs) + self._count

    def add(self, records: Records) -> None:
        """Add records; the caller keeps the pieces small."""
        self._waiting.append(records)
        self._count += len(records)
        if self._count >= self._most:
            self._write_run()

    def sorted(self) -> Iterator[Records]:
        """All records in order, in blocks of some size; the file is gone afterwards."""
        if self._count:
            self._write_run()
        self._stream.close()
        with self._path.open("rb") as file:
            yield from self._merged(file)
        self._path.unlink()

    def _write_run(self) -> None:
        run = self._in_order(self._waiting)
        run.tofile(self._stream)
        self._runs.append(len(run))
        self._waiting, self._count = [], 0

    def _keys(self, records: Records) -> npt.NDArray[np.bytes_]:
        octets = np.ascontiguousarray(records).view(np.uint8).reshape(len(records), self._dtype.itemsize)
        keys_N1 = np.ascontiguousarray(octets[:, : self._key_bytes]).view(f"S{self._key_bytes}")
        keys: npt.NDArray[np.bytes_] = keys_N1[:, 0]
        return keys

    def _in_order(self, pieces: list[Records]) -> Records:
        records = np.concatenate(pieces, dtype=self._dtype)  # left to itself, NumPy turns the bytes round
        ordered: Records = records[np.argsort(self._keys(records), kind="stable")]
        return ordered

    def _merged(self, file: BinaryIO) -> Iterator[Records]:
        ends = np.cumsum(self._runs).tolist()
        read = [end - count for end, count in zip(ends, self._runs, strict=True)]
        heads = [np.empty(0, self._dtype) for _ in ends]
        share = max(self._most // max(len(ends), 1), 1)
        while True:
            for run, end in enumerate(ends):
                if not len(heads[run]) and read[run] < end:
                    file.seek(read[run] * self._dtype.itemsize)
                    heads[run] = np.fromfile(file, self._dtype, min(share, end - read[run]))
                    read[run] += len(heads[run])
            filled = [run for run, head in enumerate(heads) if len(head)]
            if not filled:
                return
            keys = {run: self._keys(heads[run]) for run in filled}
            bound = min(keys[run][-1] for run in filled)  # nothing still unread comes before it
            cuts = {run: int(np.searchsorted(keys[run], bound, side="right")) for run in filled}
            yield self._in_order([heads[run][: cuts[run]] for run in filled])
            for run in filled:
                heads[run] = heads[run][cuts[run] :]


class Flags:
    """One flag for each record, on the disk; down until it is put up."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def __enter__(self) -> Flags:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def put_up(self, number: int) -> None:
        """Put up the flag of a record."""
        os.pwrite(self._descriptor, b"\1", number)

    def read(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """The flags of some records on end."""
        return np.frombuffer(os.pread(self._descriptor, count, start).ljust(count, b"\0"), dtype=np.bool_)

    def is_up(self, number: int) -> bool:
        """The flag of one record."""
        return os.pread(self._descriptor, 1, number) == b"\1"
