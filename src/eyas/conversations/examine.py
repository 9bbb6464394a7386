"""What a worker does with a chunk of rows: validate, cut, look for benchmark prompts, name, split, sketch.

Takes a `Chunk`, gives `Findings`; both travel between processes.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from eyas.conversations.contamination import BenchmarkIndex
from eyas.conversations.faults import BadRow
from eyas.conversations.identity import conversation_id, split_of
from eyas.conversations.near_duplicates import Sketcher
from eyas.conversations.rules import Conversation, validate
from eyas.conversations.shingles import shingles, words
from eyas.conversations.sorting import Records
from eyas.conversations.spill import ROW
from eyas.files import value_hash
from eyas.params import DatasetParams


class Row(NamedTuple):
    """A row as it was read: its file, where the source has several, its number there, and what it holds."""

    file: str | None
    number: int
    content: dict[str, Any] | BadRow


@dataclass(frozen=True)
class Chunk:
    """Rows of one source, in order, and how many bytes of its files were read for them."""

    source: int
    rows: list[Row]
    read: int


@dataclass
class Findings:
    """What became of a chunk's rows: set aside, left out, or candidates for the data set."""

    source: int
    rows: int
    faults: list[tuple[str | None, int, BadRow]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    repaired: int = 0
    candidates: Records = field(default_factory=lambda: np.empty(0, dtype=ROW))
    texts: bytes = b""
    keys: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty((0, 0), dtype=np.uint64))
    sketches: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 0), dtype=np.uint8))


def _sketched(conversation: Conversation, grams: set[str]) -> set[str]:
    """What near copies are told by: the shingles of the user turns, under the same system message and tools.

    A system message may hold all that the user turns are about ("Sum up the text above"), or be the same for all.
    """
    system = [message.content for message in conversation.messages[:1] if message.role == "system"]
    if not system and not conversation.tools:
        return grams
    frame = value_hash([system, list(conversation.tools)])[:16]
    return {f"{frame} {gram}" for gram in grams}


def _too_long(conversation: Conversation, most: int) -> bool:
    return any(len(m.content) > most for m in conversation.messages if m.role in ("system", "user"))


def _accepted(
    row: Row, params: DatasetParams, index: BenchmarkIndex, found: Findings
) -> tuple[Conversation, set[str]] | None:
    """The conversation that a row holds and the shingles of its user turns; counted in ``found`` if it is not to be kept."""
    try:
        if isinstance(row.content, BadRow):
            raise row.content
        conversation, repairs = validate(row.content)
    except BadRow as fault:
        found.faults.append((row.file, row.number, fault))
        return None
    found.repaired += bool(repairs)
    found.reasons.update(repairs)
    conversation = conversation.cut(params.max_turns)
    if _too_long(conversation, params.max_prompt_chars):
        found.reasons["too_long"] += 1
        return None
    turns = [words(turn) for turn in conversation.user_turns]
    grams = shingles(turns[0] if len(turns) == 1 else [word for turn in turns for word in turn])
    if index.is_in(turns, grams):
        found.reasons["benchmark_prompt"] += 1
        return None
    return conversation, grams


def examine(chunk: Chunk, params: DatasetParams, index: BenchmarkIndex) -> Findings:
    """Go through a chunk.

    Args:
        chunk: the rows.
        params: what to keep.
        index: the benchmark prompts, which no conversation may hold.
    """
    found = Findings(chunk.source, len(chunk.rows))
    records: list[tuple[Any, ...]] = []
    texts: list[bytes] = []
    sketched: list[set[str]] = []
    length = 0
    for row in chunk.rows:
        accepted = _accepted(row, params, index, found)
        if accepted is None:
            continue
        conversation, grams = accepted
        messages = json.dumps([message.as_dict() for message in conversation.messages]).encode("ascii")
        tools = json.dumps(conversation.tools).encode("ascii")
        identity = bytes.fromhex(conversation_id(conversation))
        validation = split_of(conversation, params.validation_share) == "validation"
        turns = len(conversation.user_turns)
        records.append((identity, 0, chunk.source, length, len(messages), len(tools), turns, validation, bool(grams)))
        texts += (messages, tools)
        length += len(messages) + len(tools)
        sketched.append(_sketched(conversation, grams))
    found.candidates = np.array(records, dtype=ROW)
    found.texts = b"".join(texts)
    if params.near_duplicate < 1:
        found.keys, found.sketches = Sketcher(params.near_duplicate)(sketched)
    return found


@functools.cache  # a worker serves one run
def _read_index(prompts: Path) -> BenchmarkIndex:
    turns = pq.read_table(prompts, columns=["turns"])["turns"].to_pylist()
    return BenchmarkIndex(turn for prompt in turns for turn in prompt)


def examine_apart(chunk: Chunk, params: DatasetParams, prompts: Path) -> Findings:
    """The same in a process of its own, which reads the benchmark prompts from a file."""
    return examine(chunk, params, _read_index(prompts))
