"""A target that is made in a second: a random Llama of 4 layers whose next tokens are well separated.

`make_tiny_target` gives a directory in Hugging Face layout, the same bytes for the same seed; transformers and vLLM
read it. Shape legend: V vocabulary, H hidden size, T tokens, L layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 512, 64, 4, 2, 1, 128
HEAD_DIM = HIDDEN // HEADS
PAD, START, END = 0, 1, 2  # <|endoftext|>, <|im_start|>, <|im_end|>
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = """
A young eagle in training is called an eyas. It leaves the nest when its feathers are strong enough to carry it, and
for the first few weeks it flies badly: it overshoots the branch, turns too late, and lands on the ground more often
than on the hand of the falconer. Patience is the whole of the art. Each morning the bird is weighed, because a bird
that has eaten too much will not come back, and a bird that has eaten too little will not fly at all. What is the
capital of France? The capital of France is Paris. How many days does a week have? There are seven days in a week:
Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday. Write a short poem about the sea. The sea is wide,
the sea is deep, it sings the tired shore to sleep; and when the wind begins to blow, the boats come home in a row.
Please explain how a small model can help a large one. The small model guesses the next words, and the large model
checks all of these guesses at once; what it would have said itself is kept, the rest is thrown away, so the answer
stays the same and comes sooner. 1, 2, 3, 4, 5, 6, 7, 8, 9, 10. def add(a, b): return a + b. print(add(2, 3))
user assistant system Hello! How are you today? I am fine, thank you. Can you give me an example? Yes, of course.
"""


def tiny_profile(source: str) -> dict[str, Any]:
    """A profile of a tiny target at this place, as ``params.yaml`` has it."""
    return {
        "target": {"source": source, "dtype": "float32", "max_model_len": 128},
        "dataset": {"sources": [{"source": "data/input/chats.jsonl"}]},
        "responses": {"max_tokens": 16},
        "extract": {"layers": [1, 2, 3, 4]},
        "vocab": {"draft_vocab_size": 256},
        "draft": {},
        "train": {"epochs": 1, "lr": 0.001, "tokens_per_step": 256},
        "benchmark": {"max_tokens": 12, "concurrency": [4], "heldout_prompts": 5, "prompts_per_set": 2},
    }


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def _weights(seed: int, *, tied: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def matrix(out: int, into: int, gain: float = 1.0) -> np.ndarray:
        weight: np.ndarray = random.standard_normal((out, into)) * gain / into**0.5
        return weight.astype(np.float32)

    def norm(spread: float) -> np.ndarray:
        # far from constant: a norm left out, done twice or with another convention must change the next token
        weight: np.ndarray = np.exp(random.standard_normal(HIDDEN) * spread)
        return weight.astype(np.float32)

    tensors = {"model.embed_tokens.weight": random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(0.2),
            prefix + "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN, 1.5),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 1.5),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2.0),
            # strong attention and MLP: else the next token depends on the last one alone and greedy answers loop
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN, 3.0),
            prefix + "post_attention_layernorm.weight": norm(0.2),
            prefix + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN, 2.0),
            prefix + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN, 2.0),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE, 2.0),
        }
    tensors["model.norm.weight"] = norm(1.0)
    if not tied:
        tensors["lm_head.weight"] = random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    return tensors


def make_tiny_target(directory: Path, *, seed: int = 0, chat_template: str | None = CHATML, tied: bool = False) -> Path:
    """Write the target into ``directory`` (made if need be) and return it; the same arguments give the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": START,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[START],
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "unk_token": SPECIAL_TOKENS[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    for name, content in {
        "config.json": config,
        "generation_config.json": {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD},
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    _tokenizer().save(str(directory / "tokenizer.json"))
    save_file(_weights(seed, tied=tied), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def tiny_states(directory: Path, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[np.ndarray]:
    """Hidden states of each row as a store keeps them, uint16 [T, L, H]: bfloat16 bit patterns of the float32 states."""
    import torch

    from eyas.extraction.reference import reference_states

    states = reference_states(directory, rows, layers, trust_remote_code=False)
    return [hidden_TLH.to(torch.bfloat16).view(torch.uint16).numpy() for hidden_TLH in states]
