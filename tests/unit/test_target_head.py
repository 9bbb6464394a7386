"""Final norm and output head are found by name, whatever wraps the language model, and compute what it computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.targets.head import load_head, load_tensor
from tests.tiny import HIDDEN, VOCAB, make_tiny_target

NAMES = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def tensors_of(target: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(target / "model.safetensors")
    return {name: loaded[name] for name in NAMES if name in loaded}


def rewrite(source: Path, folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    return folder


def test_an_untied_head(tiny_target: Path) -> None:
    head, tensors = load_head(tiny_target), tensors_of(tiny_target)
    assert torch.equal(head.norm_weight_H, tensors["model.norm.weight"])
    assert torch.equal(head.head_VH, tensors["lm_head.weight"])
    assert (head.norm_eps, head.unit_offset, head.softcap) == (1e-5, False, None)


def test_a_tied_head_is_the_embeddings(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", tied=True)
    assert torch.equal(load_head(target).head_VH, tensors_of(target)["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("prefix", "head_prefix"),
    [
        ("language_model.", "language_model."),  # Kimi-K2.5, Llama 4, Gemma 3
        ("model.language_model.", ""),  # Qwen3-VL, Qwen3.5: `model.language_model.norm.weight`, `lm_head.weight`
    ],
)
def test_a_multimodal_wrapper(tiny_target: Path, tmp_path: Path, prefix: str, head_prefix: str) -> None:
    plain = tensors_of(tiny_target)
    wrapped = {
        (
            head_prefix + name
            if name.startswith("lm_head")
            else prefix + (name if prefix == "language_model." else name.removeprefix("model."))
        ): tensor
        for name, tensor in plain.items()
    }
    wrapped["vision_tower.encoder.model.norm.weight"] = torch.zeros(8)
    wrapped["model.visual.merger.norm.weight"] = torch.zeros(8)
    text = json.loads((tiny_target / "config.json").read_text()) | {"rms_norm_eps": 3e-6}
    target = rewrite(tiny_target, tmp_path / "wrapped", wrapped, text_config=text, rms_norm_eps=1.0)
    head = load_head(target)
    assert torch.equal(head.norm_weight_H, plain["model.norm.weight"])
    assert torch.equal(head.head_VH, plain["lm_head.weight"])
    assert head.norm_eps == 3e-6


def test_the_plain_name_goes_before_a_wrapped_one(tiny_target: Path, tmp_path: Path) -> None:
    tensors = tensors_of(tiny_target) | {"draft.model.norm.weight": torch.zeros(8)}
    target = rewrite(tiny_target, tmp_path / "both", tensors)
    assert torch.equal(load_head(target).norm_weight_H, tensors["model.norm.weight"])


def test_two_candidates_are_an_error(tiny_target: Path, tmp_path: Path) -> None:
    tensors = {f"{part}.{name}": tensor.clone() for name, tensor in tensors_of(tiny_target).items() for part in "ab"}
    target = rewrite(tiny_target, tmp_path / "two", tensors)
    with pytest.raises(EyasError, match=r"may be model\.norm\.weight: a\.model\.norm\.weight, b\.model\.norm\.weight"):
        load_head(target)


@pytest.mark.parametrize("missing", ["model.norm.weight", "lm_head.weight"])
def test_missing_tensors_are_named(tiny_target: Path, tmp_path: Path, missing: str) -> None:
    tensors = tensors_of(tiny_target)
    del tensors[missing], tensors["model.embed_tokens.weight"]
    target = rewrite(tiny_target, tmp_path / "missing", tensors)
    assert load_tensor(target, missing) is None
    with pytest.raises(EyasError, match=f"no tensor {missing}"):
        load_head(target)


def test_a_sharded_index_is_followed(tiny_target: Path, tmp_path: Path) -> None:
    plain = tensors_of(tiny_target)
    target = rewrite(tiny_target, tmp_path / "sharded", {})
    (target / "model.safetensors").unlink()
    weight_map = {}
    for number, (name, tensor) in enumerate(plain.items(), 1):
        weight_map[name] = f"model-{number:05d}-of-00003.safetensors"
        save_file({name: tensor}, target / weight_map[name])
    # a leftover that the index does not list
    save_file({"x.model.norm.weight": torch.zeros(3)}, target / "old.safetensors")
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    head = load_head(target)
    assert torch.equal(head.norm_weight_H, plain["model.norm.weight"])
    assert torch.equal(head.head_VH, plain["lm_head.weight"])


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "llama"])
def test_norm_conventions(tiny_target: Path, tmp_path: Path, kind: str) -> None:
    head = load_head(rewrite(tiny_target, tmp_path / "convention", tensors_of(tiny_target), model_type=kind))
    hidden_NH = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)) * 3
    weight_H = head.norm_weight_H + (0 if kind == "llama" else 1)
    expected_NH = torch.nn.functional.rms_norm(hidden_NH, (HIDDEN,), weight_H, 1e-5)
    torch.testing.assert_close(head.normed(hidden_NH.double()), expected_NH)


def test_logits_are_capped_where_the_target_caps_them(tiny_target: Path, tmp_path: Path) -> None:
    capped = load_head(rewrite(tiny_target, tmp_path / "capped", tensors_of(tiny_target), final_logit_softcapping=30.0))
    normed_NH = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)) * 9
    plain_NV = load_head(tiny_target).logits(normed_NH)
    assert plain_NV.shape == (5, VOCAB)
    torch.testing.assert_close(capped.logits(normed_NH), 30 * torch.tanh(plain_NV / 30))
    assert capped.logits(normed_NH).abs().max() <= 30
