"""A tail that repeats one n-gram is found; text that only resembles it is not."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eyas.conversations.loops import LONGEST_PERIOD, REPEATS, is_looped

SHORTEST = 12
tokens = st.lists(st.integers(0, 5), max_size=120)


@given(tokens, st.lists(st.integers(0, 511), min_size=1, max_size=LONGEST_PERIOD), st.integers(REPEATS, 8))
def test_repeated_ngrams_are_loops(before: list[int], ngram: list[int], times: int) -> None:
    assume(len(ngram) * times >= SHORTEST)
    assert is_looped(before + ngram * times)


@given(tokens, st.lists(st.integers(0, 511), min_size=3, max_size=LONGEST_PERIOD), st.data())
def test_a_loop_may_stop_within_its_ngram(before: list[int], ngram: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ngram) - 1))
    assert is_looped(before + ngram * REPEATS + ngram[:cut])


@given(tokens, st.lists(st.integers(0, 511), min_size=1, max_size=LONGEST_PERIOD))
def test_a_loop_that_was_left_is_none(before: list[int], ngram: list[int]) -> None:
    assert not is_looped(before + ngram * 8 + list(range(1000, 1000 + SHORTEST)))


@given(tokens)
def test_agrees_with_the_definition(ids: list[int]) -> None:
    looped = any(
        len(ids) >= (length := max(period * REPEATS, SHORTEST))
        and ids[-length:] == (ids[-length:][:period] * length)[:length]
        for period in range(1, LONGEST_PERIOD + 1)
    )
    assert is_looped(ids) == looped


@given(st.lists(st.integers(), unique=True, max_size=200))
def test_distinct_tokens_are_no_loop(ids: list[int]) -> None:
    assert not is_looped(ids)


@pytest.mark.parametrize(
    ("ids", "looped"),
    [
        ([], False),
        ([7] * 11, False),
        ([7] * 12, True),
        ([1, 2, 3] * 3, False),
        ([1, 2, 3] * 4, True),
        ([1, 2, 3, 4, 5] * 3, False),
        (list(range(16)) * 4, True),
        (list(range(17)) * 4, False),
        ([7] * 40 + [8], False),
    ],
)
def test_edges(ids: list[int], looped: bool) -> None:
    assert is_looped(ids) == looped
