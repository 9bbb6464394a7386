"""Records are sorted on the disk as they would be in memory, and choosing among more rows takes no more memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from eyas.conversations import sorting
from eyas.conversations.near_duplicates import SKETCH_BYTES
from eyas.conversations.selection import select
from eyas.conversations.sorting import Flags, Sorter
from eyas.conversations.spill import ROW, Spill
from eyas.params import DatasetParams, SourceParams

_RECORD = np.dtype([("name", "S3"), ("number", ">u4"), ("rest", ">u2")])


@pytest.mark.parametrize("memory", [1, 100, 1 << 20])
def test_any_memory_gives_the_same_order(tmp_path: Path, memory: int) -> None:
    random = np.random.default_rng(0)
    records = np.zeros(1000, dtype=_RECORD)
    records["name"] = random.choice(np.array([b"\0\0a", b"a", b"a\0b", b"\xff"]), len(records))
    records["number"] = random.permutation(len(records)) * 4_000_000
    records["rest"] = np.arange(len(records))
    sorter = Sorter(tmp_path / "records", _RECORD, "number", memory)
    for piece in np.split(records, [0, 1, 30, 400]):
        sorter.add(piece)
    assert len(sorter) == len(records)
    found = np.concatenate(list(sorter.sorted()))
    assert found.tolist() == sorted(records.tolist(), key=lambda record: (record[0].ljust(3, b"\0"), record[1]))
    assert not (tmp_path / "records").exists()


def test_flags_are_down_until_they_are_put_up(tmp_path: Path) -> None:
    with Flags(tmp_path / "flags") as flags:
        flags.put_up(5)
        assert flags.is_up(5) and not flags.is_up(4) and not flags.is_up(900)
        assert flags.read(3, 4).tolist() == [False, False, True, False]


def _peak(folder: Path, rows: int) -> int:
    """Most bytes in use while so many rows are chosen from; every tenth is a near copy, every fiftieth a copy."""
    folder.mkdir()
    random = np.random.default_rng(0)
    tracemalloc.start()
    spill = Spill(folder, 2, SKETCH_BYTES)
    for start in range(0, rows, 500):
        some = np.zeros(500, dtype=ROW)
        names = np.arange(start, start + 500)
        some["id"] = [f"{name * 7919 % 1_000_003:032}".encode() for name in np.where(names % 50, names, 0)]
        some["worded"] = True
        keys = random.integers(0, 1 << 60, (500, 2)).astype(np.uint64)
        keys[::10] = 7
        sketches = random.integers(0, 256, (500, SKETCH_BYTES)).astype(np.uint8)
        sketches[::10] = 0
        spill.add(some, b"", keys, sketches)
    selection = select(spill, DatasetParams(sources=[SourceParams(source="x")]))
    assert len(selection.kept) == rows - rows // 10 + 1
    assert selection.counts.sum() == rows
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sorter.__init__, "__defaults__", (1 << 18,))
    # from 60,000 rows on all windows and runs are full
    few, many = _peak(tmp_path / "few", 60_000), _peak(tmp_path / "many", 120_000)
    assert many < few + (1 << 18), (few, many)
    assert sorting.MEMORY <= 4 << 20
