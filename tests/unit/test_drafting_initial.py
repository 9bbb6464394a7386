"""A head started from an existing drafter: every layout, what does not fit, and the content it is held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from eyas.drafting.forward import trainable
from eyas.drafting.heads import export, make_head
from eyas.drafting.initial import InitialHead, start_from
from eyas.errors import EyasError
from eyas.params import DraftParams

from .test_drafting_data import SIZES, make_target, vocabulary

FIRST_EAGLE3: dict[str, Any] = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
# what a file of SpecForge's or of EAGLE's authors holds (https://github.com/SafeAILab/EAGLE/issues/265); no embeddings
MIDLAYER = {
    *("d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight"),
    *(f"midlayer.{norm}.weight" for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
}


def _head(tmp_path: Path, params: DraftParams, seed: int = 0) -> Any:
    directory = make_target(tmp_path / "target")
    return make_head(params, directory, "some/target", vocabulary(), [2, 3, 4], ttt_steps=3, seed=seed)


def _drafter(tmp_path: Path, params: DraftParams | None = None) -> tuple[Path, Any]:
    """A drafter with other weights than a fresh head, in speculators' layout, and its model."""
    model = _head(tmp_path, params or DraftParams(), seed=1)
    with torch.no_grad():
        for weight in trainable(model):
            weight.add_(0.01 * torch.randn_like(weight))
    directory = tmp_path / "drafter"
    directory.mkdir()
    export(model, directory)
    return directory, model


def _pinned(directory: Path, **changes: Any) -> DraftParams:
    """Parameters that start from a directory, with the hash that the error tells."""
    with pytest.raises(EyasError, match="is not set; the hash of the weights") as told:
        start_from(None, DraftParams(init_from=str(directory)))  # type: ignore[arg-type]
    found = next(word for word in str(told.value).replace(":", " ").split() if len(word) == 64)
    return DraftParams(init_from=str(directory), init_revision=found, **changes)


def _started(tmp_path: Path, directory: Path, **changes: Any) -> tuple[Any, InitialHead]:
    params = _pinned(directory, **changes)
    model = _head(tmp_path, params)
    report = start_from(model, params)
    assert report is not None
    return model, report


def _rewrite(directory: Path, layout: str) -> None:
    """Turn speculators' layout into another."""
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    layer = config["transformer_layer_config"]
    if layout in ("specforge", "eagle"):
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        del tensors["embed_tokens.weight"]
    if layout == "specforge":
        # its export with transformers 5 writes the rotary parameters in the old form as well
        config = layer | {name: config[name] for name in ("fc_norm", "norm_output")} | {"rope_scaling": None}
        config |= {"rope_theta": layer["rope_parameters"]["rope_theta"], "use_sliding_window": False}
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2], "use_aux_hidden_state": True}
    elif layout == "eagle":
        names = "hidden_act hidden_size intermediate_size num_attention_heads num_key_value_heads num_hidden_layers"
        config = {name: layer[name] for name in [*names.split(), "rms_norm_eps", "vocab_size"]}
        config |= {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": SIZES.draft_vocab, "pad_token_id": 0}
        tensors = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    elif layout == "vllm":
        for fused, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
            room = fused.split(".")[0]
            pieces = [tensors.pop(f"layers.0.{room}.{part}_proj.weight") for part in parts]
            tensors[f"layers.0.{fused}.weight"] = torch.cat([piece.float() for piece in pieces])
        tensors["draft_id_to_target_id"] = tensors.pop("d2t")
        del tensors["t2d"]
        outside = ("lm_head.weight", "draft_id_to_target_id")
        tensors = {name if name in outside else f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("layout", "flags", "more"),
    [
        ("speculators", {}, None),
        ("vllm", {}, None),
        ("eagle", FIRST_EAGLE3, set()),
        ("specforge", FIRST_EAGLE3, set()),
        ("specforge", FIRST_EAGLE3 | {"fc_norm": True, "norm_output": True}, {"fc_norm.0.weight", "fc_norm.1.weight"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_layout_gives_the_drafter_s_weights(
    tmp_path: Path, layout: str, flags: dict[str, Any], more: set[str] | None
) -> None:
    directory, drafter = _drafter(tmp_path, DraftParams(**flags))
    _rewrite(directory, layout)
    if more is not None:
        assert set(load_file(directory / "model.safetensors")) == MIDLAYER | more
    model, report = _started(tmp_path, directory, **flags)
    theirs = dict(drafter.named_parameters())
    wanted = {name for name, weight in model.named_parameters() if weight.requires_grad}
    rounding = 2e-3 if layout == "eagle" else 0  # float16
    for name in wanted:
        torch.testing.assert_close(model.get_parameter(name), theirs[name], rtol=rounding, atol=rounding)
    assert set(report.taken) == wanted
    silent = "the drafter's config does not say which layers feed it; see that extract.layers has the same"
    assert report.warnings == ([silent] if layout == "eagle" else [])
    assert report.left["lm_head.weight"].startswith("equals the target's rows")
    assert json.loads(json.dumps(report.record()))["taken"] == report.taken


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3]}}, None),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, None),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}},
            "the drafter has [2, 4] (written [1, 3]: ids that begin with 1 count layers' outputs), the head [2, 3]",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, "the drafter has [2, 4], the head [2, 3]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "reads the target's last state alone"),
        ({"eagle_config": {"norm_before_fc": True}}, "draft.norm_before_fc: the drafter has true, the head false"),
        ({"attention_bias": True}, "attention_bias: True in the drafter, False as the target here"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4 in the drafter, 2 as the target here"),
        ({"rope_parameters": None, "rope_theta": 5e5}, '"rope_theta": 500000.0'),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, '"rope_type": "linear"'),
    ],
)
def test_a_config_that_means_another_function_is_told(
    tmp_path: Path, changes: dict[str, Any], told: str | None
) -> None:
    directory, _ = _drafter(tmp_path, DraftParams(**FIRST_EAGLE3))
    _rewrite(directory, "specforge")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    _, report = _started(tmp_path, directory, **FIRST_EAGLE3)
    if told is None:
        assert report.warnings == []
    else:
        assert any(told in warning for warning in report.warnings), report.warnings


