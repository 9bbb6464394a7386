"""Conversations on their way from the sources to the data set: texts and sketches on the disk, little in memory.

Takes a scratch folder; `Spill.add` appends what `examine` found, and the rest reads it back: some 60 bytes a row in
memory, whatever the conversations weigh.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# `text` is where the row's texts begin in the file of texts: `messages` bytes, then `tools` bytes
ROW = np.dtype(
    [
        ("id", "S32"),
        ("source", "<i4"),
        ("text", "<i8"),
        ("messages", "<u4"),
        ("tools", "<u4"),
        ("user_turns", "<i4"),
        ("validation", "?"),
        ("worded", "?"),
    ]
)
Rows = npt.NDArray[np.void]


class Spill:
    """Files of one run; only appended to, then only read."""

    def __init__(self, folder: Path, bands: int, sketch_bytes: int) -> None:
        self._folder, self._sketch_bytes = folder, sketch_bytes
        self.bands = bands
        names = ["rows", "texts", "sketches", *(f"band{band}" for band in range(bands))]
        self._streams = {name: (folder / name).open("wb") for name in names}

    def add(self, rows: Rows, texts: bytes, keys: npt.NDArray[np.uint64], sketches: npt.NDArray[np.uint8]) -> None:
        """Append rows, whose ``text`` counts from the beginning of ``texts``; keys [rows, bands], sketches [rows, bytes]."""
        rows = rows.copy()
        rows["text"] += self._streams["texts"].tell()
        self._streams["rows"].write(rows.tobytes())
        self._streams["texts"].write(texts)
        self._streams["sketches"].write(sketches.tobytes())
        for band in range(self.bands):
            self._streams[f"band{band}"].write(keys[:, band].tobytes())

    def finish(self) -> Rows:
        """Close the files; gives all rows in the order in which they came."""
        for stream in self._streams.values():
            stream.close()
        return np.fromfile(self._folder / "rows", dtype=ROW)

    def keys(self, band: int) -> npt.NDArray[np.uint64]:
        """All rows' keys of one band."""
        return np.fromfile(self._folder / f"band{band}", dtype=np.uint64)

    def sketches(self) -> npt.NDArray[np.uint8]:
        """All rows' sketches [rows, bytes], mapped: pages that the kernel may take back."""
        path = self._folder / "sketches"
        if path.stat().st_size == 0:
            return np.empty((0, self._sketch_bytes), dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, self._sketch_bytes)

    @contextmanager
    def texts(self) -> Iterator[TextReader]:
        """Reads the texts of chosen rows."""
        descriptor = os.open(self._folder / "texts", os.O_RDONLY)
        try:
            yield TextReader(descriptor)
        finally:
            os.close(descriptor)


class TextReader:
    """Texts by row, without a mapping: pages that were read do not count as the process's own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, rows: Rows) -> tuple[list[str], list[str]]:
        """The JSON of the messages and of the tools of each row; the file is read from front to back."""
        messages, tools = [""] * len(rows), [""] * len(rows)
        for index in np.argsort(rows["text"]).tolist():
            row: Any = rows[index]
            cut = int(row["messages"])
            text = os.pread(self._descriptor, cut + int(row["tools"]), int(row["text"])).decode("ascii")
            messages[index], tools[index] = text[:cut], text[cut:]
        return messages, tools
