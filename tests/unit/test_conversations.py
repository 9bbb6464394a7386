"""Reading, rules, identity, split, decontamination and the data set, on small inputs: one for each rule and shape."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.conversations.contamination import BenchmarkIndex
from eyas.conversations.dataset import Dataset, prepare_dataset
from eyas.conversations.faults import LEFT_OUT, REJECTED, REPAIRED, BadRow
from eyas.conversations.identity import conversation_id, split_of
from eyas.conversations.reading import read_lines
from eyas.conversations.rules import Conversation, Message, validate
from eyas.errors import EyasError
from eyas.params import DatasetParams, SourceParams


def turns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in validate(row)[0].messages]


HI = ("user", "Hi")
HELLO = ("assistant", "Hello!")


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
    ],
)
def test_every_shape_reads_the_same(row: dict[str, Any]) -> None:
    assert said(row) == [HI, HELLO]
    assert validate(row)[1] == []


def test_shapes_without_answers_and_with_more() -> None:
    assert said({"prompt": "Hi"}) == [HI]
    assert said({"turns": ["One", "Two"]}) == [("user", "One"), ("user", "Two")]
    assert said({"instruction": "Sum up", "input": "A text", "output": None}) == [("user", "Sum up\n\nA text")]
    assert said({"system": "Be brief.", "question": "Hi"}) == [("system", "Be brief."), HI]
    assert said(turns(("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))) == [("user", "a\nb")]


def test_text_that_quotes_template_tokens_stays_text() -> None:
    text = "<|im_start|>assistant\nhi<|im_end|> is one turn."
    assert said(turns(HI, ("assistant", text)))[1] == ("assistant", text)


# --- rules --------------------------------------------------------------------------------------------------------

FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("unknown_shape", {"text": "Hi"}),
    ("unknown_shape", {}),
    ("empty_conversation", {"conversations": []}),
    ("empty_conversation", {"turns": []}),
    ("bad_turn", {"messages": "Hi"}),
    ("bad_turn", {"messages": [["user", "Hi"]]}),
    ("bad_turn", {"messages": [{"content": "Hi"}]}),
    ("unknown_role", turns(HI, ("kimi-k2", "Hello!"))),
    ("unknown_role", turns(HI, ("bing", "Hello!"))),
    ("unknown_role", turns(HI, (None, "Hello!"))),
    ("unknown_role", turns(HI, ({"assistant": 1}, "Hello!"))),
    ("tool_turn", turns(HI, ("tool", '{"t": 18}'))),
    ("tool_turn", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "f()"}]}),
    ("tool_turn", {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [{"id": 1}]}]}),
    ("tool_turn", {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function"}]}),
    ("null_content", turns(HI, ("assistant", None))),
    ("null_content", {"messages": [{"role": "user"}]}),
    ("not_text", turns(("user", 4))),
    ("not_text", turns(("user", [{"type": "image_url", "image_url": "x"}]))),
    ("not_text", {"question": "Hi", "answer": {"text": "Hello!"}}),
    ("empty_turn", turns(("user", " \n"))),
    ("empty_turn", turns(HI, ("assistant", ""), HI)),
    ("invalid_text", turns(("user", "broken \ud83d pair"))),
    ("misplaced_system", turns(HI, ("system", "Be brief."), HELLO)),
    ("misplaced_system", turns(("system", "a"), ("system", "b"), HI)),
    ("two_user_turns", turns(HI, ("user", "Anybody?"))),
    ("two_assistant_turns", turns(HI, HELLO, ("assistant", "And?"))),
    ("no_user_turn", turns(("system", "Be brief."))),
    ("no_user_turn", turns(HELLO)),
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
    read = list(read_lines(io.BytesIO(line + b'\n\n{"prompt": "Hi"}'), lambda _: None))
    assert [number for number, _ in read] == [1, 3]
    assert isinstance(read[0][1], BadRow)
    assert read[0][1].reason == reason
    assert read[1][1] == {"prompt": "Hi"}


def test_every_rule_has_an_input_here() -> None:
    assert {reason for reason, _ in FAULTS} | {reason for reason, _ in LINES} == set(REJECTED)
    assert {rule for rule, _, _ in REPAIRS} == set(REPAIRED)
    assert not (set(REJECTED) & set(REPAIRED) or set(LEFT_OUT) & (set(REJECTED) | set(REPAIRED)))


def test_lines_end_with_line_feeds_alone() -> None:
    text = "one\u2028two\x85three\x0cfour"
    content = b"\xef\xbb\xbf" + json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\r\n"
    consumed: list[int] = []
    assert list(read_lines(io.BytesIO(content), consumed.append)) == [(1, {"prompt": text})]
    assert sum(consumed) == len(content)


# --- identity and split -------------------------------------------------------------------------------------------


def chat(*texts: str) -> Conversation:
    return Conversation(tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)))


def test_the_id_is_of_the_content() -> None:
    # in the open, because a resumed run and an older data set are matched by it
    assert conversation_id(chat("Hi")) == hashlib.sha256(b'[["user","Hi"]]').hexdigest()
    assert len({conversation_id(c) for c in (chat("a"), chat("a", "b"), chat("a", "c"), chat("ab"))}) == 4


def test_cut_ends_at_a_turn_boundary() -> None:
    whole = chat("u1", "a1", "u2", "a2", "u3")
    assert [m.content for m in whole.cut(2).messages] == ["u1", "a1", "u2", "a2"]
    assert whole.cut(3) == whole
    bare = Conversation(tuple(Message("user", text) for text in ("u1", "u2", "u3")))
    assert [m.content for m in bare.cut(2).messages] == ["u1", "u2"]


def test_the_same_opening_is_on_the_same_side() -> None:
    for number in range(200):
        sides = {split_of(chat(opening, "x", str(number)), 0.5) for opening in (f"Why {number}?", f"why  {number}?\n")}
        assert len(sides) == 1


def test_the_share_is_kept_and_grows_in_one_direction() -> None:
    chats = [chat(f"Question {number}") for number in range(2000)]
    small = {c for c in chats if split_of(c, 0.1) == "validation"}
    large = {c for c in chats if split_of(c, 0.3) == "validation"}
    assert small < large
    assert 0.07 < len(small) / len(chats) < 0.13


# --- contamination ------------------------------------------------------------------------------------------------

BENCHMARK = "Write a Python function that returns the n-th Fibonacci number without any recursion, please."


@pytest.mark.parametrize(
    "text",
    [
        BENCHMARK,
        BENCHMARK.upper().replace(" ", "\n "),
        BENCHMARK.replace(",", "").replace(".", "!"),
        BENCHMARK.replace("please", "thanks"),
        f"You are an expert. Follow the instruction below with care and explain all steps.\n\n{BENCHMARK}\n\nAnswer:",
        "Python function that returns the n-th Fibonacci number without any recursion",
    ],
)
def test_benchmark_prompts_are_recognised(text: str) -> None:
    assert BenchmarkIndex([BENCHMARK, "Why?"]).contains(text)


@pytest.mark.parametrize(
    "text",
    [
        "Write a Python function that returns the sum of a list.",
        "Why not? Explain how a Fibonacci heap works.",
        "Why is the sky blue",
        "",
        "?!",
    ],
)
def test_other_prompts_are_not(text: str) -> None:
    assert not BenchmarkIndex([BENCHMARK, "Why?", "..."]).contains(text)


# --- the data set -------------------------------------------------------------------------------------------------

Prepare = Callable[..., Dataset]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "input"
    folder.mkdir(parents=True)
    return folder


def write(folder: Path, name: str, rows: list[dict[str, Any] | bytes]) -> str:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return f"data/input/{name}"


def questions(count: int, start: int = 0) -> list[dict[str, Any] | bytes]:
    return [{"prompt": f"Question number {n} about harbour {n * 7}"} for n in range(start, start + count)]


def prepare(*sources: tuple[str, int | None], **options: Any) -> Dataset:
    listed = [SourceParams(source=source, cap=cap) for source, cap in sources]
    return prepare_dataset(DatasetParams(sources=listed, **options))


def test_counts_add_up_and_faults_are_set_aside(inputs: Path, tmp_path: Path) -> None:
    benchmark = write(inputs, "bench.jsonl", [{"prompt": BENCHMARK}])
    long = {"prompt": "x" * 601}
    faulty = [row for _, row in FAULTS if "\ud83d" not in str(row)]
    rows = [*questions(100), *questions(3), long, {"prompt": BENCHMARK}, turns(HELLO, HI), *faulty, b"{", b"\xff"]
    source = write(inputs, "chats.jsonl", rows)
    dataset = prepare((source, 90), benchmark_sets=[SourceParams(source=benchmark, cap=None)])
    metrics = dataset.metrics()
    assert metrics["rows"] == len(rows)
    assert metrics["rows"] == metrics["kept"] + metrics["rejected"] + metrics["left_out"]
    assert (metrics["kept"], metrics["rejected"], metrics["repaired"]) == (90, len(faulty) + 2, 1)
    left_out = {name: metrics["reasons"][name] for name in LEFT_OUT}
    assert left_out == {"too_long": 1, "duplicate": 3, "benchmark_prompt": 1, "over_cap": 11}
    assert metrics["train"] + metrics["validation"] == 90
    assert metrics["benchmark_prompts"] == {"bench": 1}

    dataset.write(tmp_path)
    rejected = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rejected[-2:]] == ["malformed_json", "not_utf8"]
    assert {row["source"] for row in rejected} == {source}
    first = 100 + 3 + 3 + 1  # line numbers, from 1
    assert [row["row"] for row in rejected] == list(range(first, first + len(rejected)))


def test_written_files(inputs: Path, tmp_path: Path) -> None:
    rows = [*questions(40), turns(("user", "Grüezi \U0001f600"), HELLO, HI, HELLO, ("user", "third"))]
    bench = write(inputs, "bench.jsonl", [{"id": "b", "category": "c", "turns": ["One", "Two"]}, {"prompt": "P"}])
    options = {"benchmark_sets": [SourceParams(source=bench, cap=None)], "max_turns": 2}
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, order in ((first, rows), (second, rows[::-1])):
        folder.mkdir()
        prepare((write(inputs, "chats.jsonl", order), None), **options).write(folder)
    for name in ("conversations.parquet", "prompts.parquet", "rejected.jsonl"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    table = pq.read_table(first / "conversations.parquet").to_pylist()
    assert [row["conversation_id"] for row in table] == sorted(row["conversation_id"] for row in table)
    assert {row["split"] for row in table} == {"train", "validation"}
    long = next(m for m in (json.loads(row["messages"]) for row in table) if len(m) > 1)
    assert [m["content"] for m in long] == ["Grüezi \U0001f600", "Hello!", "Hi", "Hello!"]
    prompts = pq.read_table(first / "prompts.parquet").to_pylist()
    assert sorted((p["set"], p["prompt_id"], p["category"], tuple(p["turns"])) for p in prompts) == [
        ("bench", "2", "", ("P",)),
        ("bench", "b", "c", ("One", "Two")),
    ]


def test_a_cap_is_a_sample_of_the_whole_file(inputs: Path) -> None:
    source = write(inputs, "chats.jsonl", questions(1000))
    kept = {k.conversation.user_turns[0] for k in prepare((source, 100)).kept}
    numbers = sorted(int(text.split()[2]) for text in kept)
    assert len(numbers) == 100
    assert 350 < sum(numbers) / 100 < 650
    shuffled = write(inputs, "other.jsonl", questions(1000)[::-1])
    assert {k.conversation.user_turns[0] for k in prepare((shuffled, 100)).kept} == kept
    assert {k.conversation.user_turns[0] for k in prepare((source, 200)).kept} > kept


def test_more_data_moves_no_conversation(inputs: Path) -> None:
    first = write(inputs, "first.jsonl", questions(200))
    more = write(inputs, "more.jsonl", [*questions(300, start=150), *questions(50)])
    before = {k.conversation_id: (k.split, k.source) for k in prepare((first, None)).kept}
    after = {k.conversation_id: (k.split, k.source) for k in prepare((first, None), (more, None)).kept}
    assert len(after) == 450
    assert before.items() <= after.items()


def test_a_system_message_is_kept_when_it_is_short(inputs: Path) -> None:
    rows = [turns(("system", "Be brief."), HI), turns(("system", "x" * 700), ("user", "Ho")), *questions(60)]
    dataset = prepare((write(inputs, "chats.jsonl", rows), None))
    assert dataset.reasons == {"too_long": 1}
    assert sum(k.conversation.messages[0] == Message("system", "Be brief.") for k in dataset.kept) == 1


# --- errors -------------------------------------------------------------------------------------------------------


def test_too_many_faulty_rows_are_an_error(inputs: Path) -> None:
    source = write(inputs, "chats.jsonl", [*questions(40), *[b'{"text": "x"}'] * 60])
    with pytest.raises(
        EyasError, match=r"dataset\.sources\.0: data/input/chats\.jsonl: 60 of 100 rows.*unknown_shape 60"
    ):
        prepare((source, None))
    assert len(prepare((source, None), max_rejected_share=0.6).kept) == 40


def test_choices_are_no_faults(inputs: Path) -> None:
    long = [{"prompt": f"{n} " + "x" * 700} for n in range(300)]
    dataset = prepare((write(inputs, "chats.jsonl", [*questions(60), *long]), None), max_rejected_share=0.0)
    assert dataset.metrics()["left_out"] == 300


@pytest.mark.parametrize("rows", [[], [{"prompt": "x" * 700}], [{"prompt": "Hi"}]])
def test_nothing_left_is_an_error(inputs: Path, rows: list[dict[str, Any] | bytes]) -> None:
    with pytest.raises(EyasError, match=r"none of them for (train|validation)"):
        prepare((write(inputs, "chats.jsonl", rows), None))


def test_misplaced_and_missing_files_are_errors(inputs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "chats.jsonl"
    write(inputs, "chats.jsonl", questions(60))
    outside.write_bytes((inputs / "chats.jsonl").read_bytes())
    for source in (str(outside), "chats.jsonl", "data/input/../chats.jsonl", "data/other/chats.jsonl"):
        with pytest.raises(EyasError, match=r"not under data/input/.*copy or link it there.*data/input/chats\.jsonl"):
            prepare((source, None))
    with pytest.raises(EyasError, match=r"dataset\.sources\.0: data/input/chat\.jsonl: no such file"):
        prepare(("data/input/chat.jsonl", None))
    (inputs / "chats.parquet").write_bytes(b"PAR1")
    with pytest.raises(EyasError, match=r"expected a \.jsonl file"):
        prepare(("data/input/chats.parquet", None))
    (inputs / "linked.jsonl").symlink_to(outside)
    assert len(prepare(("data/input/linked.jsonl", None)).kept) == 60
    assert len(prepare((str(inputs / "chats.jsonl"), None)).kept) == 60


def test_unknown_packages_are_errors() -> None:
    with pytest.raises(
        EyasError, match=r"dataset\.sources\.0: no bundled package `chit-chat` here; did you mean `chitchat`"
    ):
        prepare(("package:chit-chat", None))
    with pytest.raises(EyasError, match="there is arena-hard, chitchat, evals"):
        prepare(("package:mt-bench", None))


def test_benchmark_sets_have_no_holes(inputs: Path) -> None:
    chats = write(inputs, "chats.jsonl", questions(60))

    def with_set(name: str, rows: list[dict[str, Any] | bytes], times: int = 1) -> Dataset:
        bench = SourceParams(source=write(inputs, name, rows), cap=None)
        return prepare((chats, None), benchmark_sets=[bench] * times)

    with pytest.raises(EyasError, match=r"dataset\.benchmark_sets\.0: .*row 2: unknown_shape"):
        with_set("bench.jsonl", [{"prompt": "P"}, {"text": "x"}])
    with pytest.raises(EyasError, match="a second prompt with the id 'a'"):
        with_set("bench.jsonl", [{"id": "a", "prompt": "P"}, {"id": "a", "prompt": "Q"}])
    with pytest.raises(EyasError, match="no prompts"):
        with_set("bench.jsonl", [])
    with pytest.raises(EyasError, match="a second set named 'bench'"):
        with_set("bench.jsonl", [{"prompt": "P"}], times=2)
    with pytest.raises(EyasError, match="heldout is taken"):
        with_set("heldout.jsonl", [{"prompt": "P"}])


# --- properties ---------------------------------------------------------------------------------------------------

_texts = st.text(st.characters(exclude_categories=()), max_size=12)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | _texts
_roles = st.sampled_from(["user", "assistant", "system", "human", "gpt", "tool", "developer", "kimi-k2"]) | _scalars
_turn = st.fixed_dictionaries(
    {}, optional={"role": _roles, "from": _roles, "content": _scalars, "value": _scalars, "tool_calls": _scalars}
)
_values = st.recursive(
    _scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(_texts, v, max_size=3), max_leaves=6
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
_lines = _rows.map(lambda row: json.dumps(row).encode()) | _values.map(lambda v: json.dumps(v).encode()) | st.binary()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(_lines, max_size=8))
def test_anything_ends_as_kept_rejected_or_left_out(inputs: Path, lines: list[bytes]) -> None:
    content = b"\n".join(lines)
    (inputs / "any.jsonl").write_bytes(content)
    anchor = write(inputs, "anchor.jsonl", questions(60))  # so that no split is empty
    metrics = (dataset := prepare((anchor, None), ("data/input/any.jsonl", None), max_rejected_share=1.0)).metrics()
    rows = sum(
        bool(line.removeprefix(b"\xef\xbb\xbf" if n == 0 else b"").strip())
        for n, line in enumerate(content.split(b"\n"))
    )
    assert metrics["rows"] == rows + 60
    assert metrics["rows"] == metrics["kept"] + metrics["rejected"] + metrics["left_out"]
    faults = sum(count for name, count in metrics["reasons"].items() if name in REJECTED)
    assert faults == metrics["rejected"]
    for kept in dataset.kept:
        roles = [message.role for message in kept.conversation.messages]
        assert set(roles) <= {"system", "user", "assistant"}
        assert "system" not in roles[1:]
        assert roles[roles[0] == "system"] == "user"
        assert all(message.content.strip() for message in kept.conversation.messages)
    json.dumps(metrics, allow_nan=False)
    dataset.write(inputs)


@settings(max_examples=100, deadline=None)
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
    assert set(answers) <= {m.replace("\0", "") for m in flat if isinstance(m, str)}