def test_speculators_ids_are_vllm_s_even_where_they_begin_with_1(tmp_path: Path) -> None:
    directory, _ = _drafter(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 2]}))
    _, report = _started(tmp_path, directory)
    assert report.warnings == [
        "extract.layers: the drafter has [1, 2], the head [2, 3]; set extract.layers to the drafter's"
    ]


def test_an_earlier_eagle_is_no_eagle_3(tmp_path: Path) -> None:
    """Its MLP would fit; it reads one state of the target's, and its attention one width."""
    directory, drafter = _drafter(tmp_path)
    tensors = {name: p for name, p in drafter.state_dict().items() if name.startswith("layers.0.mlp.")}
    tensors["fc.weight"] = torch.zeros(SIZES.hidden, 2 * SIZES.hidden + 1)
    tensors |= {f"layers.0.self_attn.{name}_proj.weight": torch.zeros(64, SIZES.hidden) for name in "qkvo"}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        EyasError, match=r"no EAGLE-3 drafter for this target: fc\.weight: shape .*q_proj\.weight: shape"
    ):
        _started(tmp_path, directory)


def test_what_does_not_fit_stays_with_its_reason(tmp_path: Path) -> None:
    directory, _ = _drafter(tmp_path, DraftParams(intermediate_size=80, norm_before_fc=False, norm_output=False))
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["lm_head.weight"].float()
    tensors["layers.0.self_attn.o_proj.weight"] = tensors["layers.0.self_attn.o_proj.weight"].to(torch.int8)
    tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, directory / "model.safetensors")
    fresh = _head(tmp_path, DraftParams())
    model, report = _started(tmp_path, directory)
    up = "layers.0.mlp.up_proj.weight"
    assert report.left[up] == f"shape [80, {SIZES.hidden}], the head's is [96, {SIZES.hidden}]"
    torch.testing.assert_close(model.get_parameter(up), fresh.get_parameter(up), rtol=0, atol=0)
    assert "stored as int8" in report.left["layers.0.self_attn.o_proj.weight"]
    assert report.left["layers.0.self_attn.q_proj.bias"] == "the head has no such weight"
    assert report.left["input_norm.weight"] == "not in the drafter; starts afresh"
    assert "differs by 1.00 of the norm (128 of 128 tokens" in report.left["lm_head.weight"]
    torch.testing.assert_close(model.lm_head.weight, fresh.lm_head.weight, rtol=0, atol=0)
    told = "\n".join(report.warnings)
    assert "draft.norm_before_fc: the drafter has false, the head true; set draft.norm_before_fc" in told
    assert "set draft.norm_output" in told
    assert "draft.intermediate_size: the drafter has 80, the head 96" in told
    assert "norm_before_residual" not in told
    assert any("not taken  lm_head.weight" in line for line in report.lines())


def test_embeddings_are_taken_where_they_train(tmp_path: Path) -> None:
    directory, drafter = _drafter(tmp_path, DraftParams(train_embeddings=True))
    model, report = _started(tmp_path, directory, train_embeddings=True)
    torch.testing.assert_close(model.embed_tokens.weight, drafter.embed_tokens.weight, rtol=0, atol=0)
    model, report = _started(tmp_path, directory)
    assert "frozen: the target's are kept" in report.left["embed_tokens.weight"]
    assert not torch.equal(model.embed_tokens.weight, drafter.embed_tokens.weight)


def test_other_content_is_refused(tmp_path: Path) -> None:
    """The parameter names the content, so that another drafter at the same place cannot pass for the first."""
    directory, _ = _drafter(tmp_path)
    params = _pinned(directory)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] + 1}, directory / "model.safetensors")
    with pytest.raises(EyasError, match="but the weights are others"):
        start_from(_head(tmp_path, params), params)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    params = DraftParams(init_from=str(tmp_path), init_revision="0" * 64)
    with pytest.raises(EyasError, match=r"pickled weights \(.bin, .pt\) are not read"):
        start_from(None, params)  # type: ignore[arg-type]


@pytest.mark.parametrize("revision", [None, "main", "abc123"])
def test_a_hub_id_needs_a_commit(revision: str | None) -> None:
    params = DraftParams(init_from="some/drafter", init_revision=revision)
    with pytest.raises(EyasError, match="give the commit of some/drafter, 40 hex digits"):
        start_from(None, params)  # type: ignore[arg-type]


def test_something_else_than_a_drafter_is_refused(tmp_path: Path) -> None:
    directory, _ = _drafter(tmp_path)
    save_file({"encoder.weight": torch.zeros(3, 3)}, directory / "model.safetensors")
    with pytest.raises(EyasError, match=r"no EAGLE-3 drafter for this target: encoder\.weight"):
        _started(tmp_path, directory)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    directory, _ = _drafter(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"].float() * torch.nan}, directory / "model.safetensors")
    with pytest.raises(EyasError, match=r"fc\.weight: not finite"):
        _started(tmp_path, directory)


def test_a_revision_needs_a_drafter() -> None:
    with pytest.raises(ValidationError, match="init_from, which is not set"):
        DraftParams(init_revision="0" * 40)


def test_without_a_drafter_nothing_is_done(tmp_path: Path) -> None:
    assert start_from(_head(tmp_path, DraftParams()), DraftParams()) is None
