"""Head configurations: each trains, equals speculators' own forward, attends as it is served, and says so in its config."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import core
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

from eyas.drafting import loss as loss_module
from eyas.drafting.data import Batch
from eyas.drafting.forward import draft_states, trainable
from eyas.drafting.heads import export, make_head
from eyas.drafting.loss import head_loss
from eyas.drafting.planning import make_plan
from eyas.params import DraftParams
from eyas.targets.head import load_head
from eyas.vocabulary import choose

from .test_drafting_data import SIZES, collate, make_case, make_target, vocabulary

_OFF = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
_SHAPES: list[dict[str, Any]] = [
    {},
    _OFF,
    _OFF | {"fc_norm": True, "norm_output": True},
    {"num_layers": 2, "norm_output": False},
    {"sliding_window": 5},
    {"sliding_window": 2, "num_layers": 2, "norm_before_fc": False, "fc_norm": True},
]


def _gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in trainable(model) if p.grad is not None])


def _served_window(window: int) -> Any:
    """speculators' mask of the next depth, with the window where serving has it: behind the query's own position."""
    plain = core.extend_dense_mask_for_draft_tokens

    def extend(mask: torch.Tensor, slots: int) -> torch.Tensor:
        mask = plain(mask, slots)
        depth = mask.shape[-1] // slots - 1
        columns = torch.arange(mask.shape[-1])
        key_place = columns % slots + columns // slots
        gone = key_place[None] <= torch.arange(slots)[:, None] + depth - window
        return mask.masked_fill(gone, -torch.inf)

    return extend


def _theirs(model: Any, batch: Batch, depths: int, decay: float, loss: str) -> torch.Tensor:
    kind = model.fc.weight.dtype
    documents = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths))
    _, value, _ = model(
        hidden_states=batch.aux_TA.to(kind)[None],
        input_ids=batch.input_ids_T[None],
        document_ids=documents[None],
        loss_mask=batch.mask_T[None],
        position_ids=batch.positions_T[None],
        verifier_last_hidden_states=batch.final_TH.to(kind)[None],
        ttt_steps=depths,
        ttt_step_loss_decay=decay,
        loss_config=resolve_loss_config(loss, "eager"),
    )
    return value


@pytest.mark.parametrize("loss", ["kl_div", "rkl", "jsd", "nla"])
@pytest.mark.parametrize("shape", _SHAPES, ids=lambda s: "-".join(map(str, s)) or "default")
def test_equals_speculators_in_double_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], loss: str
) -> None:
    depths, decay = 4, 0.8
    case = make_case(tmp_path, rows=1, draft=DraftParams(**shape))
    batch = collate(case.rows)
    if "sliding_window" in shape:
        monkeypatch.setattr(core, "extend_dense_mask_for_draft_tokens", _served_window(shape["sliding_window"]))
    exact = copy.deepcopy(case.model).double()
    theirs = _theirs(exact, batch, depths, decay, loss)
    theirs.backward()

    plan = make_plan(batch, depths)
    ours = head_loss(case.model, draft_states(case.model, batch, plan, depths), batch, plan, loss, decay, True)
    ours.loss.backward()

    assert ours.loss.item() == pytest.approx(theirs.item(), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(_gradients(case.model), _gradients(exact), dim=0)
    assert cosine.item() >= 0.999


@pytest.mark.parametrize("shape", [{"sliding_window": 3}, {"num_layers": 2}, {"num_layers": 2, "sliding_window": 3}])
def test_packed_documents_stay_apart(tmp_path: Path, shape: dict[str, Any]) -> None:
    depths = 7
    case = make_case(tmp_path, rows=3, supervise_all=True, draft=DraftParams(**shape))
    together = collate(case.rows)
    with torch.no_grad():
        states = draft_states(case.model, together, make_plan(together, depths), depths)
        first = 0
        for row in case.rows:
            alone = collate([row])
            own = draft_states(case.model, alone, make_plan(alone, depths), depths)
            for depth in range(depths):
                inside = slice(0, row.slots - depth)
                torch.testing.assert_close(
                    states[depth, first : first + row.slots][inside], own[depth, inside], rtol=1e-4, atol=1e-5
                )
            first += row.slots


@pytest.mark.parametrize("shape", _SHAPES, ids=lambda s: "-".join(map(str, s)) or "default")
def test_trains(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Two layers gave NaN at the first step elsewhere."""
    case = make_case(tmp_path, rows=2, draft=DraftParams(**shape))
    batch = collate(case.rows)
    plan = make_plan(batch, 3)
    optimizer = torch.optim.AdamW(trainable(case.model), 1e-3)
    losses = []
    for _ in range(6):
        out = head_loss(case.model, draft_states(case.model, batch, plan, 3), batch, plan, "kl_div", 1.0, True)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_embeddings_train_only_where_asked(tmp_path: Path) -> None:
    for asked in (False, True):
        case = make_case(tmp_path / str(asked), rows=1, draft=DraftParams(train_embeddings=asked))
        batch = collate(case.rows)
        plan = make_plan(batch, 2)
        head_loss(
            case.model, draft_states(case.model, batch, plan, 2), batch, plan, "kl_div", 1.0, True
        ).loss.backward()
        gradient = case.model.embed_tokens.weight.grad
        assert (gradient is not None and bool(gradient.any())) is asked


