"""The Parquet tables between stages: their schemas, and reading and writing them with the same bytes each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import EyasError
from eyas.files import atomic_file

CONVERSATIONS = pa.schema(
    [("conversation_id", pa.string()), ("split", pa.string()), ("source", pa.string()), ("messages", pa.string())]
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
        (
            "turns",
            pa.list_(
                pa.struct(
                    [
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
    [("method", pa.string()), ("set", pa.string()), ("prompt_id", pa.string()), ("token_ids", pa.list_(pa.int32()))]
)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write rows in the given order; the same rows give the same bytes."""
    table = pa.Table.from_pylist(list(rows), schema=schema)
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=8192, store_schema=False)


def read_table(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """Read all rows.

    Raises:
        EyasError: the file is missing, unreadable, or lacks a column.
    """
    if not path.is_file():
        raise EyasError(f"{path}: no such file; run the stage that makes it (`make repro`), or `make pull`")
    try:
        table = pq.read_table(path, columns=schema.names)
    except (OSError, pa.ArrowException) as error:
        raise EyasError(f"{path}: not a readable table with columns {', '.join(schema.names)}: {error}") from error
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
