"""Masks checked by hand, template by template: what stands between two ⟦ ⟧ is what the target would have generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eyas.templates.chat import ChatTemplate, Message, TemplateRefusal
from tests.templates.doubles import make_double, segments

Load = Callable[..., ChatTemplate]


@pytest.fixture(scope="module")
def load(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Load:
    return lambda name, **variables: make_double(tmp_path_factory.mktemp(name), name, tiny_target, **variables)


def said(*turns: str) -> list[Message]:
    return [{"role": role, "content": content} for role, content in (turn.split(": ", 1) for turn in turns)]


PLAIN = said("system: Be brief.", "user: Hi", "assistant: Hello!", "user: Bye", "assistant: See you.")
THOUGHTFUL: list[Message] = [
    *said("user: Hi"),
    {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."},
    *said("user: Bye"),
    {"role": "assistant", "content": "See you.", "reasoning_content": "A farewell."},
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get", "arguments": {"city": "Paris"}}}
CALLED: list[Message] = [
    *said("user: Weather?"),
    {"role": "assistant", "content": "", "reasoning_content": "Look it up.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "get", "content": "18"},
    *said("assistant: 18 degrees."),
]
TOOLS = [{"type": "function", "function": {"name": "get", "description": "Gets."}}]


def masked(chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[str]:
    """One text for each row, its supervised stretches in brackets."""
    return [
        "".join(f"⟦{text}⟧" if supervised else text for text, supervised in segments(chat, row))
        for row in chat.answered_rows(messages, tools, 4096)
    ]


def test_chatml(load: Load) -> None:
    assert masked(load("chatml"), PLAIN) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦Hello!<|im_end|>⟧\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦See you.<|im_end|>⟧"
    ]


def test_llama3(load: Load) -> None:
    system = "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 01 Jan 2026\n\n"
    user, assistant = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
    assert masked(load("llama3"), PLAIN) == [
        f"<|begin_of_text|>{system}Be brief.<|eot_id|>{user}Hi<|eot_id|>{assistant}⟦Hello!<|eot_id|>⟧"
        f"{user}Bye<|eot_id|>{assistant}⟦See you.<|eot_id|>⟧"
    ]
    assert masked(load("llama3"), CALLED) == [
        f"<|begin_of_text|>{system}<|eot_id|>{user}Weather?<|eot_id|>{assistant}"
        '⟦{"name": "get", "parameters": {"city": "Paris"}}<|eot_id|>⟧'
        f'<|start_header_id|>ipython<|end_header_id|>\n\n"18"<|eot_id|>{assistant}⟦18 degrees.<|eot_id|>⟧'
    ]


def test_qwen3_thinking(load: Load) -> None:
    ask = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert masked(load("qwen3"), THOUGHTFUL) == [  # history has no reasoning, so that each answer has a row of its own
        ask.format("Hi") + "⟦<think>\nA greeting.\n</think>\n\nHello!<|im_end|>⟧",
        ask.format("Hi")
        + "Hello!<|im_end|>\n"
        + ask.format("Bye")
        + "⟦<think>\nA farewell.\n</think>\n\nSee you.<|im_end|>⟧",
    ]
    assert (
        masked(load("qwen3"), CALLED)
        == [  # between a call and the next question it is kept: one row
            ask.format("Weather?") + "⟦<think>\nLook it up.\n</think>\n\n<tool_call>\n"
            '{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>⟧\n'
            + ask.format("\n<tool_response>\n18\n</tool_response>").replace("user\n\n", "user\n")
            + "⟦<think>\n\n</think>\n\n18 degrees.<|im_end|>⟧"
        ]
    )


def test_qwen3_not_thinking(load: Load) -> None:
    ask = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert masked(load("qwen3", enable_thinking=False), THOUGHTFUL) == [
        ask.format("Hi") + "<think>\n\n</think>\n\n⟦Hello!<|im_end|>⟧",
        ask.format("Hi") + "Hello!<|im_end|>\n" + ask.format("Bye") + "<think>\n\n</think>\n\n⟦See you.<|im_end|>⟧",
    ]


def test_deepseek_v3(load: Load) -> None:
    assert masked(load("deepseek-v3"), PLAIN) == [
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>⟦Hello!<｜end▁of▁sentence｜>⟧"
        "<｜User｜>Bye<｜Assistant｜>⟦See you.<｜end▁of▁sentence｜>⟧"
    ]
    assert masked(load("deepseek-v3"), CALLED) == [  # arguments as JSON text
        "<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜>⟦<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        '<｜tool▁sep｜>get\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>18<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        "⟦18 degrees.<｜end▁of▁sentence｜>⟧"
    ]


def test_deepseek_r1(load: Load) -> None:
    start = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"
    assert (
        masked(load("deepseek-r1"), THOUGHTFUL)
        == [  # the prompt opens the think block, the answer closes it
            start + "<think>\n⟦A greeting.\n</think>\n\nHello!<｜end▁of▁sentence｜>⟧",
            start + "Hello!<｜end▁of▁sentence｜><｜User｜>Bye<｜Assistant｜><think>\n⟦A farewell.\n</think>\n\nSee you."
            "<｜end▁of▁sentence｜>⟧",
        ]
    )
    assert masked(load("deepseek-r1"), PLAIN[1:]) == [  # no reasoning: the finished turns lack the scaffold
        start + "⟦Hello!<｜end▁of▁sentence｜>⟧<｜User｜>Bye<｜Assistant｜>⟦See you.<｜end▁of▁sentence｜>⟧"
    ]


def test_kimi_k2(load: Load) -> None:
    assert masked(load("kimi-k2"), PLAIN) == [
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>⟦Hello!<|im_end|>⟧<|im_user|>user<|im_middle|>Bye<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>⟦See you.<|im_end|>⟧"
    ]


def test_kimi_k2_quotes_itself(load: Load) -> None:
    chat = load("kimi-k2")
    quoting = "<|im_assistant|>assistant<|im_middle|>hi<|im_end|> is one turn."
    (row,) = chat.answered_rows(said("user: Show the Kimi template.", f"assistant: {quoting}"), (), 4096)
    assert segments(chat, row)[-1] == (f"{quoting}<|im_end|>", True)
    assert [chat.pieces([i])[0] for i in row.input_ids if i in chat.special_ids] == [
        *("<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|im_user|>", "<|im_middle|>", "<|im_end|>"),
        *("<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    ]


def test_kimi_k25_thinking(load: Load) -> None:
    system = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
    ask = "<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    assert masked(load("kimi-k2.5"), THOUGHTFUL) == [
        system + ask.format("Hi") + "⟦A greeting.</think>Hello!<|im_end|>⟧",
        system
        + ask.format("Hi")
        + "</think>Hello!<|im_end|>"
        + ask.format("Bye")
        + "⟦A farewell.</think>See you.<|im_end|>⟧",
    ]
    assert (
        masked(load("kimi-k2.5"), CALLED)
        == [  # the finished conversation drops the reasoning, the context had it
            system
            + ask.format("Weather?")
            + "⟦Look it up.</think><|tool_calls_section_begin|><|tool_call_begin|>abcdefghi"
            '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>⟧'
            "<|im_system|>get<|im_middle|>## Return of abcdefghi\n18<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
            "⟦</think>18 degrees.<|im_end|>⟧"
        ]
    )


def test_kimi_k25_instant(load: Load) -> None:
    ask = "<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"
    assert masked(load("kimi-k2.5", thinking=False), [PLAIN[0], *THOUGHTFUL]) == [
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        + ask.format("Hi")
        + "⟦Hello!<|im_end|>⟧"
        + ask.format("Bye")
        + "⟦See you.<|im_end|>⟧"
    ]


def test_gemma(load: Load) -> None:
    assert masked(load("gemma"), PLAIN[1:]) == [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n⟦See you.<end_of_turn>⟧"
    ]
    with pytest.raises(TemplateRefusal, match="System role not supported"):
        load("gemma").answered_rows(PLAIN, (), 4096)


def test_mistral(load: Load) -> None:
    assert masked(load("mistral"), PLAIN[1:]) == ["<s>[INST]Hi[/INST]⟦Hello!</s>⟧[INST]Bye[/INST]⟦See you.</s>⟧"]
    assert masked(load("mistral"), PLAIN) == [  # the system message stands before the last question, wherever that is
        "<s>[INST]Be brief.\n\nHi[/INST]⟦Hello!</s>⟧",
        "<s>[INST]Hi[/INST]Hello!</s>[INST]Be brief.\n\nBye[/INST]⟦See you.</s>⟧",
    ]
    assert masked(load("mistral"), CALLED, TOOLS) == [
        '<s>[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "get", "description": "Gets."}}][/AVAILABLE_TOOLS]'
        '[INST]Weather?[/INST]⟦[TOOL_CALLS][{"name": "get", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]</s>⟧'
        '[TOOL_RESULTS]{"content": 18, "call_id": "abcdefghi"}[/TOOL_RESULTS]⟦18 degrees.</s>⟧'
    ]


def test_gpt_oss(load: Load) -> None:
    chat = load("gpt-oss")
    first, second = masked(chat, THOUGHTFUL)
    start = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert first.endswith(  # a new answer ends in <|return|>, its reasoning is a part of it
        "for every message.<|end|>"
        + start
        + "⟦<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>"
        "final<|message|>Hello!<|return|>⟧"
    )
    assert second.endswith(  # in history it ends in <|end|> and has no reasoning
        start
        + "<|channel|>final<|message|>Hello!<|end|><|start|>user<|message|>Bye<|end|><|start|>assistant⟦<|channel|>"
        "analysis<|message|>A farewell.<|end|><|start|>assistant<|channel|>final<|message|>See you.<|return|>⟧"
    )
    (called,) = masked(chat, CALLED)
    assert called.endswith(
        "⟦<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant to=functions.get<|channel|>commentary json"
        '<|message|>{"city": "Paris"}<|call|>⟧<|start|>functions.get to=assistant<|channel|>commentary<|message|>"18"<|end|>'
        "<|start|>assistant⟦<|channel|>final<|message|>18 degrees.<|return|>⟧"
    )


@pytest.mark.parametrize(
    ("name", "messages", "tools", "reason"),
    [
        ("chatml", CALLED, (), "does not write tool calls"),
        ("chatml", PLAIN, TOOLS, "does not write tool definitions"),
        ("gemma", CALLED, (), "does not write tool calls"),
        ("deepseek-v3", PLAIN, TOOLS, "does not write tool definitions"),
        ("mistral", [CALLED[0], CALLED[1] | {"tool_calls": [CALL | {"id": "call_1"}]}], (), "ids must have nine"),
        ("gpt-oss", PLAIN[:2] + CALLED[2:], (), "a result without a call"),
    ],
)
def test_what_a_template_does_not_take_is_refused(
    load: Load, name: str, messages: list[Message], tools: Sequence[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(TemplateRefusal, match=reason):
        load(name).answered_rows(messages, tools, 4096)


def test_an_answer_that_the_template_leaves_out_is_refused(load: Load) -> None:
    with pytest.raises(TemplateRefusal, match="does not write the answer of turn 2"):
        load("deepseek-v3").answered_rows(said("user: Hi", "assistant: <think>so</think>Hello!"), (), 4096)


def test_reasoning_keeps_its_row_where_the_template_keeps_it(load: Load) -> None:
    rows = load("qwen3").answered_rows([*CALLED, *said("user: Thanks", "assistant: Welcome.")], (), 4096)
    assert [row.turns for row in rows] == [2, 1]


def test_rows_are_cut_at_a_turn(load: Load) -> None:
    chat = load("chatml")
    (whole,) = chat.answered_rows(PLAIN, (), 4096)
    first = chat.answered_turns(PLAIN)[0].length
    for limit in (first, len(whole.input_ids) - 1):
        (cut,) = chat.answered_rows(PLAIN, (), limit)
        assert (cut.turns, cut.input_ids) == (1, whole.input_ids[:first])
    assert chat.answered_rows(PLAIN, (), first - 1) == []
    # a later turn may be the shorter one, where history drops reasoning
    rambling = [*THOUGHTFUL[:1], THOUGHTFUL[1] | {"reasoning_content": "Long and long. " * 40}, *THOUGHTFUL[2:]]
    (row,) = load("qwen3").answered_rows(rambling, (), 120)
    assert segments(load("qwen3"), row)[-1][0].endswith("See you.<|im_end|>")
