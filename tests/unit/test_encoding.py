"""Rows hold each turn in the context that it was generated in, and the mask is on exactly what was generated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.templates.encoding import GeneratedTurn, TokenRow, encode_turns, whole_turns

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


def test_a_turn_goes_on_from_the_row_that_it_saw() -> None:
    first, second = turn([1, 10], [20, 2]), turn([1, 10, 20, 2, 11], [21, 2])
    aside = turn([1, 10, 2, 12], [30, 2])  # rewritten for one turn
    back = turn([1, 10, 20, 2, 11, 21, 2, 13], [40, 2])
    rows = encode_turns([first, second, aside, back])
    assert [row.input_ids for row in rows] == [[*back.prompt_ids, 40, 2], [1, 10, 2, 12, 30, 2]]
    assert [row.turns for row in rows] == [3, 1]


def test_stored_turns_get_their_prompts_back() -> None:
    stored = [
        {"shared": 0, "prompt_ids": [1, 10], "token_ids": [20, 2], "logprobs": [-1.0, -2.0]},
        {"shared": 4, "prompt_ids": [11], "token_ids": [21], "logprobs": [-3.0]},
        {"shared": 2, "prompt_ids": [12], "token_ids": [22], "logprobs": [-4.0]},
    ]
    assert [turn.prompt_ids for turn in whole_turns(stored)] == [[1, 10], [1, 10, 20, 2, 11], [1, 10, 12]]
    assert [turn.length for turn in whole_turns(stored)] == [4, 6, 4]
    stored[1]["shared"] = 5
    with pytest.raises(EyasError, match="turn 2 shares 5 ids with the 4 before it"):
        whole_turns(stored)


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
    assert sum(row.turns for row in rows) == len(turns)
    assert sum(map(sum, (row.loss_mask for row in rows))) == sum(len(one.token_ids) for one in turns)
    for one in turns:
        start, end = len(one.prompt_ids), one.length
        whole = [*one.prompt_ids, *one.token_ids]
        assert any(
            row.input_ids[:end] == whole
            and all(row.loss_mask[start:end])
            and row.logprobs[start:end] == list(one.logprobs)
            for row in rows
        )
    for row in rows:
        assert len(row.input_ids) == len(row.loss_mask) == len(row.logprobs)
        assert all(p == 0.0 for p, inside in zip(row.logprobs, row.loss_mask, strict=True) if not inside)
    breaks = sum(
        not any(list(later.prompt_ids[: one.length]) == [*one.prompt_ids, *one.token_ids] for one in turns[:number])
        for number, later in enumerate(turns)
    )
    assert len(rows) >= breaks
