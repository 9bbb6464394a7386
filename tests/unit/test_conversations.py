"""Reading and rules, on small inputs: one for each rule and shape."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.conversations.faults import LEFT_OUT, REJECTED, REPAIRED, BadRow
from eyas.conversations.json_rows import read_lines
from eyas.conversations.rules import validate


def turns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in validate(row)[0].messages]


HI = ("user", "Hi")
HELLO = ("assistant", "Hello!")
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}


def answer(**keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **keys}]}


def called(*after: dict[str, Any], calls: Sequence[dict[str, Any]] = (CALL,)) -> dict[str, Any]:
    row = answer(content=None, tool_calls=list(calls))
    return {"messages": row["messages"] + list(after)}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


# --- shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        turns(HI, HELLO),
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
        {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
        turns(("user", [{"type": "text", "text": "Hi"}]), ("assistant", ["Hello!"])),
        {"prompt": "Hi", "response": "Hello!"},
        {"prompt": "Hi", "completion": "Hello!"},
        {"prompt": [{"role": "user", "content": "Hi"}], "response": "Hello!"},
        {"instruction": "Hi", "input": "", "output": "Hello!"},
        {"question": "Hi", "answer": "Hello!"},
        turns(("Human", "Hi"), ("ASSISTANT ", "Hello!")),
        {"messages": turns(HI, HELLO)["messages"], "prompt": "Hi", "id": 7, "score": None},
        {"messages": json.dumps(turns(HI, HELLO)["messages"])},
        {"conversation": turns(HI, HELLO)["messages"], "model": "kimi-k2", "conversations": None},
        {
            "conversations": [
                {"from": "human", "value": "Hi", "role": None, "weight": 1},
                {"from": "gpt", "value": "Hello!"},
            ]
        },
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello!"}]},
        turns(
            ("user", [{"type": "input_text", "text": "Hi"}]), ("assistant", [{"type": "output_text", "text": "Hello!"}])
        ),
        {**turns(HI, HELLO), "score": float("inf"), "tools": [], "system": ""},
        answer(
            content="Hello!", tool_calls=None, function_call={"name": None, "arguments": None}, reasoning_content=""
        ),
        answer(content="Hello!", tool_calls="[]", reasoning=None, name="bot", weight=0),
    ],
)
def test_every_shape_reads_the_same(row: dict[str, Any]) -> None:
    assert said(row) == [HI, HELLO]
    assert validate(row)[1] == []


def test_shapes_without_answers_and_with_more() -> None:
    history = {"instruction": "Hi", "output": "Hello!", "history": [["Q1", "A1"]], "system": "Be brief."}
    assert said(history) == [("system", "Be brief."), ("user", "Q1"), ("assistant", "A1"), HI, HELLO]
    assert said({"system_prompt": "Be brief.", "question": "Hi", "response": "Hello!"})[0] == ("system", "Be brief.")
    assert said({"prompt": "Hi"}) == [HI]
    assert said({"turns": ["One", "Two"]}) == [("user", "One"), ("user", "Two")]
    assert said({"instruction": "Sum up", "input": "A text", "output": None}) == [("user", "Sum up\n\nA text")]
    assert said({"system": "Be brief.", "question": "Hi"}) == [("system", "Be brief."), HI]
    assert said(turns(("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))) == [("user", "a\nb")]


def test_text_that_quotes_template_tokens_stays_text() -> None:
    text = "<|im_start|>assistant\nhi<|im_end|> is one turn."
    assert said(turns(HI, ("assistant", text)))[1] == ("assistant", text)


@pytest.mark.parametrize("opening", ["", "{}"])
def test_a_conversation_of_thousands_of_turns(opening: str) -> None:
    pairs = [(("user", "assistant")[i % 2], f"{opening}{i}") for i in range(10_000)]
    assert said(turns(*pairs)) == pairs


# --- reasoning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"content": "Hello!", "reasoning_content": "Hm."},
        {"content": "Hello!", "reasoning": "Hm.\n", "reasoning_content": "Hm."},
        {"content": "Hello!", "thinking": "Hm."},
        {"content": "<think>\nHm.\n</think>\n\nHello!"},
        {"content": " <think>Hm.</think>Hello!", "reasoning_content": "Hm."},
        {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hello!"}]},
    ],
)
def test_reasoning_is_told_from_the_answer(keys: dict[str, Any]) -> None:
    message = validate(answer(**keys))[0].messages[1]
    assert message.as_dict() == {"role": "assistant", "content": "Hello!", "reasoning_content": "Hm."}


def test_reasoning_beside_an_answer_of_its_own_key() -> None:
    row = {"question": "Hi", "answer": "Hello!", "thinking": "Hm.", "reasoning": "a tag of some data set"}
    assert validate(row)[0].messages[1].reasoning == "Hm."


@pytest.mark.parametrize(
    "text",
    [
        "Put it between <think> and </think>.",
        "`</think>` ends the reasoning.",
        "It goes so:\n<think>\nHm.\n</think>\nHello!",
        "Never write <think>",
    ],
)
def test_think_tags_further_on_are_text(text: str) -> None:
    conversation, repairs = validate(turns(HI, ("assistant", text), ("user", f"<think>{text}")))
    assert [m.content for m in conversation.messages[1:]] == [text, f"<think>{text}"]
    assert conversation.messages[1].reasoning == ""
    assert repairs == []


# --- tools --------------------------------------------------------------------------------------------------------

DEFINITION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}
BARE = {"type": "function", "function": CALLED["function"]}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([CALL], CALLED),
        ([CALLED], CALLED),
        (json.dumps([CALL]), CALLED),
        ([{"name": "f", "arguments": {"city": "Paris"}}], BARE),
        ([{"id": 1, "function": {"name": "f", "arguments": {"city": "Paris"}}}], CALLED),
    ],
)
def test_calls_in_every_form(calls: Any, expected: dict[str, Any]) -> None:
    row = answer(content=None, tool_calls=calls)
    conversation, repairs = validate({"messages": row["messages"], "tools": [DEFINITION]})
    assert conversation.messages[1].as_dict() == {"role": "assistant", "content": "", "tool_calls": [expected]}
    assert conversation.tools == (DEFINITION,)
    assert repairs == []


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_a_call_may_lack_arguments(arguments: Any) -> None:
    row = answer(content="", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])
    assert validate(row)[0].messages[1].tool_calls[0]["function"]["arguments"] == {}


@pytest.mark.parametrize("role", ["tool", "function", "observation", "ipython", "tool_response"])
def test_results_in_every_role(role: str) -> None:
    row = called(
        {"role": role, "content": "18", "tool_call_id": "1", "name": "f"}, {"role": "assistant", "content": "18."}
    )
    result, last = validate(row)[0].messages[2:]
    assert result.as_dict() == {"role": "tool", "content": "18", "tool_call_id": "1", "name": "f"}
    assert last.as_dict() == {"role": "assistant", "content": "18."}


def test_sharegpt_calls_and_results() -> None:
    value = json.dumps({"name": "f", "arguments": {"city": "Paris"}})
    row = {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": value},
            {"from": "observation", "value": "18"},
            {"from": "gpt", "value": "18."},
        ],
        "tools": json.dumps([DEFINITION["function"]]),
    }
    conversation, repairs = validate(row)
    assert conversation.messages[1].as_dict() == {"role": "assistant", "content": "", "tool_calls": [BARE]}
    assert [m.role for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.tools == (DEFINITION,)
    assert repairs == ["bare_tools_wrapped", "function_call_as_tool_call"]


def test_parallel_calls_are_matched_by_id_or_in_order() -> None:
    calls = [CALL, {**CALL, "id": "2"}]
    results = [{"role": "tool", "content": c, "tool_call_id": i} for i, c in (("2", "b"), ("1", "a"))]
    assert [m.tool_call_id for m in validate(called(*results, calls=calls))[0].messages[2:]] == ["2", "1"]
    unnamed = [{"role": "tool", "content": ""} for _ in calls]
    assert len(validate(called(*unnamed, calls=calls))[0].messages) == 4


def test_a_call_may_be_the_last_turn_and_a_result_too() -> None:
    assert validate(called())[1] == []
    assert validate(called({"role": "tool", "content": "18"}))[1] == []


def test_cut_keeps_calls_and_tools_together() -> None:
    after = [
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "18."},
        {"role": "user", "content": "?"},
    ]
    whole, _ = validate({**called(*after), "tools": [DEFINITION]})
    assert [m.role for m in whole.cut(1).messages] == ["user", "assistant", "tool", "assistant"]
    assert whole.cut(1).tools == whole.tools


# --- rules --------------------------------------------------------------------------------------------------------

FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("unknown_shape", {"text": "Hi"}),
    ("unknown_shape", {}),
    ("empty_conversation", {"conversations": []}),  # SpecForge #368
    ("empty_conversation", {"turns": []}),
    ("bad_turn", {"messages": "Hi"}),
    ("bad_turn", {"messages": [["user", "Hi"]]}),
    ("bad_turn", {"messages": [{"content": "Hi"}]}),
    ("bad_turn", {"messages": ["Hi", "Hello!"]}),  # whose turns?
    ("bad_turn", {"messages": [{"role": "user", "from": "gpt", "content": "Hi"}]}),
    ("bad_turn", {"conversations": [{"from": "human", "value": "Hi", "content": "Ho"}]}),
    ("bad_turn", {"messages": "{'role': 'user'}"}),
    ("bad_turn", {"instruction": "Hi", "history": [["Q1", "A1", "?"]]}),
    ("malformed_json", {"messages": "[{'role': 'user', 'content': 'Hi'}]"}),
    ("duplicate_key", {"messages": '[{"role": "user", "role": "system", "content": "Hi"}]'}),
    ("unknown_role", turns(HI, ("kimi-k2", "Hello!"))),  # speculators #907
    ("unknown_role", turns(HI, ("bing", "Hello!"))),
    ("unknown_role", turns(HI, (None, "Hello!"))),
    ("unknown_role", turns(HI, ({"assistant": 1}, "Hello!"))),
    ("null_content", turns(HI, ("assistant", None))),
    ("null_content", {"messages": [{"role": "user"}]}),
    ("not_text", turns(("user", 4))),
    ("not_text", turns(("user", [{"type": "image_url", "image_url": "x"}]))),
    ("not_text", {"question": "Hi", "answer": {"text": "Hello!"}}),
    ("not_text", turns(("user", [{"type": "text", "text": "Hi"}, {"type": "image", "image": "x.png"}]))),
    ("not_text", turns(("user", True))),
    ("turn_too_long", turns(("user", "x" * ((4 << 20) + 1)))),
    ("turn_too_long", turns(HI, ("assistant", "\u4e2d" * (2 << 20)))),
    ("empty_turn", turns(("user", " \n"))),
    ("empty_turn", turns(HI, ("assistant", ""), HI)),
    ("invalid_text", turns(("user", "broken \ud83d pair"))),
    ("misplaced_system", turns(HI, ("system", "Be brief."), HELLO)),
    ("misplaced_system", turns(("system", "a"), ("system", "b"), HI)),
    ("misplaced_system", turns(("system", "a"), ("developer", "b"), HI)),
    ("misplaced_system", turns(HI, ("developer", "Be brief."), HELLO)),  # speculators #907: trained as an answer
    ("two_user_turns", turns(HI, ("user", "Anybody?"))),
    ("two_assistant_turns", turns(HI, HELLO, ("assistant", "And?"))),
    ("no_user_turn", turns(("system", "Be brief."))),
    ("no_user_turn", turns(HELLO)),
    ("two_assistant_turns", turns(HI, ("assistant", "Why did"), ("assistant", "the chicken?"))),  # SpecForge #216
    ("unclosed_think", turns(HI, ("assistant", "<think>The user greets"))),
    ("unclosed_think", turns(HI, ("assistant", " \n<think>\nThe user <think> greets\n"), HI)),
    ("unopened_think", turns(HI, ("assistant", "The user greets.\n</think>\n\nHello!"))),
    ("two_reasonings", answer(content="<think>a</think>Hello!", reasoning_content="b")),
    ("two_reasonings", answer(content="Hello!", reasoning_content="a", thinking="b")),
    ("two_reasonings", turns(HI, ("assistant", "<think>a</think>\n<think>b</think>Hello!"))),
    ("misplaced_reasoning", {"messages": [{"role": "user", "content": "Hi", "reasoning_content": "Hm"}]}),
    ("not_text", answer(content="Hello!", reasoning={"effort": "high"})),
    ("not_text", answer(content=[{"type": "text", "text": "Hello!"}, {"type": "thinking", "thinking": "late"}])),
    ("bad_tools", {**turns(HI), "tools": "weather"}),
    ("bad_tools", {**turns(HI), "tools": {"name": "weather"}}),
    ("bad_tools", {**turns(HI), "tools": [{"type": "function"}]}),
    ("bad_tools", {**turns(HI), "tools": [{"type": "web_search", "name": "web"}]}),
    ("bad_tools", {**turns(HI), "tools": [{"name": "f", "parameters": {"default": float("nan")}}]}),
    ("invalid_text", {**turns(HI), "tools": [{"name": "f", "description": "\ud83d"}]}),
    ("bad_tool_call", answer(content=None, tool_calls=[{"id": "1"}])),
    ("bad_tool_call", answer(content=None, tool_calls=[{"type": "custom", "custom": {"name": "f"}}])),
    ("bad_tool_call", answer(content=None, tool_calls={"name": "f"})),
    ("bad_tool_call", answer(content=None, tool_calls=[CALL, CALL])),
    ("bad_tool_call", answer(content=None, tool_calls=[CALL], function_call={"name": "f", "arguments": "{}"})),
    ("bad_tool_call", {"messages": [{"role": "user", "content": "Hi", "tool_calls": [CALL]}]}),
    ("bad_tool_call", {"messages": [{"role": "user", "content": "Hi", "tool_call_id": "1"}]}),
    ("bad_tool_call", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "f()"}]}),
    ("bad_tool_arguments", answer(content=None, tool_calls=[{"function": {"name": "f", "arguments": "city=Paris"}}])),
    (
        "bad_tool_arguments",
        answer(content=None, tool_calls=[{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]),
    ),
    ("bad_tool_arguments", answer(content=None, tool_calls=[{"function": {"name": "f", "arguments": '["Paris"]'}}])),
    ("bad_tool_arguments", answer(content=None, tool_calls=[{"function": {"name": "f", "arguments": '{"a": NaN}'}}])),
    ("bad_tool_arguments", answer(content=None, tool_calls=[{"function": {"name": "f", "arguments": "[" * 100_000}}])),
    (
        "bad_tool_arguments",
        answer(content=None, tool_calls=[{"function": {"name": "f", "arguments": {"a": deep(100)}}}]),
    ),
    ("orphan_tool_result", turns(HI, ("tool", "18"), HELLO)),
    ("orphan_tool_result", turns(HI, HELLO, ("observation", "18"))),
    ("orphan_tool_result", called({"role": "tool", "content": "18"}, {"role": "tool", "content": "19"})),
    ("mismatched_tool_result", called({"role": "tool", "content": "18", "tool_call_id": "2"})),
    ("mismatched_tool_result", called({"role": "function", "content": "18", "name": "g"})),
    ("unanswered_tool_call", called({"role": "user", "content": "Hi"})),
    ("unanswered_tool_call", called({"role": "assistant", "content": "Hello!"})),
    (
        "unanswered_tool_call",
        called({"role": "tool", "content": "18", "tool_call_id": "1"}, calls=[CALL, {**CALL, "id": "2"}]),
    ),
    ("missing_answer", called({"role": "tool", "content": "18"}, {"role": "user", "content": "Well?"})),
]


@pytest.mark.parametrize(("reason", "row"), FAULTS)
def test_each_fault_is_named(reason: str, row: dict[str, Any]) -> None:
    with pytest.raises(BadRow) as caught:
        validate(row)
    assert caught.value.reason == reason


REPAIRS: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    ("leading_assistant_dropped", turns(HELLO, HI, HELLO), [HI, HELLO]),
    ("leading_assistant_dropped", turns(("system", "Be brief."), HELLO, HI), [("system", "Be brief."), HI]),
    ("nul_removed", turns(("user", "H\0i")), [HI]),
    ("developer_as_system", turns(("developer", "Be brief."), HI), [("system", "Be brief."), HI]),
    ("empty_system_dropped", turns(("system", ""), HI), [HI]),
    ("empty_last_answer_dropped", turns(HI, ("assistant", "")), [HI]),
    ("leading_assistant_dropped", turns(("gpt", "How can I help?"), ("human", "Hi"), ("gpt", "Hello!")), [HI, HELLO]),
    ("nan_as_missing", {"instruction": "Hi", "input": float("nan"), "output": "Hello!"}, [HI, HELLO]),
    ("inline_think_split", turns(HI, ("assistant", "<think>\nHm.\n</think>\n\nHello!")), [HI, HELLO]),
    ("inline_think_split", turns(HI, ("assistant", "<think>\n\n</think>\n\nHello!")), [HI, HELLO]),
    (
        "function_call_as_tool_call",
        answer(content="", function_call={"name": "f", "arguments": "{}"}),
        [HI, ("assistant", "")],
    ),
    ("bare_tools_wrapped", {**turns(HI), "tools": [{"name": "f"}]}, [HI]),
]


@pytest.mark.parametrize(("rule", "row", "result"), REPAIRS)
def test_each_repair_is_named(rule: str, row: dict[str, Any], result: list[tuple[str, str]]) -> None:
    assert said(row) == result
    assert validate(row)[1] == [rule]


LINES: list[tuple[str, bytes]] = [
    ("malformed_json", b'{"prompt": "Hi"'),
    ("malformed_json", b'{"prompt": "H\0i"}'),
    ("malformed_json", b"[" * 100_000),
    ("malformed_json", b'{"prompt": ' + b"9" * 5000 + b"}"),
    ("not_utf8", '{"prompt": "Gr\u00fcezi"}'.encode("latin-1")),
    ("line_too_long", b'{"prompt": "' + b"x" * (17 << 20) + b'"}'),
    ("duplicate_key", b'{"prompt": "Hi", "prompt": "Ho"}'),
    ("duplicate_key", b'{"messages": [{"role": "user", "role": "assistant", "content": "Hi"}]}'),
    ("not_an_object", b'["Hi"]'),
    ("not_an_object", b"null"),
]


@pytest.mark.parametrize(("reason", "line"), LINES)
def test_each_unreadable_line_is_named_and_the_next_is_read(reason: str, line: bytes) -> None:
    read = list(read_lines(io.BytesIO(line + b'\n\n{"prompt": "Hi"}')))
    assert [number for number, _ in read] == [1, 3]
    assert isinstance(read[0][1], BadRow)
    assert read[0][1].reason == reason
    assert read[1][1] == {"prompt": "Hi"}


def test_every_rule_has_an_input_here() -> None:
    of_files = {"bad_csv_row", "second_list", "unreadable_rest"}  # tests/unit/test_reading.py
    assert {reason for reason, _ in FAULTS} | {reason for reason, _ in LINES} | of_files == set(REJECTED)
    assert {rule for rule, _, _ in REPAIRS} == set(REPAIRED)
    assert not (set(REJECTED) & set(REPAIRED) or set(LEFT_OUT) & (set(REJECTED) | set(REPAIRED)))


def test_every_rule_is_in_the_documentation() -> None:
    text = Path("docs/data.md").read_text(encoding="utf-8")
    assert [name for name in (*REJECTED, *REPAIRED, *LEFT_OUT) if f"`{name}`" not in text] == []


def test_lines_end_with_line_feeds_alone() -> None:
    text = "one\u2028two\x85three\x0cfour"
    content = b"\xef\xbb\xbf" + json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\r\n"
    assert list(read_lines(io.BytesIO(content))) == [(1, {"prompt": text})]


def test_faults_cross_processes() -> None:
    fault = copy.copy(BadRow("empty_turn", "turn 2"))  # rebuilt as in another process
    assert (fault.reason, fault.detail, str(fault)) == ("empty_turn", "turn 2", "empty_turn: turn 2")


# --- properties ---------------------------------------------------------------------------------------------------

_texts = st.text(st.characters(exclude_categories=()), max_size=12)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | _texts
_roles = st.sampled_from(["user", "assistant", "system", "human", "gpt", "tool", "developer", "kimi-k2"]) | _scalars
_values = st.recursive(
    _scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(_texts, v, max_size=3), max_leaves=6
)
_arguments = st.sampled_from(["{}", '{"a": 1}', "[", ""]) | _values
_call = st.fixed_dictionaries(
    {"name": st.just("f")}, optional={"id": _scalars, "type": _scalars, "arguments": _arguments}
)
_calls = st.lists(_call | _call.map(lambda call: {"function": call}), max_size=2) | _values
_thoughts = st.sampled_from(["<think>a</think>b", "<think>a", "a</think>\nb"]) | _values
_turn = st.fixed_dictionaries(
    {},
    optional={
        "role": _roles,
        "from": _roles,
        "content": _thoughts,
        "value": _thoughts,
        "tool_calls": _calls,
        "function_call": _call | _values,
        "tool_call_id": _scalars,
        "reasoning_content": _values,
        "name": _scalars,
    },
)
_rows = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(_turn, max_size=4) | _values,
        "conversations": st.lists(_turn, max_size=4) | _values,
        "turns": st.lists(_texts, max_size=3) | _values,
        "prompt": _values,
        "question": _values,
        "instruction": _values,
        "input": _values,
        "output": _values,
        "answer": _values,
        "system": _values,
        "tools": _values,
    },
)


def _faults(row: dict[str, Any]) -> list[str]:
    try:
        validate(row)
    except BadRow as fault:
        return [fault.reason]
    return []


@settings(max_examples=150, deadline=None)
@given(_rows)
def test_whatever_is_kept_is_sound(row: dict[str, Any]) -> None:
    try:
        conversation, repairs = validate(row)
    except BadRow:
        return
    assert set(repairs) <= set(REPAIRED)
    messages = [message.as_dict() for message in conversation.messages]
    json.dumps([messages, list(conversation.tools)], allow_nan=False, ensure_ascii=False).encode("utf-8")
    roles = [message["role"] for message in messages]
    assert set(roles) <= {"system", "user", "assistant", "tool"}
    assert "system" not in roles[1:]
    assert roles[roles[0] == "system"] == "user"
    calls = sum(len(message.get("tool_calls", ())) for message in messages[:-1])
    assert roles.count("tool") == calls
    for message in messages:
        assert message["content"].strip() or message["role"] == "tool" or message["tool_calls"]
        assert message["role"] == "assistant" or not {"reasoning_content", "tool_calls"} & set(message)
    if "two_user_turns" not in _faults({"messages": messages}):  # MT-bench's shape, which has user turns only
        # what was mended needs no mending
        assert validate({"messages": messages, "tools": list(conversation.tools)}) == (conversation, [])


@settings(max_examples=60, deadline=None)
@given(_rows)
def test_an_answer_is_only_ever_what_was_marked_as_one(row: dict[str, Any]) -> None:
    try:
        conversation, _ = validate(row)
    except BadRow:
        return
    answers = [m.content for m in conversation.messages if m.role == "assistant"]
    marked: list[Any] = [row.get(key) for key in ("output", "answer")]
    for key in ("messages", "conversations", "turns", "prompt", "question"):
        value = row.get(key)
        for turn in value if isinstance(value, list) else []:
            if isinstance(turn, dict) and str(turn.get("role", turn.get("from"))).strip().lower() in (
                "assistant",
                "gpt",
            ):
                marked += [turn.get("content"), turn.get("value")]
    flat = ["\n".join(map(str, m)) if isinstance(m, list) else m for m in marked]
    texts = [m.replace("\0", "") for m in flat if isinstance(m, str)]
    assert all(
        not answer or any(answer in text for text in texts) for answer in answers
    )  # in, for reasoning is cut off
