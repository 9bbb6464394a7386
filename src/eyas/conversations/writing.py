"""Writes conversations.parquet: sorted by id, some rows at a time.

Takes a `Selection` and the `Spill` with its texts; the file's bytes depend on the chosen conversations alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from eyas.console import Progress
from eyas.conversations.selection import Selection
from eyas.conversations.sorting import Records
from eyas.conversations.spill import Spill
from eyas.params import DatasetParams
from eyas.tables import CONVERSATIONS, table_writer

_BUCKET_ROWS = 2048
_BUCKET_BYTES = 32 << 20
_ID_HEX = 64


def _buckets(blocks: Iterator[Records]) -> Iterator[Records]:
    """The same rows, in pieces whose texts fit into memory."""
    for block in blocks:
        size = np.cumsum(block["messages"] + block["tools"].astype(np.int64)) // _BUCKET_BYTES
        bucket = np.arange(len(block)) // _BUCKET_ROWS
        edges = np.flatnonzero((np.diff(size) > 0) | (np.diff(bucket) > 0)) + 1
        yield from np.split(block, edges)


def write_conversations(path: Path, selection: Selection, spill: Spill, params: DatasetParams) -> None:
    """Write the chosen rows."""
    sources = pa.array([source.source for source in params.sources])
    with (
        table_writer(path, CONVERSATIONS) as write,
        spill.texts() as texts,
        Progress("writing conversations", len(selection.kept), "rows") as progress,
    ):
        for bucket in _buckets(selection.kept.sorted()):
            identities = bucket["id"].tobytes().hex()
            messages, tools = texts.read(bucket)
            columns = {
                "conversation_id": [identities[i : i + _ID_HEX] for i in range(0, len(identities), _ID_HEX)],
                "split": np.where(bucket["validation"], "validation", "train"),
                "source": sources.take(pa.array(bucket["source"].astype(np.int64))),
                "messages": messages,
                "tools": tools,
            }
            write(pa.table(columns, schema=CONVERSATIONS))
            progress.advance(len(bucket))
