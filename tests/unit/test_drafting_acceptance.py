"""Simulated chain drafting against a plain simulation, and the walk's bookkeeping."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.drafting.acceptance import AcceptanceCounter, TargetChoice, target_choice
from eyas.drafting.data import Batch
from eyas.drafting.forward import draft_states
from eyas.drafting.loss import head_loss
from eyas.drafting.planning import Plan, make_plan
from eyas.targets.head import load_head

from .test_drafting_data import collate, make_case, make_row


def _line(length: int, prompt: int = 2) -> tuple[Batch, Plan]:
    ids = np.arange(100, 100 + length, dtype=np.int32)
    mask = np.arange(length) >= prompt
    batch = collate([make_row("c", ids, mask)])
    return batch, make_plan(batch, 3)


def _count(batch: Batch, plan: Plan, drafted_KT: np.ndarray, choice: TargetChoice) -> AcceptanceCounter:
    counter = AcceptanceCounter(3)
    counter.add(batch, plan, drafted_KT[:, plan.active_N.numpy()], choice)
    return counter


def _perfect(batch: Batch) -> tuple[np.ndarray, TargetChoice]:
    ids = batch.input_ids_T.numpy()
    greedy = np.append(ids[1:], -1)
    drafted = np.full((3, len(ids)), -1)
    for depth in range(3):
        drafted[depth, : len(ids) - 1 - depth] = ids[1 + depth :]
    return drafted, TargetChoice(greedy, np.ones(len(ids)))


def test_a_perfect_head_takes_whole_strides() -> None:
    batch, plan = _line(2 + 13)
    result = _count(batch, plan, *_perfect(batch)).result()
    # thirteen answer tokens: the first comes with the prompt, then three steps of four
    assert result.steps == 3
    assert result.length == pytest.approx(4.0)


def test_the_last_token_saves_no_step() -> None:
    batch, plan = _line(2 + 3)
    result = _count(batch, plan, *_perfect(batch)).result()
    # two tokens are left: one drafted and accepted, the last is the step's own
    assert (result.steps, result.by_position) == (1, [1.0, 0.0, 0.0])


def test_a_wrong_head_needs_a_step_a_token() -> None:
    batch, plan = _line(2 + 9)
    drafted, choice = _perfect(batch)
    result = _count(batch, plan, np.where(drafted >= 0, 7, -1), choice).result()
    assert (result.steps, result.length) == (8, 1.0)


def test_where_the_text_left_the_greedy_path_the_chain_is_unknown_not_rejected() -> None:
    batch, plan = _line(2 + 9)
    drafted, choice = _perfect(batch)
    first = int(torch.nonzero(batch.mask_T)[0])
    drafted[0, first] = choice.greedy_T[first] = 9  # accepted, but the text went elsewhere
    choice.stayed_T[first] = 0.5
    result = _count(batch, plan, drafted, choice).result()
    assert result.by_position[0] == 1.0
    # later positions are judged by the other chains alone
    assert result.by_position[1] == pytest.approx(1.0)


def test_chains_that_stayed_stand_for_those_that_left() -> None:
    """Two kinds of places: where sampling leaves often, the head fails next; where it never leaves, it does not."""
    generator = np.random.default_rng(0)
    counter = AcceptanceCounter(2)
    for index in range(1000):
        unsure = index % 2 == 0
        batch, _ = _line(2 + 4)
        plan = make_plan(batch, 2)
        first = int(torch.nonzero(batch.mask_T)[0])
        ids = batch.input_ids_T.numpy()
        greedy = np.append(ids[1:], -1)
        stayed = np.ones(len(ids))
        drafted = np.full((2, len(ids)), -1)
        drafted[0, first] = greedy[first]
        drafted[1, first] = 5 if unsure else greedy[first + 1]
        if unsure:
            stayed[first] = 0.3
            if generator.random() > 0.3:
                greedy[first] = drafted[0, first] = 11
        counter.add(batch, plan, drafted[:, plan.active_N.numpy()], TargetChoice(greedy, stayed))
    alive, hits = counter._alive["c"], counter._hits["c"]
    assert hits[1] / alive[1] == pytest.approx(0.5, abs=0.05)


def test_chains_equal_drafting_token_by_token(tmp_path: Path) -> None:
    """One pass over the text gives the chain that a head gives when it is fed its own tokens and states, as served."""
    case = make_case(tmp_path, rows=3)
    depths = 3
    batch = collate(case.rows)
    plan = make_plan(batch, depths)
    with torch.no_grad():
        states = draft_states(case.model, batch, plan, depths)
        ids_KN = head_loss(case.model, states, batch, plan, "kl_div", 1.0, False).draft_ids_KN
    to_target = torch.arange(len(case.model.d2t)) + case.model.d2t
    ends, checked = np.cumsum(batch.lengths), 0
    for row_index, slot in enumerate(plan.active_N.tolist()):
        start = int((ends[ends <= slot]).max(initial=0))
        chain = _served_chain(case.model, batch, start, slot, depths, to_target)
        for depth in range(depths):
            if ids_KN[depth, row_index] < 0:
                break
            assert int(to_target[ids_KN[depth, row_index]]) == chain[depth]
            checked += 1
            if slot + depth + 1 == len(batch.input_ids_T) or chain[depth] != int(batch.input_ids_T[slot + depth + 1]):
                break
    assert checked > 20


@torch.no_grad()
def _served_chain(
    model: torch.nn.Module, batch: Batch, start: int, slot: int, depths: int, to_target: torch.Tensor
) -> list[int]:
    """vLLM's loop in plain words, with speculators' own modules: prefill, then one token at a time with a cache."""
    from transformers import DynamicCache

    cache = DynamicCache()
    hidden = model.fc(model.input_norm(batch.aux_TA[start : slot + 1].float()))[None]
    ids = batch.input_ids_T[start : slot + 1][None]
    positions = batch.positions_T[start : slot + 1][None]
    chain = []
    for _ in range(depths):
        length = ids.shape[1]
        mask = torch.full((length, cache.get_seq_length() + length), -torch.inf).triu(1 + cache.get_seq_length())
        joined = torch.cat([model.embed_tokens(ids), hidden], -1)
        hidden = model.layers[0](
            joined, attention_mask=mask[None, None], position_ids=positions, past_key_values=cache,
            position_embeddings=model.rotary_emb(joined, positions),
        )  # fmt: skip
        hidden = model.norm(hidden)[:, -1:]
        token = int(to_target[model.lm_head(hidden)[0, -1].argmax()])
        chain.append(token)
        ids, positions = torch.tensor([[token]]), positions[:, -1:] + 1
    return chain


def test_target_choice(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=2)
    target = load_head(case.directory)
    batch = collate(case.rows)
    choice = target_choice(batch, target, 0.7)
    slot = int(torch.nonzero(batch.mask_T)[5])
    logits = target.logits(target.normed(batch.final_TH[slot][None]))[0]
    assert choice.greedy_T[slot] == int(logits.argmax())
    assert choice.stayed_T[slot] == pytest.approx(float(torch.softmax(logits / 0.7, -1).max()), rel=1e-5)
    assert (choice.greedy_T[~batch.mask_T.numpy()] == -1).all()


def test_interval_holds_the_estimate_and_narrows_with_conversations() -> None:
    widths = []
    for conversations in (8, 200):
        counter, random = AcceptanceCounter(2), np.random.default_rng(0)
        for index in range(conversations):
            counter._alive[f"c{index}"] += [20.0, 8.0]
            counter._hits[f"c{index}"] += [float(random.binomial(20, 0.4)), float(random.binomial(8, 0.3))]
        result = counter.result()
        assert result.low < result.length < result.high
        widths.append(result.high - result.low)
    assert widths[1] < widths[0] / 3
