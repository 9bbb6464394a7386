"""The head's rotary parameters: as vLLM serves them, taken from every kind of target, and refused where no head can have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

from eyas.drafting.heads import export, make_head
from eyas.drafting.rope import attention_shape, head_rope
from eyas.errors import EyasError
from eyas.params import DraftParams, RopeParams

from .test_drafting_data import make_target, vocabulary

_CONFIG = Path("config.json")
_KIMI = {
    "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 50000.0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500000.0,
}  # fmt: skip
_GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "rope_theta": 150000.0,
}  # fmt: skip
_MADE = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    _LLAMA3,
    _KIMI,
    _KIMI | {"mscale_all_dim": 0.5},
    _GPT_OSS,
]


def _head(tmp_path: Path, target: dict[str, Any], draft: DraftParams) -> Any:
    directory = make_target(tmp_path / "target")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | target))
    return make_head(draft, directory, "some/target", vocabulary(), [1, 2, 3, 4], ttt_steps=3, seed=0)


@pytest.mark.parametrize("rope", _MADE, ids=lambda r: f"{r['rope_type']}-{len(r)}")
def test_the_head_turns_as_it_is_served(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Cosines and sines of training are those that vLLM computes from the written checkpoint."""
    model = _head(tmp_path, {}, DraftParams(rope=RopeParams(**rope)))
    export(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    served = SpeculatorsConfig.extract_transformers_pre_trained_config(written)
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(
            served["head_dim"],
            served["max_position_embeddings"],
            rope_parameters=served["rope_parameters"],
            dtype=torch.float32,
        )
    positions = torch.tensor([0, 1, 7, 63, 100, 255])
    cos, sin = (part[0, :, : served["head_dim"] // 2] for part in model.rotary_emb(torch.zeros(1), positions[None]))
    expected = theirs.cos_sin_cache[positions]
    torch.testing.assert_close(torch.cat([cos, sin], -1), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("text", "window", "expected"),
    [
        ({}, False, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5, "rope_scaling": None}, False, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e4, "rope_scaling": {"type": "yarn"} | {k: v for k, v in _KIMI.items() if k[:4] != "rope"}}, False, _KIMI),
        ({"rope_parameters": _LLAMA3}, False, _LLAMA3),
        (
            {"rope_parameters": {"mrope_section": [16, 24, 24], "rope_type": "default", "rope_theta": 5e6}},
            False,
            {"rope_type": "default", "rope_theta": 5e6},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
            False,
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
            False,
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        *[
            (
                {
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    }
                },
                window,
                expected,
            )
            for window, expected in (
                (False, {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}),
                (True, {"rope_type": "default", "rope_theta": 1e4}),
            )
        ],
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            True,
            {"rope_type": "default", "rope_theta": 1e4},
        ),
    ],
    ids=["none", "theta", "kimi", "llama3", "mrope", "old-mrope", "partial", "full", "sliding", "old-sliding"],
)  # fmt: skip
def test_a_target_s_parameters_are_reduced_to_a_plain_head_s(
    text: dict[str, Any], window: bool, expected: dict[str, Any]
) -> None:
    assert head_rope(None, text, window, _CONFIG) == expected


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'default', 'linear', 'llama3' or 'yarn'.*set draft.rope"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic.*set draft.rope"),
        ({"rope_type": "yarn", "factor": 4.0}, "yarn needs original_max_position_embeddings"),
        ({"sliding_attention": {"rope_type": "default"}}, "no rotary parameters of full_attention.*set draft.rope"),
    ],
)
def test_a_target_s_parameters_that_no_head_can_have(rope: dict[str, Any], told: str) -> None:
    with pytest.raises(EyasError, match=f"config.json.*{told}"):
        head_rope(None, {"rope_parameters": rope}, False, _CONFIG)


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "yran", "rope_theta": 1e4}, "'default', 'linear', 'llama3' or 'yarn'"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "linear needs factor"),
        ({"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}, "default has no factor"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1]}, "mrope_section"),
    ],
)
def test_given_parameters_are_checked(rope: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        DraftParams.model_validate({"rope": rope})


def test_given_parameters_win_over_the_target_s(tmp_path: Path) -> None:
    model = _head(
        tmp_path, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, DraftParams(rope=RopeParams(**_KIMI))
    )
    found = model.config.transformer_layer_config.rope_parameters
    assert {name: found[name] for name in _KIMI} == _KIMI


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"num_attention_heads": 64, "hidden_size": 5120, "num_key_value_heads": 8, "head_dim": 128}, (64, 8, 128)),
        ({"num_attention_heads": 32, "hidden_size": 4096}, (32, 32, 128)),
        (
            {"num_attention_heads": 64, "hidden_size": 7168, "num_key_value_heads": 64, "kv_lora_rank": 512, "head_dim": 64}
            | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
            (64, 64, 128),
        ),
    ],
    ids=["qwen3-32b", "plain", "kimi"],
)  # fmt: skip
def test_attention_heads(text: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert attention_shape(text, _CONFIG) == expected


def test_heads_wider_than_the_target(tmp_path: Path) -> None:
    """Heads times head size need not be the width."""
    attention = _head(tmp_path, {"head_dim": 32}, DraftParams()).layers[0].self_attn
    assert attention.q_proj.weight.shape == (4 * 32, 2 * 64)
    assert attention.o_proj.weight.shape == (64, 4 * 32)


def test_no_head_size(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="5 attention heads do not divide the width 64"):
        _head(tmp_path, {"head_dim": None, "num_attention_heads": 5}, DraftParams())
