"""Boundaries on ids alone. Vectors of speculators #794 and #943."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.templates.boundaries import TemplateRefusal, answer_span, common_prefix

END = 9
ids = st.lists(st.integers(0, 8), max_size=8)


def mask(prompt: list[int], history: list[int], full: list[int]) -> str:
    start, end = answer_span(prompt, history, full, [END])
    return "".join(str(int(start <= i < end)) for i in range(len(full)))


def test_the_answer_follows_the_prompt() -> None:
    assert mask([1, 2, 3], [1, 2], [1, 2, 3, 4, 5, END, 6]) == "0001110"


def test_a_scaffold_that_the_finished_turn_lacks() -> None:
    assert mask([1, 2, 3, 77], [1, 2, 3], [1, 2, 3, 4, 5]) == "00011"


def test_a_scaffold_that_is_there_in_part() -> None:
    assert mask([1, 2, 3, 7, 8], [1, 2], [1, 2, 3, 4, END]) == "00011"  # 3 opens the turn, and nobody generated it


def test_history_that_is_rewritten_is_refused() -> None:
    with pytest.raises(TemplateRefusal, match="earlier turns otherwise"):
        mask([1, 9, 9, 77], [1, 9, 9], [1, 5, 6, 7])


def test_without_an_end_of_turn_the_rest_is_the_answer() -> None:
    assert mask([1], [1], [1, 2, 3]) == "011"


@given(ids, ids, ids, ids)
def test_every_part_gets_its_side(history: list[int], opening: list[int], answer: list[int], after: list[int]) -> None:
    prompt = history + opening
    start, end = answer_span(prompt, history, [*prompt, *answer, END, *after], [END])
    assert (start, end) == (len(prompt), len(prompt) + len(answer) + 1)


@given(ids, ids)
def test_common_prefix(first: list[int], second: list[int]) -> None:
    count = common_prefix(first, second)
    assert first[:count] == second[:count]
    assert count in (len(first), len(second)) or first[count] != second[count]
