"""From the table of responses to the table of token rows, a batch at a time, with memory that no number of rows moves."""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eyas.errors import EyasError
from eyas.process import process_pool
from eyas.tables import KEPT, PROBE, TOKENS
from eyas.templates.chat import ChatTemplate, TemplateRefusal
from eyas.templates.encoding import GeneratedTurn, TokenRow, encode_turns, whole_turns


@dataclass(frozen=True)
class Encoding:
    """How rows are encoded."""

    max_tokens: int  # turns that need more are left out
    target: Path | None = None  # directory of the target, for answers that the data holds
    trust_remote_code: bool = False
    variables: tuple[tuple[str, Any], ...] = ()  # of the chat template


@dataclass
class Encoded:
    """Token rows of a batch of responses, and what became of the responses."""

    table: pa.Table = field(
        default_factory=lambda: token_table([])
    )  # TOKENS; built here, where it is spread over the processes
    rejected: list[dict[str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest: int = 0  # tokens of the longest row


@lru_cache(maxsize=1)
def _template(encoding: Encoding) -> ChatTemplate:
    if encoding.target is None:
        raise EyasError("rows that keep the data's answers need a target; responses.mode must be `keep`")
    return ChatTemplate(
        encoding.target, trust_remote_code=encoding.trust_remote_code, variables=dict(encoding.variables)
    )


def _turns(response: Mapping[str, Any], encoding: Encoding) -> list[GeneratedTurn]:
    if response["kind"] != KEPT:
        return whole_turns(response["turns"])
    return _template(encoding).answered_turns(json.loads(response["messages"]), json.loads(response["tools"]))


def encode_responses(responses: Sequence[Mapping[str, Any]], encoding: Encoding) -> Encoded:
    """Encode a batch of rows of the responses table.

    Conversations that the template refuses, and those whose first turn is too long already, are set aside with a reason.
    """
    encoded = Encoded()
    counts = encoded.counts
    rows: list[tuple[Mapping[str, Any], TokenRow]] = []
    for response in responses:
        name = response["conversation_id"]
        try:
            turns = _turns(response, encoding)
        except TemplateRefusal as refusal:
            counts["refused_by_template"] += 1
            encoded.rejected.append({"conversation_id": name, "reason": str(refusal)})
            continue
        fitting = [turn for turn in turns if turn.length <= encoding.max_tokens]
        if turns and not fitting:
            counts["left_out_too_long"] += 1
            reason = f"its shortest turn needs {min(turn.length for turn in turns)} tokens of {encoding.max_tokens}"
            encoded.rejected.append({"conversation_id": name, "reason": reason})
            continue
        counts["cut_rows"] += len(fitting) < len(turns)
        counts["turns"] += len(fitting)
        counts["tokens_if_one_row_per_turn"] += sum(turn.length for turn in fitting)
        for row in encode_turns(fitting):
            rows.append((response, row))
            _count(encoded, response, row)
    encoded.table = token_table(rows)
    return encoded


def token_table(rows: Sequence[tuple[Mapping[str, Any], TokenRow]]) -> pa.Table:
    """Rows of the tokens table, each with the response that it comes from."""
    columns: list[Any] = [[response[name] for response, _ in rows] for name in ("conversation_id", "split", "kind")]
    ends = np.cumsum([0, *(len(row.input_ids) for _, row in rows)], dtype=np.int32)
    for name, dtype in (("input_ids", np.int32), ("loss_mask", np.bool_), ("logprobs", np.float32)):
        values = np.fromiter(itertools.chain.from_iterable(getattr(row, name) for _, row in rows), dtype, int(ends[-1]))
        columns.append(pa.ListArray.from_arrays(ends, pa.array(values)))
    columns.append(pa.array([row.turns for _, row in rows], pa.int32()))
    return pa.table(columns, schema=TOKENS)


def _count(encoded: Encoded, response: Mapping[str, Any], row: TokenRow) -> None:
    encoded.longest = max(encoded.longest, len(row.input_ids))
    encoded.counts["rows"] += 1
    encoded.counts["tokens"] += len(row.input_ids)
    encoded.counts["supervised_tokens"] += sum(row.loss_mask)
    if response["kind"] != PROBE:
        encoded.counts[f"{response['split']}_rows"] += 1


def encode_batches(
    batches: Iterable[Sequence[Mapping[str, Any]]], encoding: Encoding, workers: int, advance: Callable[[int], None]
) -> Iterator[Encoded]:
    """Encode batches in order; what comes out depends on no number of workers.

    Args:
        batches: rows of the responses table.
        encoding: how.
        workers: processes; with one, the work is done in this process.
        advance: called with the number of responses that are done.
    """
    if workers == 1:
        for batch in batches:
            yield encode_responses(batch, encoding)
            advance(len(batch))
        return
    with process_pool(workers, encode_responses) as pool:
        waiting: deque[tuple[Future[Encoded], int]] = deque()

        def first() -> Encoded:
            future, count = waiting.popleft()
            encoded = future.result()
            advance(count)
            return encoded

        for batch in batches:
            waiting.append((pool.submit(encode_responses, batch, encoding), len(batch)))
            if len(waiting) > 2 * workers:
                yield first()
        while waiting:
            yield first()
