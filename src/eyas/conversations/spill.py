"""Conversations on their way from the sources to the data set: all of it on the disk.

Takes a scratch folder; `Spill.add` appends what `examine` found, and the rest reads it back, in pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.conversations.sorting import Records, Sorter, read_blocks

# `number` counts the rows of all sources; `text` is where the row's texts begin in the file of texts: `messages` bytes, then
# `tools` bytes. The order of the bytes is the order of ids, then of numbers.
_REST = [
    ("text", ">u8"),
    ("messages", ">u4"),
    ("tools", ">u4"),
    ("user_turns", ">u4"),
    ("validation", "?"),
    ("worded", "?"),
]
ROW = np.dtype([("id", "S32"), ("number", ">u8"), ("source", ">u4"), *_REST])
RANKED = np.dtype([("source", ">u4"), ("id", "S32"), ("number", ">u8"), *_REST])  # the same in the order of preference
WINDOW = 1 << 14  # rows that are read at a time


class Spill:
    """Files of one run; only appended to, then only read."""

    def __init__(self, folder: Path, bands: int, sketch_bytes: int) -> None:
        self.folder, self.bands = folder, bands
        self._sketch = np.dtype((np.uint8, sketch_bytes))
        names = ["texts", "sketches", *(f"band{band}" for band in range(bands))]
        self._streams = {name: (folder / name).open("wb") for name in names}
        self._rows = Sorter(folder / "rows", ROW, "number")

    def add(self, rows: Records, texts: bytes, keys: npt.NDArray[np.uint64], sketches: npt.NDArray[np.uint8]) -> None:
        """Append rows, whose ``text`` counts from the beginning of ``texts``; keys [rows, bands], sketches [rows, bytes]."""
        rows = rows.copy()
        rows["text"] += self._streams["texts"].tell()
        rows["number"] = np.arange(len(self._rows), len(self._rows) + len(rows))
        self._rows.add(rows)
        self._streams["texts"].write(texts)
        self._streams["sketches"].write(sketches.tobytes())
        for band in range(self.bands):
            self._streams[f"band{band}"].write(keys[:, band].tobytes())

    def rows(self) -> Iterator[Records]:
        """Close the files; gives all rows by id, equal ids in the order in which they came."""
        for stream in self._streams.values():
            stream.close()
        return self._rows.sorted()

    def sketched(self, band: int) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]]:
        """Keys of one band [rows] and sketches [rows, bytes], `WINDOW` rows at a time, in the order in which they came."""
        keys = read_blocks(self.folder / f"band{band}", np.dtype(np.uint64), WINDOW)
        return zip(keys, read_blocks(self.folder / "sketches", self._sketch, WINDOW), strict=True)

    @contextmanager
    def texts(self) -> Iterator[TextReader]:
        """Reads the texts of chosen rows."""
        descriptor = os.open(self.folder / "texts", os.O_RDONLY)
        try:
            yield TextReader(descriptor)
        finally:
            os.close(descriptor)


class TextReader:
    """Texts by row, without a mapping: pages that were read do not count as the process's own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, rows: Records) -> tuple[list[str], list[str]]:
        """The JSON of the messages and of the tools of each row; the file is read from front to back."""
        messages, tools = [""] * len(rows), [""] * len(rows)
        for index in np.argsort(rows["text"]).tolist():
            row: Any = rows[index]
            cut = int(row["messages"])
            text = os.pread(self._descriptor, cut + int(row["tools"]), int(row["text"])).decode("ascii")
            messages[index], tools[index] = text[:cut], text[cut:]
        return messages, tools
