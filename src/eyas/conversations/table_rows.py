"""Rows of Parquet and CSV files, read with bounded memory.

Takes a file; gives one object, or one `BadRow`, for every row. Cells may hold JSON text where a shape expects a list.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.conversations.faults import BadRow
from eyas.conversations.json_rows import Row
from eyas.conversations.json_window import MAX_ROW_BYTES, Broken
from eyas.conversations.shapes import ROW_KEYS

_BATCH_BYTES = 16 << 20
_MAX_BATCH_ROWS = 1024


def _records(batch: Any) -> Iterator[Row]:
    """The rows of a record batch; a value that Python cannot hold costs its own row only."""
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError):
        pass
    for position in range(batch.num_rows):
        try:
            yield from batch.slice(position, 1).to_pylist()
        except UnicodeDecodeError as error:
            yield BadRow("not_utf8", f"byte {error.start} of a text: {error.reason}")
        except (ValueError, OverflowError) as error:  # a date that Python cannot hold
            yield BadRow("not_text", ascii(str(error))[:100])


def read_parquet(path: Path, advance: Callable[[int], None]) -> Iterator[tuple[int, Row]]:
    """Go through a Parquet file, one batch at a time; only the columns that a shape looks at are read.

    Yields:
        The row's number, from 1, and its object or what is wrong with it.
    """
    number = 0
    size = path.stat().st_size
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            twice = next((name for name in names if names.count(name) > 1), None)
            known = [name for name in names if name in ROW_KEYS]
            reported = 0
            groups = (file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * file.metadata.num_rows // max(1, sum(groups))))
            # without a known column the rows keep their names, for the fault to name
            for batch in file.iter_batches(rows, columns=known or names[:1]):
                for row in _records(batch):
                    number += 1
                    if twice is not None:
                        yield number, BadRow("duplicate_key", ascii(twice)[:100])
                    else:
                        yield number, row if known else dict.fromkeys(names)
                done = size * number // file.metadata.num_rows
                advance(done - reported)
                reported = done
    except (pa.ArrowException, OSError) as error:
        yield number + 1, BadRow("unreadable_rest", ascii(str(error))[:200])


def _cells(names: list[str], cells: list[str]) -> Row:
    if len(cells) != len(names):
        return BadRow("bad_csv_row", f"{len(cells)} cells in a table of {len(names)} columns")
    try:
        "".join(cells).encode("utf-8")
    except UnicodeEncodeError:
        return BadRow("not_utf8", "bytes that are not UTF-8")
    if sum(map(len, cells)) > MAX_ROW_BYTES:
        return BadRow("line_too_long", f"more than {MAX_ROW_BYTES} characters")
    return dict(zip(names, cells, strict=True))


def read_csv(stream: BinaryIO) -> Iterator[tuple[int, Row]]:
    """Go through a CSV file whose first row names the columns; commas, semicolons or tabs part them.

    Yields:
        The row's number, from 1 and without the first, and its object or what is wrong with it. Blank lines are no rows.

    Raises:
        Broken: the first row cannot be read.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    header = text.readline(MAX_ROW_BYTES)
    names = next(csv.reader([header], delimiter=(mark := max(",;\t", key=header.count))), [])
    if not names:
        return
    names = [name.strip() for name in names]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Broken(f"two columns are named {ascii(twice)[:100]}")
    rows = csv.reader(text, delimiter=mark)
    number = 0
    while True:
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            yield number, BadRow("bad_csv_row", ascii(str(error))[:200])
            continue
        if cells:
            number += 1
            yield number, _cells(names, cells)
