"""Tables come back as they were written, with the same bytes each time."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.files import file_sha256
from eyas.tables import (
    CONVERSATIONS,
    OUTPUTS,
    PROMPTS,
    RESPONSES,
    TOKENS,
    count_rows,
    read_batches,
    read_table,
    table_writer,
    write_table,
)

TURN = {
    "shared": 0,
    "prompt_ids": [1, 5],
    "token_ids": [7, 2],
    "logprobs": [-0.5, -1.25],
    "finish_reason": "stop",
    "looped": False,
}
RESPONSE = {
    "conversation_id": "ab12",
    "split": "train",
    "source": "s",
    "kind": "sampled",
    "messages": '[{"role": "user", "content": "ä"}]',
    "tools": "[]",
    "turns": [TURN, TURN | {"shared": 4, "token_ids": [], "logprobs": []}],
}
TOKEN_ROW = {
    "conversation_id": "ab12",
    "split": "train",
    "kind": "sampled",
    "input_ids": [1, 5, 7, 2],
    "loss_mask": [False, False, True, True],
    "logprobs": [0.0, 0.0, -0.5, -1.25],
    "turns": 1,
}


@pytest.mark.parametrize(("schema", "row"), [(RESPONSES, RESPONSE), (TOKENS, TOKEN_ROW)])
def test_round_trip_and_same_bytes(tmp_path: Path, schema: pa.Schema, row: dict[str, Any]) -> None:
    rows = [row | {"conversation_id": f"{i:04x}"} for i in range(50)]
    write_table(tmp_path / "a.parquet", rows, schema)
    write_table(tmp_path / "b.parquet", rows, schema)
    assert read_table(tmp_path / "a.parquet", schema) == rows
    assert file_sha256(tmp_path / "a.parquet") == file_sha256(tmp_path / "b.parquet")


@given(cuts=st.lists(st.integers(0, 5000), max_size=6))
@settings(max_examples=10)
def test_rows_added_piece_by_piece_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    rows = [{"set": "s", "prompt_id": str(i), "category": "c" * (i % 7), "turns": ["a", "b"]} for i in range(5000)]
    write_table(folder / "whole.parquet", rows, PROMPTS)
    with table_writer(folder / "pieces.parquet", PROMPTS) as add:
        for start, end in pairwise(sorted({0, *cuts, 5000})):
            add(rows[start:end])
    assert (folder / "whole.parquet").read_bytes() == (folder / "pieces.parquet").read_bytes()
    batches = list(read_batches(folder / "pieces.parquet", PROMPTS, 999))
    assert [row for batch in batches for row in batch] == rows
    assert max(map(len, batches)) <= 999
    assert count_rows(folder / "pieces.parquet") == len(rows)


def test_an_error_while_rows_are_added_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), table_writer(tmp_path / "a.parquet", TOKENS) as add:
        add([TOKEN_ROW] * 3000)
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_an_empty_table_keeps_its_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", [], OUTPUTS)
    assert read_table(tmp_path / "a.parquet", OUTPUTS) == []


def test_logprobs_keep_their_float32_bits(tmp_path: Path) -> None:
    (exact,) = pa.array([-math.pi], pa.float32()).to_pylist()
    write_table(tmp_path / "a.parquet", [TOKEN_ROW | {"logprobs": [exact] * 4}], TOKENS)
    assert read_table(tmp_path / "a.parquet", TOKENS)[0]["logprobs"] == [exact] * 4


def test_a_bad_value_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowException):
        write_table(tmp_path / "a.parquet", [TOKEN_ROW | {"input_ids": [2**40]}], TOKENS)
    assert not list(tmp_path.iterdir())


def test_a_missing_file_says_what_makes_it(tmp_path: Path) -> None:
    for read in (partial(read_table, schema=TOKENS), count_rows):
        with pytest.raises(EyasError, match=r"a\.parquet: no such file; run the stage"):
            read(tmp_path / "a.parquet")
        (tmp_path / "torn.parquet").write_bytes(b"PAR1")
        with pytest.raises(EyasError, match=r"torn\.parquet: not a readable table"):
            read(tmp_path / "torn.parquet")


def test_a_missing_column_and_a_torn_file_name_the_file(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", [], CONVERSATIONS)
    with pytest.raises(EyasError, match=r"a\.parquet: not a readable table with columns .*input_ids"):
        read_table(tmp_path / "a.parquet", TOKENS)
    write_table(tmp_path / "b.parquet", [TOKEN_ROW], TOKENS)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-7])
    with pytest.raises(EyasError, match=r"b\.parquet: not a readable table"):
        read_table(tmp_path / "b.parquet", TOKENS)
