"""Every file format: the same rows out of each, damage that costs one row, damage that costs the rest, bounded memory."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.conversations.faults import BadRow
from eyas.conversations.reading import data_files, read_rows
from eyas.conversations.rules import validate
from eyas.errors import EyasError

ROWS = [{"prompt": f'Grüezi {n} \U0001f600\u2028, "{n}"\n', "response": f"{n}; a\tb"} for n in range(5)]


def lines(rows: list[dict[str, Any]], encoding: str = "utf-8") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(encoding)


def as_json(rows: Any, **options: Any) -> bytes:
    return json.dumps(rows, ensure_ascii=False, **options).encode()


def as_csv(rows: list[dict[str, Any]], encoding: str = "utf-8", **options: Any) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode(encoding)


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def read(path: Path) -> list[Any]:
    """Rows, or the reasons why they are none; numbers must be in order, and all bytes accounted for."""
    consumed: list[int] = []
    entries = list(read_rows(path, consumed.append))
    numbers = [number for number, _ in entries]
    assert numbers == sorted(set(numbers))
    assert sum(consumed) <= path.stat().st_size
    return [row.reason if isinstance(row, BadRow) else row for _, row in entries]


FORMATS: list[tuple[str, bytes]] = [
    ("a.jsonl", lines(ROWS)),
    ("a.jsonl", b"\xef\xbb\xbf" + lines(ROWS).replace(b"\n", b"\r\n\n")),
    ("a.ndjson", lines(ROWS).removesuffix(b"\n")),
    ("a.JSONL.gz", gzip.compress(lines(ROWS[:2])) + gzip.compress(lines(ROWS[2:]))),
    ("a.jsonl.zst", zstandard.compress(lines(ROWS[:2])) + zstandard.compress(lines(ROWS[2:]))),
    ("a.jsonl", lines(ROWS, "utf-16")),
    ("a.jsonl", lines(ROWS, "utf-16-be")),
    ("a.json", as_json(ROWS)),
    ("a.json", b"\xef\xbb\xbf" + as_json(ROWS, indent=2)),
    ("a.json", as_json({"version": 1, "data": ROWS, "meta": {"a": [1, 2]}})),
    ("a.json", as_json({"tags": [{"a": 1}], "conversations": ROWS}, indent=1)),
    ("a.json", lines(ROWS)),
    ("a.json", b"\n\n".join(as_json(row, indent=2) for row in ROWS)),
    ("a.json", as_json(ROWS).decode().encode("utf-16")),
    ("a.json.gz", gzip.compress(as_json(ROWS))),
    ("a.csv", as_csv(ROWS)),
    ("a.csv", b"\xef\xbb\xbf" + as_csv(ROWS, delimiter=";")),
    ("a.csv", as_csv(ROWS, "utf-16")),
    ("a.csv.zst", zstandard.compress(as_csv(ROWS))),
    ("a.parquet", as_parquet(ROWS)),
    ("a.parquet", as_parquet([{**row, "embedding": [0.5] * 9} for row in ROWS])),
]


@pytest.mark.parametrize(("name", "content"), FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content if name != "a.csv" else content.strip())
    assert read(tmp_path / name) == []


def test_no_rows_in_files_that_say_so(tmp_path: Path) -> None:
    for name, content in (
        ("a.json", b"[]"),
        ("b.csv", b"prompt,response\n"),
        ("c.parquet", as_parquet([])),
        ("d.jsonl.gz", gzip.compress(b"")),
    ):
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name) == []


def test_one_conversation_as_a_document_is_one_row(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for row in ({"messages": turns, "tools": tools}, {"conversations": turns}, {"tools": tools, "turns": ["Hi", "Ho"]}):
        (tmp_path / "a.json").write_bytes(as_json(row, indent=2))
        assert read(tmp_path / "a.json") == [row]


def test_cells_hold_lists_as_json_text(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    (tmp_path / "a.csv").write_bytes(as_csv([{"messages": json.dumps(turns), "tools": ""}]))
    (tmp_path / "a.parquet").write_bytes(as_parquet([{"messages": json.dumps(turns), "tools": None}]))
    (tmp_path / "b.parquet").write_bytes(as_parquet([{"messages": turns, "tools": []}]))
    for name in ("a.csv", "a.parquet", "b.parquet"):
        (row,) = read(tmp_path / name)
        conversation, repairs = validate(row)
        assert [m.as_dict() for m in conversation.messages] == turns
        assert repairs == []


def test_calls_and_tools_out_of_columns(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "18", "tool_call_id": "1"},
        {"role": "assistant", "content": "18 degrees.", "reasoning_content": "Hm."},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": "Weather"}}
    (tmp_path / "a.parquet").write_bytes(
        as_parquet([{"messages": turns, "tools": [tool]}, {"messages": turns[:1], "tools": None}])
    )
    called, plain = read(tmp_path / "a.parquet")
    conversation, repairs = validate(called)
    arguments = {"function": {"name": "f", "arguments": {"city": "Paris"}}}
    expected = [turns[0], {**turns[1], "content": "", "tool_calls": [{**call, **arguments}]}, *turns[2:]]
    assert [m.as_dict() for m in conversation.messages] == expected
    assert (conversation.tools, repairs) == ((tool,), [])
    assert validate(plain)[0].messages[0].as_dict() == turns[0]


A, B = b'{"prompt": "A"}', b'{"prompt": "B"}'
ROW_A, ROW_B = {"prompt": "A"}, {"prompt": "B"}
DAMAGE: list[tuple[str, bytes, list[Any]]] = [
    ("a.json", b"[" + A + b', {"prompt": tru}, ' + B + b"]", [ROW_A, "malformed_json", ROW_B]),
    ("a.json", b"[" + A + b', {"prompt": "a\nb"}, ' + B + b"]", [ROW_A, "malformed_json", ROW_B]),
    (
        "a.json",
        b"[" + A + b', {"prompt": "]", "x": [}, {"prompt": "C"}]}, ' + B + b"]",
        [ROW_A, "malformed_json", "malformed_json", ROW_B],
    ),
    ("a.json", b"[" + A + b', {"prompt": "\xff"}, ' + B + b"]", [ROW_A, "not_utf8", ROW_B]),
    ("a.json", b"[" + A + b', {"x": 1, "x": 2}, ' + B + b"]", [ROW_A, "duplicate_key", ROW_B]),
    ("a.json", b"[" + A + b", " + b"[" * 100_000 + b"]" * 100_000 + b", " + B + b"]", [ROW_A, "malformed_json", ROW_B]),
    ("a.json", b"[" + A + b', {"n": ' + b"9" * 5000 + b"}, " + B + b"]", [ROW_A, "malformed_json", ROW_B]),
    ("a.json", b"[" + A + b', 1, "x", null, [2], ' + B + b",]", [ROW_A, *["not_an_object"] * 4, ROW_B]),
    ("a.json", b"[" + A + b" " + B + b"] " + A, [ROW_A, ROW_B, ROW_A]),
    ("a.json", b"[" + A + b', {"prompt": "' + b"x" * (17 << 20) + b'"}, ' + B + b"]", [ROW_A, "line_too_long", ROW_B]),
    ("a.json", b"[" + A + b', {"prompt": "B', [ROW_A, "unreadable_rest"]),
    ("a.json", b"[" + A + b", ", [ROW_A, "unreadable_rest"]),
    ("a.json", b'{"data": [' + A + b'], "test": [' + B + b"]}", [ROW_A, "second_list"]),
    ("a.json", b'{"data": [' + A + b', {"prompt": tru}], "x": 1}', [ROW_A, "malformed_json"]),
    ("a.json", b'{"data": [{"prompt": tru}, ' + B + b"]}", ["malformed_json", ROW_B]),
    (
        "a.json",
        b'{"conversations": [{"x": tru}, {"x": 1, "x": 1}, ' + B + b"]}",
        ["malformed_json", "duplicate_key", ROW_B],
    ),
    ("a.json", b'{"messages": [{"role": "user", "content": "\xff"}]}', ["not_utf8"]),
    ("a.json", b'{"messages": [{"role": tru}]}', ["malformed_json"]),
    ("a.json", b'{"messages": 1, "messages": 2}', ["duplicate_key"]),
    ("a.json", b'{"prompt" "A"}\n' + B, ["malformed_json", ROW_B]),
    ("a.json", A + b'\n{"prompt": "A}\n' + B, [ROW_A, "malformed_json", ROW_B]),
    ("a.json", A + b"\n" + B + b'\n{"prompt": "A}\n' + B, [ROW_A, ROW_B, "malformed_json", ROW_B]),
    ("a.jsonl", A + b"\n" + b"[" * 9 + b"\n" + B, [ROW_A, "malformed_json", ROW_B]),
    ("a.jsonl.gz", gzip.compress(lines([ROW_A] * 9))[:-12], ["unreadable_rest"]),
    ("a.jsonl.gz", A, ["unreadable_rest"]),
    ("a.jsonl.zst", zstandard.compress(lines([ROW_A] * 9))[:-1], ["unreadable_rest"]),
    (
        "a.csv",
        b"prompt,response\nA,\nB\nC,c,c\n\nD,d\n",
        [{"prompt": "A", "response": ""}, "bad_csv_row", "bad_csv_row", {"prompt": "D", "response": "d"}],
    ),
    ("a.csv", b"prompt\nA\n\xfcber\nB\n", [ROW_A, "not_utf8", ROW_B]),
    ("a.csv", b'prompt\nA\n"' + b"x" * (17 << 20) + b'"\nB\n', [ROW_A, "bad_csv_row", ROW_B]),
    ("a.csv", b"prompt,prompt\nA,B\n", ["unreadable_rest"]),
    ("a.parquet", b"PAR1", ["unreadable_rest"]),
    ("a.parquet", b"", ["unreadable_rest"]),
]


@pytest.mark.parametrize(("name", "content", "expected"), DAMAGE)
def test_damage_costs_no_more_than_it_must(tmp_path: Path, name: str, content: bytes, expected: list[Any]) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == expected


def test_text_in_parquet_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    raw = pa.array([b"A", b"\xff", b"B"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [ROW_A, "not_utf8", ROW_B]


def test_values_in_parquet_that_python_cannot_hold_cost_their_row(tmp_path: Path) -> None:
    dates = pa.array([1, 2**60, 3], pa.timestamp("ms"))
    pq.write_table(pa.table({"prompt": ["A", "B", "C"], "answer": dates}), tmp_path / "a.parquet")
    assert [row if isinstance(row, str) else row["prompt"] for row in read(tmp_path / "a.parquet")] == [
        "A",
        "not_text",
        "C",
    ]


def test_parquet_without_a_known_column_names_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(as_parquet([{"text": "A", "label": 1}] * 3))
    (row, *_) = rows = read(tmp_path / "a.parquet")
    assert len(rows) == 3
    with pytest.raises(BadRow, match=r"unknown_shape: keys: \['label', 'text'\]"):
        validate(row)


def test_lone_surrogates_survive_reading_and_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"prompt": "broken \\ud83d pair"}, {"prompt": "NUL \\u0000"}]')
    broken, nul = read(tmp_path / "a.json")
    with pytest.raises(BadRow, match="invalid_text"):
        validate(broken)
    assert validate(nul)[1] == ["nul_removed"]


# --- files --------------------------------------------------------------------------------------------------------


def test_folders_and_globs_are_sorted_and_go_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "d/b.jsonl",
        "d/a.csv.gz",
        "d/sub/c.parquet",
        "d/notes.txt",
        "d/.hidden/x.jsonl",
        "d/.x.jsonl",
        "d/x.parquet.gz",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    whole = [Path("d/a.csv.gz"), Path("d/b.jsonl"), Path("d/sub/c.parquet")]
    assert data_files("d") == whole
    assert data_files("d/*.jsonl") == [Path("d/b.jsonl")]
    assert data_files("d/**/*.parquet") == whole[2:]
    assert data_files(str(tmp_path / "d" / "[ab].*")) == [tmp_path / "d" / "a.csv.gz", tmp_path / "d" / "b.jsonl"]
    for missing in ("e", "d/*.json", "d/e.jsonl"):
        with pytest.raises(EyasError, match="no such file"):
            data_files(missing)
    for strange in ("d/notes.txt", "d/x.parquet.gz", "d/*.txt"):
        with pytest.raises(EyasError, match=r"cannot be read .* \.jsonl"):
            data_files(strange)


# --- properties ---------------------------------------------------------------------------------------------------

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.dictionaries(st.text(), _values, max_size=4), max_size=5), indent=st.sampled_from([None, 1]))
def test_a_list_of_objects_is_read_as_the_library_reads_it(tmp_path: Path, rows: list[Any], indent: int | None) -> None:
    (tmp_path / "a.json").write_bytes(json.dumps(rows, indent=indent).encode())
    assert read(tmp_path / "a.json") == rows


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "a.json.zst"]),
    content=st.binary() | st.text('[]{}",:\\tn1 \n').map(str.encode),
    head=st.sampled_from([b"", b"[", b'{"data": [', b"PAR1", b"\xff\xfe", b"prompt,", gzip.compress(b"")]),
)
def test_any_bytes_are_read_without_an_error(tmp_path: Path, name: str, content: bytes, head: bytes) -> None:
    (tmp_path / name).write_bytes(head + content)
    for row in read(tmp_path / name):
        assert isinstance(row, (dict, str))


@pytest.mark.parametrize("write", [lines, as_json, as_csv])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, write: Callable[[list[dict[str, Any]]], bytes]) -> None:
    path = tmp_path / f"a.{ {'lines': 'jsonl', 'as_json': 'json', 'as_csv': 'csv'}[write.__name__] }.gz"
    path.write_bytes(gzip.compress(write([{"prompt": f"{n} " + "x" * 4000} for n in range(10_000)]), 1))
    tracemalloc.start()
    assert sum(isinstance(row, dict) for _, row in read_rows(path, lambda _: None)) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20  # of 40 MB
