"""Writes conversations.parquet: sorted by id, a bucket of ids at a time.

Takes the chosen rows of a `Spill`; the file's bytes depend on the chosen conversations alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.console import Progress
from eyas.conversations.selection import Indices
from eyas.conversations.spill import Rows, Spill
from eyas.params import DatasetParams
from eyas.tables import CONVERSATIONS

_BUCKET_ROWS = 4096
_BUCKET_BYTES = 32 << 20
_ID_HEX = 64


def _buckets(rows: Rows, chosen: Indices) -> list[Indices]:
    """Chosen rows sorted by id, cut where the leading bits of the id change: so many buckets that each fits into memory."""
    ids = rows["id"][chosen]
    order = np.argsort(ids)
    size = sum(int(rows[column][chosen].sum(dtype=np.int64)) for column in ("messages", "tools"))
    bits = min(16, max(len(chosen) // _BUCKET_ROWS, size // _BUCKET_BYTES).bit_length())
    leading = np.frombuffer(ids.tobytes(), dtype=">u2")[:: _ID_HEX // 4][order]
    edges = np.searchsorted(leading >> (16 - bits), np.arange(1, 1 << bits))
    return [bucket for bucket in np.split(chosen[order], edges) if len(bucket)]


def write_conversations(path: Path, rows: Rows, chosen: Indices, spill: Spill, params: DatasetParams) -> None:
    """Write the chosen rows (indices into ``rows``), one row group for each bucket."""
    sources = pa.array([source.source for source in params.sources])
    with (
        pq.ParquetWriter(path, CONVERSATIONS, compression="zstd", store_schema=False) as writer,
        spill.texts() as texts,
        Progress("writing conversations", len(chosen), "rows") as progress,
    ):
        for indices in _buckets(rows, chosen):
            bucket = rows[indices]
            identities = bucket["id"].tobytes().hex()
            messages, tools = texts.read(bucket)
            columns = {
                "conversation_id": [identities[i : i + _ID_HEX] for i in range(0, len(identities), _ID_HEX)],
                "split": np.where(bucket["validation"], "validation", "train"),
                "source": sources.take(pa.array(bucket["source"])),
                "messages": messages,
                "tools": tools,
            }
            writer.write_table(pa.table(columns, schema=CONVERSATIONS))
            progress.advance(len(bucket))
