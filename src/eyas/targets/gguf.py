"""Convert a Llama-architecture GGUF file into the Hugging Face layout that vLLM reads.

Takes one ``*.gguf`` file; gives a directory with ``model.safetensors`` (bf16), ``config.json``,
``generation_config.json``, ``tokenizer.json`` and ``tokenizer_config.json``. Needs NumPy, gguf and tokenizers only.

Shape legend: V vocabulary, D hidden size, H heads, P head dimension.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eyas.errors import EyasError
from eyas.files import write_text_atomic

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 values to bfloat16 (nearest, ties to even) and return the bit patterns as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _unpermute(weight_HPD: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of rotary pairs in the rows of q_proj and k_proj."""
    rows, columns = weight_HPD.shape
    half = rows // heads // 2
    return weight_HPD.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hf_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    return f"{_TOP_NAMES[parts[0]]}.weight"


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write uint16 bit patterns as BF16; NumPy has no bfloat16, so the header is written by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size]}
        offset += size
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)
    with path.open("wb") as out:
        out.write(len(blob).to_bytes(8, "little"))
        out.write(blob)
        for name in sorted(tensors):
            out.write(tensors[name].tobytes())


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # `pre = smollm` splits digits one by one before the GPT-2 pattern; transformers' GGUF import drops this.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def convert_gguf(source: Path, destination: Path) -> None:
    """Write the Hugging Face form of a GGUF file into an existing, empty directory.

    Args:
        source: a GGUF v3 file of architecture ``llama`` with a ``gpt2``/``smollm`` tokenizer.
        destination: directory that receives the files.

    Raises:
        EyasError: another architecture or tokenizer kind.
    """
    reader = GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields.get("general.architecture"), fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise EyasError(
            f"{source.name}: architecture, tokenizer and pre-tokenizer are {kind}; this converter reads "
            "('llama', 'gpt2', 'smollm') only. Use a Hugging Face directory for other targets."
        )
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, kv_heads)
        tensors[name] = bf16_bits(values)
    _write_safetensors(destination / "model.safetensors", tensors)

    bos, eos, pad = (fields[f"tokenizer.ggml.{k}_token_id"] for k in ("bos", "eos", "padding"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "pad_token": tokens[pad],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    for name, content in {
        "config.json": config,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad},
        "tokenizer_config.json": tokenizer_config,
    }.items():
        write_text_atomic(destination / name, json.dumps(content, indent=2, sort_keys=True) + "\n")
    _tokenizer(fields).save(str(destination / "tokenizer.json"))
