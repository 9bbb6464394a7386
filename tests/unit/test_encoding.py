"""Rows hold each turn in the context that it was generated in, and the mask is on exactly what was generated."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.templates.encoding import GeneratedTurn, TokenRow, encode_turns

ids = st.lists(st.integers(0, 3), max_size=6)


def turn(prompt: list[int], answer: list[int], start: float = -1.0) -> GeneratedTurn:
    return GeneratedTurn(prompt, answer, [start - i for i in range(len(answer))])


def test_one_row_over_all_turns() -> None:
    first = turn([1, 10, 11], [20, 21, 2])
    second = turn([1, 10, 11, 20, 21, 2, 12, 1], [22, 2], start=-7.0)
    third = turn([1, 10, 11, 20, 21, 2, 12, 1, 22, 2, 13], [23])
    assert encode_turns([first, second, third]) == [
        TokenRow(
            input_ids=[1, 10, 11, 20, 21, 2, 12, 1, 22, 2, 13, 23],
            loss_mask=[False] * 3 + [True] * 3 + [False] * 2 + [True] * 2 + [False, True],
            logprobs=[0.0] * 3 + [-1.0, -2.0, -3.0] + [0.0] * 2 + [-7.0, -8.0] + [0.0, -1.0],
            turns=3,
        )
    ]


def test_a_rewritten_history_gives_rows_of_their_own() -> None:
    first = turn([1, 10], [30, 31, 2])
    second = turn([1, 10, 2, 12], [32, 2])  # the template dropped 30 and 31
    third = turn([1, 10, 2, 12, 32, 2, 13], [33, 2])
    rows = encode_turns([first, second, third])
    assert [row.input_ids for row in rows] == [[1, 10, 30, 31, 2], [1, 10, 2, 12, 32, 2, 13, 33, 2]]
    assert [row.turns for row in rows] == [1, 2]
    assert rows[1].loss_mask == [False] * 4 + [True] * 2 + [False] + [True] * 2


def test_the_same_ids_shorter_than_the_earlier_row_are_no_continuation() -> None:
    rows = encode_turns([turn([1, 2], [3, 4]), turn([1, 2, 3], [5])])
    assert [row.input_ids for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 5]]


def test_no_turns_no_rows() -> None:
    assert encode_turns([]) == []


def test_log_probabilities_of_another_length_are_refused() -> None:
    with pytest.raises(EyasError, match="3 token ids but 2 log-probabilities"):
        encode_turns([GeneratedTurn([1], [2, 3, 4], [-1.0, -1.0])])


@st.composite
def conversations(draw: st.DrawFn) -> list[GeneratedTurn]:
    """Turns that go on from the last one, from a rewritten history, or from nothing."""
    turns: list[GeneratedTurn] = []
    context: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            context = draw(ids)
        prompt = context + draw(ids)
        answer = draw(ids)
        turns.append(turn(prompt, answer, draw(st.floats(-9, -0.125, width=32))))
        context = prompt + answer
    return turns


@given(conversations())
def test_every_turn_is_there_once_with_its_context(turns: list[GeneratedTurn]) -> None:
    rows = encode_turns(turns)
    left = list(turns)
    for row in rows:
        assert len(row.input_ids) == len(row.loss_mask) == len(row.logprobs)
        expected_mask = [False] * len(row.input_ids)
        expected_logprobs = [0.0] * len(row.input_ids)
        for _ in range(row.turns):
            one = left.pop(0)
            start, end = len(one.prompt_ids), len(one.prompt_ids) + len(one.token_ids)
            assert row.input_ids[:end] == [*one.prompt_ids, *one.token_ids]
            expected_mask[start:end] = [True] * (end - start)
            expected_logprobs[start:end] = one.logprobs
        assert row.loss_mask == expected_mask
        assert row.logprobs == expected_logprobs
        assert len(row.input_ids) == end  # nothing after the last answer
    assert not left
    breaks = sum(
        later.prompt_ids[: len(earlier.prompt_ids) + len(earlier.token_ids)]
        != [*earlier.prompt_ids, *earlier.token_ids]
        for earlier, later in pairwise(turns)
    )
    assert len(rows) == 1 + breaks