@pytest.mark.parametrize("shape", _SHAPES, ids=lambda s: "-".join(map(str, s)) or "default")
def test_the_config_says_what_vllm_reads(tmp_path: Path, shape: dict[str, Any]) -> None:
    params = DraftParams(**shape)
    export(make_case(tmp_path, rows=1, draft=params).model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    served = SpeculatorsConfig.extract_transformers_pre_trained_config(written)
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert served[flag] is getattr(params, flag)
    kind = "sliding_attention" if params.sliding_window else "full_attention"
    assert served["layer_types"] == [kind] * params.num_layers
    assert served.get("sliding_window") == params.sliding_window
    assert served["num_hidden_layers"] == params.num_layers


def test_a_full_vocabulary_has_no_mapping(tmp_path: Path) -> None:
    whole = choose(np.zeros(SIZES.vocab, dtype=np.int64), None, [0])
    model = make_head(
        DraftParams(), make_target(tmp_path / "t"), "some/target", whole, [1, 2, 3, 4], ttt_steps=2, seed=0
    )
    export(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        assert not {"d2t", "t2d"} & set(tensors.keys())
    assert model.lm_head.weight.shape[0] == SIZES.vocab
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == SIZES.vocab


def test_two_norms_before_the_projection_are_refused() -> None:
    with pytest.raises(ValidationError, match="exclude each other"):
        DraftParams(fc_norm=True, norm_before_fc=True)


def test_the_teacher_has_the_norm_of_a_gemma_like_target(tmp_path: Path) -> None:
    directory = make_target(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "gemma3_text"}))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] -= 1
    save_file(tensors, directory / "model.safetensors")
    norm = Gemma3RMSNorm(SIZES.hidden, 1e-5)
    norm.load_state_dict({"weight": tensors["model.norm.weight"].float()})
    model = make_head(DraftParams(), directory, "some/target", vocabulary(), [1, 2, 3, 4], ttt_steps=3, seed=0)
    states = torch.randn(5, SIZES.hidden)
    torch.testing.assert_close(model.verifier_norm(states), norm(states))


@pytest.mark.parametrize("loss", ["kl_div", "jsd"])
def test_the_teacher_is_capped_as_a_gemma_2_target_is(tmp_path: Path, loss: str) -> None:
    """The loss is against the target's own distribution, whose logits it holds within a bound."""
    directory = make_target(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 5.0}))
    case = make_case(tmp_path / "case", rows=1)
    model = make_head(DraftParams(), directory, "some/target", vocabulary(), [1, 2, 3, 4], ttt_steps=3, seed=0)
    batch = collate(case.rows)
    plan = make_plan(batch, 1)
    target = load_head(directory)
    with torch.no_grad():
        states = draft_states(model, batch, plan, 1)
        found = head_loss(model, states, batch, plan, loss, 1.0, False).loss
        teacher = target.logits(target.normed(batch.final_TH[plan.label_slots]))[:, model.t2d]
        assert teacher.abs().max() <= 5.0
        expected = resolve_loss_config(loss, "eager")[loss][0](model.lm_head(states[0])[None], teacher[None]).mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation gives, in elements, among those as wide as the draft vocabulary.

    Views of the output head count for nothing: transposed, it is as wide.
    """

    def __init__(self, head: torch.Tensor) -> None:
        super().__init__()
        self._head = head.untyped_storage().data_ptr()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            wide = isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == SIZES.draft_vocab
            if wide and tensor.untyped_storage().data_ptr() != self._head:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("loss", ["kl_div", "jsd"])
def test_no_logits_outlive_a_chunk_and_the_teacher_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    case = make_case(tmp_path, rows=5)
    batch = collate(case.rows)
    plan = make_plan(batch, 3)
    chunk = 7
    monkeypatch.setitem(loss_module._CHUNK_BYTES, "cpu", chunk * 4 * SIZES.draft_vocab)
    asked = []
    teacher, product = case.model.verifier_lm_head.weight, loss_module._logits

    def counted(states_MH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        if weight_VH is teacher:
            asked.append(len(states_MH))
        return product(states_MH, weight_VH)

    monkeypatch.setattr(loss_module, "_logits", counted)
    states = draft_states(case.model, batch, plan, 3)
    case.model.verifier_lm_head.weight.data = case.model.lm_head.weight.data
    with _Largest(case.model.lm_head.weight) as largest:
        head_loss(case.model, states, batch, plan, loss, 1.0, True)
    assert 0 < largest.elements <= chunk * SIZES.draft_vocab
    assert sum(asked) == int(batch.mask_T.sum()) < len(batch.mask_T)
