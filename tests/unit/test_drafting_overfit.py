"""One conversation learnt by heart, and the verdict on what serving made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from eyas.cli import app
from eyas.drafting.data import TokenRow, TrainingData
from eyas.drafting.forward import draft_states
from eyas.drafting.loss import head_loss
from eyas.drafting.overfit import choose_lesson, greedy_length, judge, learn
from eyas.drafting.planning import make_plan
from eyas.errors import EyasError
from eyas.params import TrainParams
from eyas.targets.head import load_head

from .test_drafting_data import CPU, Case, make_case, make_row, make_store, states_of, vocabulary

_PROMPT, _ANSWER, _DRAFTS = 6, 20, 3
_PARAMS = TrainParams(epochs=1, lr=3e-3, tokens_per_step=64, autocast="float32")


def _bits(states: torch.Tensor) -> np.ndarray:
    return states.bfloat16().view(torch.int16).numpy().view(np.uint16)


def _greedy(case: Case, length: int) -> tuple[TokenRow, np.ndarray]:
    """A row whose answer is what its states say greedily, all of it in the draft vocabulary: final states point at the next token."""
    head = load_head(case.directory)
    ids = np.random.default_rng(3).choice(vocabulary().target_ids, _PROMPT + length).astype(np.int32)
    row = make_row("greedy", ids, np.arange(len(ids)) >= _PROMPT)
    states = states_of(row).copy()
    states[:-1, -1] = _bits(head.head_VH[ids[1:]] / head.norm_weight_H)
    return row, states


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path, rows=3)


def test_the_greedy_answer_is_chosen_and_learnt(case: Case) -> None:
    row, states = _greedy(case, _ANSWER)
    rows = [*case.rows, row]
    with make_store(case.folder, rows, {row.key: states}) as reader:
        data = TrainingData(reader, rows[1:], rows[:1], workers=1)
        lesson = choose_lesson(data, load_head(case.directory), vocabulary().t2d_V, _DRAFTS, CPU)
    assert lesson.conversation_id == "greedy"
    assert lesson.prompt_ids + lesson.answer_ids == row.input_ids.tolist() and len(lesson.answer_ids) == _ANSWER
    learnt = learn(case.model, lesson, _PARAMS, _DRAFTS)
    assert max(learnt.loss_by_depth) < 0.01
    plan = make_plan(lesson.batch, _DRAFTS)
    with torch.no_grad():
        states_KNH = draft_states(case.model, lesson.batch, plan, _DRAFTS)
        drafted_KN = head_loss(case.model, states_KNH, lesson.batch, plan, "kl_div", 1.0, False).draft_ids_KN
    for depth in range(_DRAFTS):
        slots = plan.active_N[plan.rows[depth]]
        drafted = vocabulary().target_ids[drafted_KN[depth, plan.rows[depth]]]
        assert drafted.tolist() == row.input_ids[slots + depth + 2].tolist()


def test_an_answer_counts_as_far_as_it_is_greedy_and_can_be_drafted(case: Case) -> None:
    row, states = _greedy(case, _ANSWER)
    target, drafted_V = load_head(case.directory), vocabulary().t2d_V
    sampled = states.copy()
    sampled[_PROMPT + 6, -1] = sampled[_PROMPT, -1]  # here the target would say another token than the text's eighth
    with make_store(case.folder / "a", [row], {row.key: states}) as reader:
        assert greedy_length(row, reader, target, drafted_V) == (_PROMPT, _ANSWER)
        without_V = drafted_V.copy()
        without_V[row.input_ids[_PROMPT + 5]] = False
        assert greedy_length(row, reader, target, without_V) == (_PROMPT, 5)
        turns = replace(row, loss_mask=row.loss_mask & (np.arange(len(row.input_ids)) != _PROMPT + 4))
        assert greedy_length(turns, reader, target, drafted_V) == (_PROMPT, 4)
    with make_store(case.folder / "b", [row], {row.key: sampled}) as reader:
        assert greedy_length(row, reader, target, drafted_V) == (_PROMPT, 7)


def test_without_a_greedy_answer_it_says_what_to_change(case: Case) -> None:
    with make_store(case.folder, case.rows) as reader:
        data = TrainingData(reader, case.rows[1:], case.rows[:1], workers=1)
        with pytest.raises(EyasError, match=r"has \d tokens, 13 are needed for 3 steps; lower responses.temperature"):
            choose_lesson(data, load_head(case.directory), vocabulary().t2d_V, _DRAFTS, CPU)


ANSWER = list(range(100, 110))  # 10 tokens: one from the prefill, steps of 4, 4 and 1


def test_all_accepted() -> None:
    for last in (1, 2, 3):  # drafts behind the answer's end prove nothing
        verdict = judge(ANSWER, ANSWER, [3, 3, last], 3)
        assert (verdict.steps, verdict.fewest, verdict.by_position, verdict.causes) == (3, 3, [1.0, 1.0, 1.0], [])


def test_a_last_draft_that_fails_costs_no_step_and_is_told() -> None:
    verdict = judge(ANSWER, ANSWER, [3, 3, 0], 3)
    assert verdict.steps == verdict.fewest and verdict.causes


def test_a_first_draft_that_fails_points_at_what_the_head_is_fed() -> None:
    verdict = judge(ANSWER, ANSWER, [0, 3, 3], 3)
    assert verdict.by_position[0] < 1.0
    assert any("layer ids" in cause for cause in verdict.causes) and any("d2t" in cause for cause in verdict.causes)


def test_a_later_draft_that_fails_points_at_what_depths_hand_on() -> None:
    verdict = judge(ANSWER, ANSWER, [1, 1, 1, 1, 1], 3)
    assert verdict.by_position[:2] == [1.0, 0.0]
    assert "norm_output" in verdict.causes[0] and not any("layer ids" in cause for cause in verdict.causes)


def test_another_answer_is_the_targets_own() -> None:
    (cause,) = judge(ANSWER, [*ANSWER[:4], 7, *ANSWER[5:]], [3, 3, 1], 3).causes
    assert "token 5 of 10" in cause


def test_the_command_says_what_it_is_for() -> None:
    result = CliRunner().invoke(app, ["train"])
    assert result.exit_code == 1 and "--overfit-one" in result.output
