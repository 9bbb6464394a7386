"""What holds for every conversation under every template: nothing but answers is supervised, and all of each answer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.templates.chat import ChatTemplate, Message
from tests.templates.doubles import DOUBLES, make_double, supervised

KNOWS_TOOLS = ("llama3", "qwen3", "deepseek-v3", "deepseek-r1", "kimi-k2", "kimi-k2.5", "mistral", "gpt-oss")
ONE_CALL = ("deepseek-v3", "deepseek-r1")  # their second call lacks its opening, as in the original
NO_SYSTEM = ("gemma",)
ENDS = {name: double.end for name, double in DOUBLES.items()} | {"gemma": "<end_of_turn>"}
QUOTABLE = ["<|im_end|>", "<|eot_id|>", "</think>", "[INST]", "<｜Assistant｜>", "<|end|>", "<end_of_turn>"]


@pytest.fixture(scope="module")
def doubles(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    folder = tmp_path_factory.mktemp("doubles")
    return {name: make_double(folder / name, name, tiny_target) for name in DOUBLES}


def words(role: str, *, quoting: bool) -> st.SearchStrategy[str]:
    """Texts that name the role that says them, so that no other's can be taken for them."""
    more = ["Hello there", "1, 2, 3", "é日本🙂", "line\nbreak", "  two  spaces", "def f(x):\n    return x"]
    parts = st.lists(st.sampled_from(more + (QUOTABLE if quoting else [])), min_size=1, max_size=4)
    return parts.map(lambda chosen: f"[{role}] {' '.join(chosen)} ({role})")


@st.composite
def conversations(draw: st.DrawFn, name: str, *, quoting: bool, tools: bool) -> list[Message]:
    def say(role: str) -> Message:
        return {"role": role, "content": draw(words(role, quoting=quoting))}

    def answer() -> Message:
        thought = {"reasoning_content": draw(words("thought", quoting=False))} if draw(st.booleans()) else {}
        return say("assistant") | thought

    messages = [say("system")] if name not in NO_SYSTEM and draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 4))):
        messages.append(say("user"))
        most = 2 if name not in ONE_CALL else int(turn == 0)
        for step in range(draw(st.integers(0, most)) if tools else 0):
            call_id = f"call{turn:02}{step:03}"
            function = {"name": "get", "arguments": {"key": draw(words("argument", quoting=quoting))}}
            call = {"id": call_id, "type": "function", "function": function}
            thought = {"reasoning_content": draw(words("thought", quoting=False))} if draw(st.booleans()) else {}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]} | thought)
            messages.append(say("tool") | {"tool_call_id": call_id, "name": "get"})
        messages.append(answer())
    return messages


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@pytest.mark.parametrize("name", DOUBLES)
@pytest.mark.parametrize("quoting", [False, True])
@given(data=st.data())
def test_answers_and_only_answers(
    doubles: dict[str, ChatTemplate], name: str, quoting: bool, data: st.DataObject
) -> None:
    if name == "deepseek-v3":
        quoting = False  # it cuts answers at </think>, which is no token there
    chat = doubles[name]
    messages = data.draw(conversations(name, quoting=quoting, tools=name in KNOWS_TOOLS))
    rows = chat.answered_rows(messages, (), 100_000)
    answers = [message for message in messages if message["role"] == "assistant"]
    stretches = supervised(chat, rows)
    assert len(stretches) == len(answers) == sum(row.turns for row in rows)

    for stretch, answer in zip(stretches, answers, strict=True):
        for role in ("user", "system", "tool"):
            assert f"({role})" not in stretch
        assert stretch.endswith("<|call|>" if name == "gpt-oss" and "tool_calls" in answer else ENDS[name])
        if answer["content"]:
            assert stretch.endswith(answer["content"].strip() + ENDS[name])
        if name == "chatml":
            assert stretch == answer["content"] + ENDS[name]
        if name in ("qwen3", "kimi-k2.5", "gpt-oss"):
            assert answer.get("reasoning_content", "").strip() in stretch

    for row in rows:
        assert len(row.input_ids) == len(row.loss_mask) == len(row.logprobs)
        assert all(math.isnan(p) == inside for p, inside in zip(row.logprobs, row.loss_mask, strict=True))


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@pytest.mark.parametrize("name", ["chatml", "llama3", "deepseek-v3", "kimi-k2", "gemma"])
@pytest.mark.parametrize("quoting", [False, True])
@given(data=st.data())
def test_a_prefix_stable_template_gives_one_row_its_own_full_render(
    doubles: dict[str, ChatTemplate], name: str, quoting: bool, data: st.DataObject
) -> None:
    chat = doubles[name]
    messages = data.draw(conversations(name, quoting=quoting and name != "deepseek-v3", tools=name in KNOWS_TOOLS))
    (row,) = chat.answered_rows(messages, (), 100_000)
    whole = chat.render(messages, generation_prompt=False)
    text = "".join(chat.pieces(row.input_ids))
    assert whole.removeprefix(text) in ("", "\n")
    if not quoting:
        assert row.input_ids == chat.tokens.tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@pytest.mark.parametrize("name", DOUBLES)
@given(data=st.data())
def test_every_context_is_the_prompt_that_the_target_reads(
    doubles: dict[str, ChatTemplate], name: str, data: st.DataObject
) -> None:
    chat = doubles[name]
    messages = data.draw(conversations(name, quoting=name != "deepseek-v3", tools=name in KNOWS_TOOLS))
    turns = chat.answered_turns(messages)
    positions = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, position in zip(turns, positions, strict=True):
        prompt = chat.prompt_ids(messages[:position])
        if name == "deepseek-r1" and "reasoning_content" not in messages[position]:
            think = chat.encode("<think>\n")
            assert prompt[-len(think) :] != think or prompt == [*turn.prompt_ids, *think]
        else:
            assert prompt == turn.prompt_ids
