"""The data set from small files: counts, files, duplicates, caps, the split, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.conversations.faults import LEFT_OUT, REJECTED
from eyas.errors import EyasError
from eyas.params import SourceParams
from tests.prepared import BENCHMARK, HELLO, HI, prepare, questions, turns, write

BAD_ROWS: list[dict[str, Any]] = [{"text": "Hi"}, {"messages": "Hi"}, turns(HI, ("bing", "Hello!")), turns(("user", 4))]


def test_counts_add_up_and_faults_are_set_aside(inputs: Path) -> None:
    benchmark = write(inputs, "bench.jsonl", [{"prompt": BENCHMARK}])
    long = {"prompt": "x" * 601}
    near = {"prompt": "QUESTION number 4, about harbour 28!"}
    rows = [
        *questions(100),
        *questions(3),
        near,
        long,
        {"prompt": BENCHMARK},
        turns(HELLO, HI),
        *BAD_ROWS,
        b"{",
        b"\xff",
    ]
    source = write(inputs, "chats.jsonl", rows)
    made = prepare((source, 90), benchmark_sets=[SourceParams(source=benchmark, cap=None)])
    metrics = made.metrics
    assert metrics["rows"] == len(rows)
    assert metrics["rows"] == metrics["kept"] + metrics["rejected"] + metrics["left_out"]
    assert (metrics["kept"], metrics["rejected"], metrics["repaired"]) == (90, len(BAD_ROWS) + 2, 1)
    left_out = {name: metrics["reasons"].get(name, 0) for name in LEFT_OUT}
    assert left_out == {
        "too_long": 1,
        "duplicate": 3,
        "near_duplicate": 1,
        "benchmark_prompt": 1,
        "over_cap": 11,
        "sampled_out": 0,
    }
    assert metrics["train"] + metrics["validation"] == 90
    assert metrics["benchmark_prompts"] == {"bench": 1}
    expected = {name: metrics[name] for name in ("rows", "kept", "rejected", "repaired", "left_out", "reasons")}
    assert metrics["by_source"] == {source: expected}
    assert [row["reason"] for row in made.rejected[-2:]] == ["malformed_json", "not_utf8"]
    assert {row["source"] for row in made.rejected} == {source}
    first = 100 + 3 + 1 + 1 + 1 + 1 + 1  # line numbers, from 1
    assert [row["row"] for row in made.rejected] == list(range(first, first + len(made.rejected)))


def test_written_files(inputs: Path) -> None:
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    called = {
        "messages": [
            {"role": "user", "content": "Is it warm in Zürich?"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Look it up."},
            {"role": "tool", "content": "18"},
            {"role": "assistant", "content": "Yes."},
        ],
        "tools": [weather],
    }
    rows = [*questions(40), turns(("user", "Grüezi \U0001f600"), HELLO, HI, HELLO, ("user", "third")), called]
    bench = write(inputs, "bench.jsonl", [{"id": "b", "category": "c", "turns": ["One", "Two"]}, {"prompt": "P"}])
    options = {"benchmark_sets": [SourceParams(source=bench, cap=None)], "max_turns": 2}
    first = prepare((write(inputs, "chats.jsonl", rows), None), **options)
    second = prepare((write(inputs, "chats.jsonl", rows[::-1]), None), **options)
    assert first.files == second.files
    assert set(first.files) == {"conversations.parquet", "prompts.parquet", "rejected.jsonl"}
    ids = [row["conversation_id"] for row in first.rows]
    assert ids == sorted(ids)
    assert {row["split"] for row in first.rows} == {"train", "validation"}
    long = next(row for row in first.rows if "Hello" in row["messages"])
    assert [m["content"] for m in json.loads(long["messages"])] == ["Grüezi \U0001f600", "Hello!", "Hi", "Hello!"]
    assert long["tools"] == "[]"
    with_tools = next(row for row in first.rows if row["tools"] != "[]")
    assert json.loads(with_tools["tools"]) == [weather]
    answer = json.loads(with_tools["messages"])[1]
    assert answer["reasoning_content"] == "Look it up."
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Zürich"}}
    prompts = pq.read_table(pa.BufferReader(first.files["prompts.parquet"])).to_pylist()
    assert sorted((p["set"], p["prompt_id"], p["category"], tuple(p["turns"])) for p in prompts) == [
        ("bench", "2", "", ("P",)),
        ("bench", "b", "c", ("One", "Two")),
    ]


def test_processes_write_the_same_bytes(inputs: Path) -> None:
    rows = [
        *questions(2600),
        *[{"prompt": f"Please tell question number {n} about harbour {n * 7}"} for n in range(40)],
    ]
    source = write(inputs, "chats.jsonl", [*rows, b"{", b"\xff", *questions(20)])
    alone = prepare((source, None), workers=1)
    shared = prepare((source, None), workers=2)
    assert shared.files == alone.files
    assert shared.metrics == alone.metrics
    assert alone.metrics["kept"] == 2640


def test_folders_and_globs_are_read_in_the_order_of_names(inputs: Path) -> None:
    (inputs / "some" / "deep").mkdir(parents=True)
    write(inputs / "some", "b.jsonl", [*questions(30), b"{"])
    write(inputs / "some" / "deep", "a.jsonl", [b"[", *questions(40, start=30)])
    pq.write_table(
        pa.table({"prompt": [row["prompt"] for row in questions(30, start=70)]}), inputs / "some" / "c.parquet"
    )
    (inputs / "some" / "README.md").write_text("Not data.")
    made = prepare(("data/input/some", None))
    assert made.metrics["kept"] == 100
    assert [(row["file"], row["row"]) for row in made.rejected] == [("some/b.jsonl", 31), ("some/deep/a.jsonl", 1)]
    assert {row["source"] for row in made.rows} == {"data/input/some"}
    assert prepare(("data/input/some/*.jsonl", None)).metrics["rows"] == 31
    with pytest.raises(EyasError, match=r"dataset\.sources\.0: data/input/none\*\.jsonl: no such file"):
        prepare(("data/input/none*.jsonl", None))


def test_a_cap_is_a_sample_of_the_whole_file(inputs: Path) -> None:
    source = write(inputs, "chats.jsonl", questions(1000))
    kept = prepare((source, 100)).openings
    numbers = sorted(int(text.split()[2]) for text in kept)
    assert len(numbers) == 100
    assert 350 < sum(numbers) / 100 < 650
    shuffled = write(inputs, "other.jsonl", questions(1000)[::-1])
    assert prepare((shuffled, 100)).openings == kept
    assert prepare((source, 200)).openings > kept


def test_a_cap_on_all_samples_every_source(inputs: Path) -> None:
    large = write(inputs, "large.jsonl", questions(600))
    small = write(inputs, "small.jsonl", questions(200, start=1000))
    tiny = write(inputs, "tiny.jsonl", questions(2, start=2000))
    made = prepare((large, None), (small, None), (tiny, None), cap=200)
    assert made.metrics["sources"] == {large: 149, small: 50, tiny: 1}
    assert made.metrics["reasons"] == {"sampled_out": 602}
    assert prepare((tiny, None), (small, None), (large, None), cap=200).openings == made.openings
    assert prepare((large, None), (small, None), (tiny, None), cap=400).openings > made.openings
    weighted = [SourceParams(source=large, weight=1), SourceParams(source=small, weight=9)]
    assert prepare(cap=300, sources=weighted).metrics["sources"] == {large: 100, small: 200}


def test_near_copies_are_left_out_whatever_their_order(inputs: Path) -> None:
    story = (
        "Tell me a long story about the old keeper of a lighthouse who finds a letter in a bottle on {} morning in May"
    )
    copied = [{"prompt": story.format(day)} for day in ("Monday", "Tuesday", "a Wednesday")]
    other = [{"prompt": "Tell me a long story about a young sailor who finds an island on Monday morning in May"}]
    rows = [*questions(60), *copied, *other]
    source, turned = write(inputs, "a.jsonl", rows), write(inputs, "b.jsonl", rows[::-1])
    made = prepare((source, None), near_duplicate=0.6)
    assert made.metrics["reasons"] == {"near_duplicate": 2}
    assert prepare((turned, None), near_duplicate=0.6).openings == made.openings
    assert prepare((source, None), near_duplicate=1.0).metrics["kept"] == len(rows)
    # the first source's stays
    again = write(inputs, "again.jsonl", [{"prompt": story.format("Friday")}])
    for sources in ((again, source), (source, again)):
        rows = prepare(*((name, None) for name in sources), near_duplicate=0.6).rows
        assert {row["source"] for row in rows if "lighthouse" in row["messages"]} == {sources[0]}


def test_the_same_request_about_another_text_is_no_copy(inputs: Path) -> None:
    framed = [
        turns(("system", text), ("user", "Sum up the text above."))
        for text in ("A gull", "A boat", "A gull", "A  gull")
    ]
    framed[2]["messages"][1]["content"] = "Sum up the text above, please!"
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    called = {"prompt": "Sum up the text above.", "tools": [tool]}
    copies = [{"prompt": "Sum up the text above."}, {"prompt": "Sum up -- the text above!"}]
    made = prepare((write(inputs, "chats.jsonl", [*questions(60), *framed, called, *copies]), None), near_duplicate=0.6)
    assert made.metrics["reasons"] == {"near_duplicate": 2}


def test_a_benchmark_prompt_that_is_spread_over_turns_is_left_out(inputs: Path) -> None:
    bench = SourceParams(source=write(inputs, "bench.jsonl", [{"prompt": BENCHMARK}]), cap=None)
    spoken = BENCHMARK.split()
    pieces = [" ".join(spoken[start : start + 5]) for start in (0, 5, 10)]
    row = turns(*((role, text) for piece in pieces for role, text in (("user", piece), HELLO)))
    chats = write(inputs, "chats.jsonl", [*questions(60), row, *({"prompt": piece} for piece in pieces)])
    made = prepare((chats, None), benchmark_sets=[bench], max_turns=3)
    assert made.metrics["reasons"] == {"benchmark_prompt": 1}


def test_texts_without_words_are_no_copies(inputs: Path) -> None:
    rows = [*questions(60), *({"prompt": text} for text in ("+", "-", "*/", "\U0001f600", "+"))]
    assert prepare((write(inputs, "chats.jsonl", rows), None)).metrics["reasons"] == {"duplicate": 1}


def test_more_data_moves_no_conversation(inputs: Path) -> None:
    first = write(inputs, "first.jsonl", questions(200))
    more = write(inputs, "more.jsonl", [*questions(300, start=150), *questions(50)])
    before = {row["conversation_id"]: (row["split"], row["source"]) for row in prepare((first, None)).rows}
    after = {row["conversation_id"]: (row["split"], row["source"]) for row in prepare((first, None), (more, None)).rows}
    assert len(after) == 450
    assert before.items() <= after.items()


def test_a_system_message_is_kept_when_it_is_short(inputs: Path) -> None:
    rows = [turns(("system", "Be brief."), HI), turns(("system", "x" * 700), ("user", "Ho")), *questions(60)]
    made = prepare((write(inputs, "chats.jsonl", rows), None))
    assert made.metrics["reasons"] == {"too_long": 1}
    assert sum("Be brief." in row["messages"] for row in made.rows) == 1


# --- errors -------------------------------------------------------------------------------------------------------


def test_too_many_faulty_rows_are_an_error(inputs: Path) -> None:
    source = write(inputs, "chats.jsonl", [*questions(40), *[b'{"text": "x"}'] * 60])
    with pytest.raises(
        EyasError, match=r"dataset\.sources\.0: data/input/chats\.jsonl: 60 of 100 rows.*unknown_shape 60"
    ):
        prepare((source, None))
    assert prepare((source, None), max_rejected_share=0.6).metrics["kept"] == 40


def test_choices_are_no_faults(inputs: Path) -> None:
    long: list[dict[str, Any] | bytes] = [{"prompt": f"{n} " + "x" * 700} for n in range(300)]
    made = prepare((write(inputs, "chats.jsonl", [*questions(60), *long]), None), max_rejected_share=0.0)
    assert made.metrics["left_out"] == 300


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
    (inputs / "chats.xlsx").write_bytes(b"PK")
    with pytest.raises(EyasError, match=r"dataset\.sources\.0: data/input/chats\.xlsx: .*\.jsonl"):
        prepare(("data/input/chats.xlsx", None))
    (inputs / "linked.jsonl").symlink_to(outside)
    assert prepare(("data/input/linked.jsonl", None)).metrics["kept"] == 60
    assert prepare((str(inputs / "chats.jsonl"), None)).metrics["kept"] == 60


def test_unknown_packages_are_errors(inputs: Path) -> None:
    with pytest.raises(
        EyasError, match=r"dataset\.sources\.0: no bundled package `chit-chat` here; did you mean `chitchat`"
    ):
        prepare(("package:chit-chat", None))
    with pytest.raises(EyasError, match="there is arena-hard, chitchat, evals"):
        prepare(("package:mt-bench", None))


def test_benchmark_sets_have_no_holes(inputs: Path) -> None:
    chats = write(inputs, "chats.jsonl", questions(60))

    def with_set(name: str, rows: list[dict[str, Any] | bytes], times: int = 1) -> None:
        bench = SourceParams(source=write(inputs, name, rows), cap=None)
        prepare((chats, None), benchmark_sets=[bench] * times)

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
_values = st.recursive(
    _scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(_texts, v, max_size=3), max_leaves=6
)
_turn = st.fixed_dictionaries(
    {}, optional={"role": _roles, "from": _roles, "content": _scalars, "value": _scalars, "tool_calls": _values}
)
_rows = st.fixed_dictionaries(
    {},
    optional={
        **{key: st.lists(_turn, max_size=4) | _values for key in ("messages", "conversations", "turns")},
        **dict.fromkeys(("prompt", "question", "instruction", "input", "output", "answer", "system", "tools"), _values),
    },
)
_lines = _rows.map(lambda row: json.dumps(row).encode()) | _values.map(lambda v: json.dumps(v).encode()) | st.binary()
_small = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_small
@given(lines=st.lists(_lines, max_size=8))
def test_anything_ends_as_kept_rejected_or_left_out(inputs: Path, lines: list[bytes]) -> None:
    content = b"\n".join(lines)
    (inputs / "any.jsonl").write_bytes(content)
    anchor = write(inputs, "anchor.jsonl", questions(60))  # so that no split is empty
    made = prepare((anchor, None), ("data/input/any.jsonl", None), max_rejected_share=1.0)
    metrics = made.metrics
    assert metrics["rows"] == metrics["kept"] + metrics["rejected"] + metrics["left_out"]
    assert metrics["rejected"] == len(made.rejected)
    faults = sum(count for name, count in metrics["reasons"].items() if name in REJECTED)
    assert faults == metrics["rejected"]
    for row in made.rows:
        roles = [message["role"] for message in json.loads(row["messages"])]
        assert set(roles) <= {"system", "user", "assistant", "tool"}
        assert "system" not in roles[1:]
        assert roles[roles[0] == "system"] == "user"
    json.dumps(metrics, allow_nan=False)


@settings(_small, max_examples=25)
@given(data=st.data())
def test_sources_added_removed_or_turned_round_move_nobody(inputs: Path, data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 40), max_size=12)
    some, more = data.draw(numbers), data.draw(numbers)

    def listed(name: str, chosen: list[int]) -> tuple[str, None]:
        return write(inputs, name, [questions(1, start=n)[0] for n in chosen] or [b""]), None

    anchor = write(inputs, "anchor.jsonl", questions(60, start=100)), None
    few = prepare(anchor, listed("some.jsonl", some))
    many = prepare(anchor, listed("some.jsonl", some), listed("more.jsonl", more))
    turned = prepare(listed("more.jsonl", more[::-1]), anchor, listed("some.jsonl", some[::-1]))
    assert few.splits.items() <= many.splits.items()
    assert many.splits == turned.splits
