"""The Parquet tables between stages: their schemas, and reading and writing them with the same bytes each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import EyasError
from eyas.files import atomic_file

_GROUP_ROWS = 2048  # rows of long conversations have 100 KiB each

# `messages` and `tools` are JSON lists, as chat templates take them
# of the column `kind`, beside "sampled" and "greedy": answered for the self-check of extraction; the answers are the data's own
PROBE, KEPT = "greedy_probe", "kept"
CONVERSATIONS = pa.schema(
    [
        ("conversation_id", pa.string()),
        ("split", pa.string()),
        ("source", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
    ]
)
PROMPTS = pa.schema(
    [("set", pa.string()), ("prompt_id", pa.string()), ("category", pa.string()), ("turns", pa.list_(pa.string()))]
)
RESPONSES = pa.schema(
    [
        ("conversation_id", pa.string()),
        ("split", pa.string()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        (
            "turns",
            pa.list_(
                pa.struct(
                    [
                        # so many leading ids of the previous turn's prompt and answer open this prompt; the rest follow
                        ("shared", pa.int32()),
                        ("prompt_ids", pa.list_(pa.int32())),
                        ("token_ids", pa.list_(pa.int32())),
                        ("logprobs", pa.list_(pa.float32())),
                        ("finish_reason", pa.string()),
                        ("looped", pa.bool_()),
                    ]
                )
            ),
        ),
    ]
)
TOKENS = pa.schema(
    [
        ("conversation_id", pa.string()),
        ("split", pa.string()),
        ("kind", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("turns", pa.int32()),
    ]
)
OUTPUTS = pa.schema(
    [
        ("method", pa.string()),
        ("set", pa.string()),
        ("prompt_id", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        # tokens of each step, the prefill's first; drafted and accepted tokens of each step that drafted
        ("step_tokens", pa.list_(pa.int32())),
        ("drafted", pa.list_(pa.int32())),
        ("accepted", pa.list_(pa.int32())),
    ]
)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write rows in the given order; the same rows give the same bytes."""
    with table_writer(path, schema) as add:
        add(rows)


@contextmanager
def table_writer(path: Path, schema: pa.Schema) -> Iterator[Callable[[Sequence[Mapping[str, Any]] | pa.Table], None]]:
    """Give a function that adds rows, or a table of them; the table is there, whole, when the context ends without an error.

    The bytes follow from the rows and their order alone, not from how many are added at a time; memory holds one row group.
    """
    waiting: list[pa.Table] = []
    room = _GROUP_ROWS

    def flush() -> None:
        nonlocal room
        if waiting:
            writer.write_table(pa.concat_tables(waiting).combine_chunks(), row_group_size=_GROUP_ROWS)
        waiting.clear()
        room = _GROUP_ROWS

    def add(rows: Sequence[Mapping[str, Any]] | pa.Table) -> None:
        nonlocal room
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows), schema=schema)
        start = 0
        while start < len(table):
            waiting.append(table.slice(start, room))
            start, room = start + len(waiting[-1]), room - len(waiting[-1])
            if not room:
                flush()

    with atomic_file(path) as temporary:
        with pq.ParquetWriter(temporary, schema, compression="zstd", store_schema=False) as writer:
            yield add
            flush()


def read_batches(path: Path, schema: pa.Schema, rows: int = 1024) -> Iterator[list[dict[str, Any]]]:
    """Read the rows in order, so many at a time.

    Raises:
        EyasError: the file is missing, unreadable, or lacks a column.
    """
    _check_exists(path)
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:  # else all that was read stays in memory
            absent = set(schema.names) - set(file.schema_arrow.names)
            if absent:
                raise pa.ArrowInvalid(f"no column {', '.join(sorted(absent))}")
            for batch in file.iter_batches(rows, columns=schema.names):
                yield batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise EyasError(f"{path}: not a readable table with columns {', '.join(schema.names)}: {error}") from error


def count_rows(path: Path) -> int:
    """Number of rows of a table.

    Raises:
        EyasError: the file is missing or unreadable.
    """
    _check_exists(path)
    try:
        rows: int = pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        raise EyasError(f"{path}: not a readable table: {error}") from error
    return rows


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise EyasError(f"{path}: no such file; run the stage that makes it (`make repro`), or `make pull`")


def read_table(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """Read all rows.

    Raises:
        EyasError: as `read_batches`.
    """
    return [row for batch in read_batches(path, schema) for row in batch]
