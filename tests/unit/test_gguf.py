"""A GGUF file that was made from a target converts back into that target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from eyas.errors import EyasError
from eyas.targets.gguf import bf16_bits, convert_gguf
from tests.tiny import CHATML, END, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, PAD, START, VOCAB, make_tiny_target

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONTROL, NORMAL = 3, 1


def llama_cpp_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q_proj and k_proj."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in NAMES:
        return f"{NAMES[name]}.weight"
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


def write_gguf(target: Path, path: Path, *, architecture: str = "llama", pre: str = "smollm") -> None:
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer = GGUFWriter(path, architecture)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i <= END else NORMAL for i in range(VOCAB)])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(PAD)
    writer.add_chat_template(CHATML)
    for name, tensor in load_file(target / "model.safetensors").items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = llama_cpp_rows(values, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path: Path, tied: bool) -> None:
    target = make_tiny_target(tmp_path / "target", tied=tied)
    write_gguf(target, tmp_path / "target.gguf")
    back = tmp_path / "back"
    back.mkdir()
    convert_gguf(tmp_path / "target.gguf", back)

    original, converted = load_file(target / "model.safetensors"), load_file(back / "model.safetensors")
    assert set(converted) == set(original)
    for name, tensor in original.items():
        assert torch.equal(converted[name], tensor.to(torch.bfloat16)), name

    config, expected = (json.loads((folder / "config.json").read_text()) for folder in (back, target))
    assert {n: v for n, v in config.items() if "dtype" not in n} == {
        n: v for n, v in expected.items() if "dtype" not in n
    }
    generation, expected = (json.loads((folder / "generation_config.json").read_text()) for folder in (back, target))
    assert generation == expected


@pytest.mark.parametrize("text", ["The eagle of 2024.", "<|im_start|>user\nHi 12345<|im_end|>\n", " ä\t€\n\n  "])
def test_the_tokenizer_is_the_same(tiny_target: Path, tmp_path: Path, text: str) -> None:
    write_gguf(tiny_target, tmp_path / "target.gguf")
    convert_gguf(tmp_path / "target.gguf", tmp_path)
    back, original = AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tiny_target)
    ids = back.encode(text, add_special_tokens=False)
    assert ids == original.encode(text, add_special_tokens=False)
    assert back.decode(ids) == text
    assert (back.eos_token_id, back.pad_token_id, back.chat_template) == (END, PAD, CHATML)


@pytest.mark.parametrize("what", [{"architecture": "qwen3"}, {"pre": "llama-bpe"}])
def test_other_kinds_are_refused(tiny_target: Path, tmp_path: Path, what: dict[str, str]) -> None:
    write_gguf(tiny_target, tmp_path / "other.gguf", **what)
    (tmp_path / "out").mkdir()
    with pytest.raises(EyasError, match=r"other\.gguf: architecture, tokenizer and pre-tokenizer are .*Use a Hugging"):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    floats = np.asarray(values, dtype=np.float32)
    assert np.array_equal(bf16_bits(floats), torch.from_numpy(floats).bfloat16().view(torch.uint16).numpy())
