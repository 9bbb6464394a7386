"""Test doubles of well-known chat templates, each with a tokenizer that knows its tokens.

A double is the tiny target's byte-level tokenizer, the special tokens of the model, and the template beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from eyas.templates.chat import ChatTemplate
from eyas.templates.encoding import TokenRow


@dataclass(frozen=True)
class Double:
    """What a model's tokenizer has beside its vocabulary."""

    special: tuple[str, ...]
    end: str  # what ends a turn
    bos: str | None = None
    ends: tuple[str, ...] = ()  # what else the generation config names
    added: tuple[str, ...] = ()  # tokens that are not special


_KIMI = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOS]", "[BOS]")
_KIMI_TOOLS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁output{name}｜>" for name in ("s▁begin", "s▁end", "▁begin", "▁end")),
)
_THINK = ("<think>", "</think>")
DOUBLES = {
    "chatml": Double(("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": Double(
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        "<|eot_id|>",
        "<|begin_of_text|>",
        ("<|end_of_text|>", "<|eom_id|>"),
    ),
    "qwen3": Double(
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        ends=("<|endoftext|>",),
        added=(*_THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "deepseek-v3": Double(
        _DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", added=("<｜User｜>", "<｜Assistant｜>")
    ),
    "deepseek-r1": Double(
        _DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", added=("<｜User｜>", "<｜Assistant｜>", *_THINK)
    ),
    "kimi-k2": Double((*_KIMI, "<|im_end|>"), "<|im_end|>", "[BOS]", ("[EOS]",), _KIMI_TOOLS),
    "kimi-k2.5": Double((*_KIMI, "<|im_end|>"), "<|im_end|>", "[BOS]", ("[EOS]",), (*_KIMI_TOOLS, *_THINK)),
    "gemma": Double(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", ("<end_of_turn>",)),
    "mistral": Double(
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        "</s>",
        "<s>",
    ),
    "gpt-oss": Double(
        ("<|startoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        "<|return|>",
        "<|startoftext|>",
        ("<|call|>",),
    ),
}


def make_double(folder: Path, name: str, tiny: Path, **variables: Any) -> ChatTemplate:
    """Write a double into a new folder and load it.

    Args:
        folder: where to.
        name: a key of `DOUBLES`.
        tiny: directory of the tiny target.
        variables: of the template.
    """
    double = DOUBLES[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in double.special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in double.added])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": double.end, "bos_token": double.bos}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v}))
    ends = [tokenizer.token_to_id(text) for text in (double.end, *double.ends)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text((Path(__file__).parent / f"{name}.jinja").read_text())
    return ChatTemplate(folder, variables=variables)


def segments(chat: ChatTemplate, row: TokenRow) -> list[tuple[str, bool]]:
    """A row's text in stretches with and without supervision."""
    stretches: list[tuple[str, bool]] = []
    for text, supervised in zip(chat.pieces(row.input_ids), row.loss_mask, strict=True):
        if stretches and stretches[-1][1] == supervised:
            stretches[-1] = (stretches[-1][0] + text, supervised)
        else:
            stretches.append((text, supervised))
    return stretches


def supervised(chat: ChatTemplate, rows: Sequence[TokenRow]) -> list[str]:
    """The supervised stretches of rows."""
    return [text for row in rows for text, inside in segments(chat, row) if inside]
