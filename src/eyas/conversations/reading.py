"""Files of unknown quality: JSON lines, JSON, Parquet and CSV, also compressed, one after the other.

Takes a path; gives one object, or one `BadRow`, for every row, with bounded memory. What can be read of a damaged file is read.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from eyas.conversations.faults import BadRow
from eyas.conversations.json_rows import Row, read_document, read_lines
from eyas.conversations.json_window import Broken
from eyas.conversations.table_rows import read_csv, read_parquet
from eyas.errors import EyasError

FORMATS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_MAX_FIRST_LINE = 1 << 20
_HEAD = 16  # bytes that tell UTF-16


def file_format(path: Path) -> str | None:
    """The format, one of `FORMATS`, that a file's name tells; none for any other file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = suffixes and suffixes[-1] in _COMPRESSED
    kind = suffixes[-2:-1] if compressed else suffixes[-1:]
    return kind[0] if kind and kind[0] in FORMATS and not (compressed and kind[0] == ".parquet") else None


def _is_hidden(file: Path, named: Path) -> bool:
    return any(part.startswith(".") and part not in named.parts for part in file.parts)


def data_files(source: str) -> list[Path]:
    """The files that a path, a folder (with all below it) or a glob (``**`` for any folders) names, sorted by name.

    Hidden files and folders, and in folders files of other formats, are passed over.

    Raises:
        EyasError: nothing is found, or a file is of another format.
    """
    path = Path(source)
    if path.is_dir():
        found = [file for file in path.rglob("*") if file_format(file)]
    else:
        found = [path] if path.exists() else list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    files = sorted(file for file in found if file.is_file() and not _is_hidden(file, path))
    if not files:
        raise EyasError(f"{source}: no such file, and no file in it that ends in {', '.join(FORMATS)} (.gz, .zst)")
    for file in files:
        if file_format(file) is None:
            raise EyasError(
                f"{file}: cannot be read as conversations; expected a name that ends in {', '.join(FORMATS)}, and all but "
                "Parquet may be followed by .gz or .zst"
            )
    return files


class _Counted(io.RawIOBase):
    """A file that tells how many of its bytes were read."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        self._file, self._advance = path.open("rb", buffering=0), advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._advance(count)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Transcoded(io.RawIOBase):
    """A UTF-16 stream as UTF-8; what is not UTF-16 comes out as bytes that are not UTF-8 either, for the rows to be rejected."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._stream, self._decoder, self._ready = stream, codecs.getincrementaldecoder(encoding)("surrogatepass"), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            content = self._stream.read(1 << 16)
            if not content:
                break
            self._ready = self._decoder.decode(content).encode("utf-8", "surrogatepass")
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _utf16(head: bytes) -> str | None:
    """The byte order of UTF-16 text, to judge by its first characters, which JSON and CSV have in ASCII."""
    for mark, high in ((codecs.BOM_UTF16_LE, 1), (codecs.BOM_UTF16_BE, 0)):
        marked = head.startswith(mark)
        text = head.removeprefix(mark)
        pairs = [text[i : i + 2] for i in range(0, len(text) - 1, 2)]
        if len(pairs) >= 7 and all(pair[high] == 0 and pair[1 - high] != 0 for pair in pairs):
            return "utf-16" if marked else ("utf-16-le" if high else "utf-16-be")
    return None


def open_data(path: Path, advance: Callable[[int], None]) -> BinaryIO:
    """Open a file of any format but Parquet as UTF-8, decompressed; ``advance`` gets the bytes that are read from the disk."""
    stream = cast(BinaryIO, io.BufferedReader(_Counted(path, advance), 1 << 16))
    compression = _COMPRESSED.get(path.suffix.lower())
    if compression is not None:
        # unlike zstandard's own reader, pyarrow's tells a file that is cut off from one that ends
        unpacked = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), compression)
        stream = cast(BinaryIO, io.BufferedReader(unpacked, 1 << 16))
    encoding = _utf16(cast(io.BufferedReader, stream).peek(_HEAD)[:_HEAD])
    return stream if encoding is None else cast(BinaryIO, io.BufferedReader(_Transcoded(stream, encoding), 1 << 16))


def _is_lines(path: Path) -> bool:
    """Whether a .json file is JSON lines after all: its first line is an object, and another one follows."""
    with open_data(path, lambda _: None) as stream:
        first = stream.readline(_MAX_FIRST_LINE)
        second = (
            stream.readline(_MAX_FIRST_LINE).strip() or stream.readline(_MAX_FIRST_LINE)
            if first.endswith(b"\n")
            else b""
        )
    return (
        first.removeprefix(codecs.BOM_UTF8).startswith(b"{")
        and first.rstrip().endswith(b"}")
        and second.startswith(b"{")
    )


def _parsed(path: Path, advance: Callable[[int], None]) -> Iterator[tuple[int, Row]]:
    kind = file_format(path)
    if kind == ".parquet":
        yield from read_parquet(path, advance)
        return
    read = {".json": read_document, ".csv": read_csv}.get(kind or "", read_lines)
    if kind == ".json" and _is_lines(path):
        read = read_lines
    with open_data(path, advance) as stream:
        yield from read(stream)


def read_rows(path: Path, advance: Callable[[int], None]) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Go through one file of `FORMATS`; never raises `BadRow`, but gives it in place of the object.

    Args:
        path: the file; a name that tells no format is read as JSON lines.
        advance: called with the number of bytes read.

    Yields:
        The row's number, from 1, and its object or what is wrong with it. The number is the line's in JSON lines, and counts
        rows in the other formats. If the rest of the file cannot be read, the last entry says so.
    """
    number = 0
    try:
        for number, row in _parsed(path, advance):
            yield number, row
    except (OSError, Broken) as error:
        yield number + 1, BadRow("unreadable_rest", ascii(str(error))[:200])
