"""Counts by step: what a trace adds up to, and that a wrong sum is never reported."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.benchmark.acceptance import Counters, Trace, check_counters, check_trace, count
from eyas.errors import EyasError

# prefill, 3 accepted, undrafted, 0 accepted, 2 accepted
TRACE = Trace(list(range(10)), [1, 4, 1, 1, 3], [3, 3, 3], [3, 0, 2])


def test_prefill_is_left_out() -> None:
    assert (TRACE.target_steps, TRACE.emitted) == (4, 9)
    check_trace(TRACE, "here")


def test_counts_are_cumulative_by_position() -> None:
    assert count([TRACE, TRACE], 3) == Counters(6, 18, 10, [4, 4, 2])
    assert count([Trace([7], [1])], 3) == Counters(0, 0, 0, [0, 0, 0])


def test_answer_of_one_token() -> None:
    trace = Trace([7], [1])
    check_trace(trace, "here")
    assert (trace.target_steps, trace.emitted) == (0, 0)


def test_only_the_last_step_may_be_cut() -> None:
    cut = replace(TRACE, token_ids=list(range(8)), step_tokens=[1, 4, 1, 1, 1])
    check_trace(cut, "here")
    with pytest.raises(EyasError, match="here"):
        check_trace(replace(TRACE, token_ids=list(range(7)), step_tokens=[1, 1, 1, 1, 3]), "here")


@pytest.mark.parametrize(
    "wrong",
    [
        replace(TRACE, token_ids=[1, 2]),
        replace(TRACE, step_tokens=[1, 4, 1, 2, 3], token_ids=list(range(11))),
        replace(TRACE, drafted=[3, 3]),
        replace(TRACE, drafted=[2, 3, 3]),
        Trace([1], [1], [3], [0]),
    ],
)
def test_wrong_sums_are_errors(wrong: Trace) -> None:
    with pytest.raises(EyasError):
        check_trace(wrong, "here")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30), st.integers(0, 4))
def test_any_run_adds_up(steps: list[tuple[int, int]], cut: int) -> None:
    """Whatever is drafted (0 = not at all) and accepted, and wherever the end cuts, the checks hold."""
    taken = [(drafted, min(drafted, accepted)) for drafted, accepted in steps]
    emitted = [1, *(accepted + 1 for _, accepted in taken)]
    if taken:
        emitted[-1] -= min(cut, taken[-1][1])
    drafted_steps = [(d, a) for d, a in taken if d]
    trace = Trace(list(range(sum(emitted))), emitted, [d for d, _ in drafted_steps], [a for _, a in drafted_steps])
    check_trace(trace, "here")
    total = count([trace], 4)
    assert sum(total.accepted_by_position) == total.accepted_tokens
    assert total.accepted_by_position == sorted(total.accepted_by_position, reverse=True)


def test_disagreement_with_the_engine_is_an_error() -> None:
    counted = count([TRACE], 3)
    check_counters(counted, counted, "eagle3, heldout")
    for wrong in (
        replace(counted, drafted_steps=4),
        replace(counted, drafted_tokens=8),
        replace(counted, accepted_tokens=4),
        replace(counted, accepted_by_position=[2, 2, 0]),
    ):
        with pytest.raises(EyasError, match="eagle3, heldout"):
            check_counters(counted, wrong, "eagle3, heldout")


def test_counters_since() -> None:
    assert Counters(6, 18, 10, [4, 4, 2]) - Counters(3, 9, 5, [2, 2, 1]) == count([TRACE], 3)
