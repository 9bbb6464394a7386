"""Our training step against speculators' own, and what a pack must not mix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from speculators.losses import resolve_loss_config

from eyas.drafting import loss as loss_module
from eyas.drafting.forward import draft_states, trainable
from eyas.drafting.heads import make_head
from eyas.drafting.loss import head_loss
from eyas.drafting.planning import make_plan
from eyas.params import DraftParams

from .test_drafting_data import SIZES, collate, make_case, make_target, random_row, vocabulary


def _gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainable(model) if p.grad is not None])


@pytest.mark.parametrize("loss", ["kl_div", "ce", "tv", "lk_hybrid"])
@pytest.mark.parametrize(
    "shape", [{}, {"num_layers": 2}, {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}]
)
def test_equals_speculators_own_forward(tmp_path: Path, loss: str, shape: dict[str, object]) -> None:
    depths, decay = 3, 0.8
    case = make_case(tmp_path, rows=5, draft=DraftParams(**shape))
    batch = collate(case.rows)
    model = case.model.train()

    documents = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths))
    tokens, theirs, _ = model(
        hidden_states=batch.aux_TA.float()[None],
        input_ids=batch.input_ids_T[None],
        document_ids=documents[None],
        loss_mask=batch.mask_T[None],
        position_ids=batch.positions_T[None],
        verifier_last_hidden_states=batch.final_TH.float()[None],
        ttt_steps=depths,
        ttt_step_loss_decay=decay,
        loss_config=resolve_loss_config(loss, "eager"),
    )
    theirs.backward()
    reference = _gradients(model)
    model.zero_grad()

    plan = make_plan(batch, depths)
    states = draft_states(model, batch, plan, depths)
    ours = head_loss(model, states, batch, plan, loss, decay, True)
    ours.loss.backward()
    gradient = _gradients(model)

    assert ours.loss.item() == pytest.approx(theirs.item(), rel=2e-5)
    assert torch.nn.functional.cosine_similarity(gradient, reference, dim=0).item() > 0.99999
    torch.testing.assert_close(gradient, reference, rtol=2e-3, atol=2e-6)
    for depth in range(depths):
        drafted = tokens[depth][0][plan.active_N]
        known = ours.draft_ids_KN[depth] >= 0
        assert torch.equal(drafted[known], ours.draft_ids_KN[depth][known])


def test_chunks_do_not_change_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tmp_path, rows=4)
    batch = collate(case.rows)
    plan = make_plan(batch, 3)
    results = []
    for size in (1 << 30, 4 * SIZES.draft_vocab * 7):
        monkeypatch.setitem(loss_module._CHUNK_BYTES, "cpu", size)
        states = draft_states(case.model, batch, plan, 3).detach().requires_grad_()
        out = head_loss(case.model, states, batch, plan, "kl_div", 0.9, True)
        out.loss.backward()
        results.append((out.loss.item(), states.grad))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1])


def test_documents_in_a_pack_neither_see_nor_supervise_each_other(tmp_path: Path) -> None:
    depths = 7
    case = make_case(tmp_path, rows=3, supervise_all=True)
    together = collate(case.rows)
    plan = make_plan(together, depths)
    with torch.no_grad():
        states = draft_states(case.model, together, plan, depths)
        packed = head_loss(case.model, states, together, plan, "kl_div", 1.0, False)
    sums = torch.zeros(depths)
    first = 0
    for row in case.rows:
        alone = collate([row])
        own = make_plan(alone, depths)
        with torch.no_grad():
            own_states = draft_states(case.model, alone, own, depths)
            out = head_loss(case.model, own_states, alone, own, "kl_div", 1.0, False)
        for depth in range(depths):
            rows = own.rows[depth]
            assert len(rows) == row.slots - depth
            torch.testing.assert_close(states[depth, first + rows], own_states[depth, rows], rtol=1e-4, atol=1e-5)
        assert torch.equal(packed.draft_ids_KN[:, first : first + own_states.shape[1]], out.draft_ids_KN)
        sums += out.by_depth_K * torch.tensor([len(r) for r in own.rows])
        first += own_states.shape[1]
    torch.testing.assert_close(
        packed.by_depth_K * torch.tensor([len(r) for r in plan.rows]), sums, rtol=1e-4, atol=1e-4
    )


def test_a_neighbour_changes_nothing(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=2, supervise_all=True)
    other = random_row(np.random.default_rng(99), 17, supervise_all=True)
    outs = []
    for neighbour in (case.rows[1], other):
        batch = collate([case.rows[0], neighbour])
        plan = make_plan(batch, 7)
        with torch.no_grad():
            outs.append(draft_states(case.model, batch, plan, 7)[:, : case.rows[0].slots])
    for depth in range(7):
        inside = case.rows[0].slots - depth
        torch.testing.assert_close(outs[0][depth, :inside], outs[1][depth, :inside], rtol=1e-4, atol=1e-5)


def test_no_work_past_what_is_supervised(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=2)
    batch = collate(case.rows)
    plan = make_plan(batch, 3)
    # two turns a row, each with two slots before it whose later depths are supervised
    assert len(plan.active_N) == int(batch.mask_T.sum()) + 2 * 2 * len(case.rows)
    assert all(int(r.max()) < len(plan.active_N) for r in plan.rows)


def test_head_on_tied_and_untied_targets(tmp_path: Path) -> None:
    for tied in (True, False):
        directory = make_target(tmp_path / str(tied), tied=tied)
        model = make_head(DraftParams(), directory, "some/target", vocabulary(), [1, 2, 3, 4], ttt_steps=3, seed=0)
        kept = torch.from_numpy(vocabulary().t2d_V)
        assert torch.equal(model.lm_head.weight, model.embed_tokens.weight[kept]) is tied
        assert not any(p.isnan().any() for p in model.parameters())
