"""Helpers for tests of the data set: small files under data/input, and what prepare makes of them."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.conversations.dataset import prepare_dataset
from eyas.params import DatasetParams, SourceParams

HI = ("user", "Hi")
HELLO = ("assistant", "Hello!")
BENCHMARK = "Write a Python function that returns the n-th Fibonacci number without any recursion, please."


@dataclass(frozen=True)
class Prepared:
    """The written files, and the metrics."""

    files: dict[str, bytes]
    metrics: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of conversations.parquet."""
        rows: list[dict[str, str]] = pq.read_table(pa.BufferReader(self.files["conversations.parquet"])).to_pylist()
        return rows

    @property
    def rejected(self) -> list[dict[str, Any]]:
        """The entries of rejected.jsonl."""
        return [json.loads(line) for line in self.files["rejected.jsonl"].splitlines()]

    @property
    def openings(self) -> set[str]:
        """The first user turn of each conversation."""
        return {user_turns(row)[0] for row in self.rows}

    @property
    def splits(self) -> dict[str, str]:
        """The split of each conversation."""
        return {row["conversation_id"]: row["split"] for row in self.rows}


def user_turns(row: dict[str, str]) -> list[str]:
    """The user turns of a row of conversations.parquet."""
    return [message["content"] for message in json.loads(row["messages"]) if message["role"] == "user"]


def turns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    """A row of the shape ``messages``."""
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def questions(count: int, start: int = 0) -> list[Any]:
    """Rows with questions that are unlike each other."""
    return [{"prompt": f"Question number {n} about harbour {n * 7}"} for n in range(start, start + count)]


def write(folder: Path, name: str, rows: list[Any]) -> str:
    """Write JSON lines (bytes as they are); gives the path from the working folder."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return str((folder / name).relative_to(Path.cwd()))


def prepare(*sources: tuple[str, int | None], workers: int = 1, **options: Any) -> Prepared:
    """Prepare a data set of sources, given by name and cap, with other parameters of `DatasetParams`."""
    listed = [SourceParams(source=source, cap=cap) for source, cap in sources]
    params = DatasetParams(**{"sources": listed, **options})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "made"
        folder.mkdir()
        scratch = Path(name) / "scratch"
        scratch.mkdir()
        (scratch / "texts").write_text("left behind by a run that was killed")
        metrics = prepare_dataset(params, folder, scratch, workers)
        assert not scratch.exists()
        return Prepared({file.name: file.read_bytes() for file in folder.iterdir()}, metrics)
