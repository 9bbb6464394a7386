"""A file or directory is whole or absent, and flushed before it gets its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.files import (
    atomic_directory,
    atomic_file,
    file_sha256,
    value_hash,
    write_json_atomic,
    write_text_atomic,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text_atomic(path, "old")
    with pytest.raises(RuntimeError, match="half way"), atomic_file(path) as temporary:
        temporary.write_text("new, but n")
        raise RuntimeError("half way")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_failed_directory_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with atomic_directory(path) as temporary:
        (temporary / "old").write_text("1")
    with pytest.raises(RuntimeError), atomic_directory(path) as temporary:
        (temporary / "new").write_text("2")
        raise RuntimeError
    assert names(tmp_path) == ["out"]
    assert names(path) == ["old"]


def test_a_new_directory_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out"
    for name in ("old", "new"):
        with atomic_directory(path) as temporary:
            (temporary / name).mkdir()
            (temporary / name / "file").write_text(name)
    assert [str(p.relative_to(path)) for p in sorted(path.rglob("*"))] == ["new", "new/file"]
    assert names(path.parent) == ["out"]


def test_content_is_flushed_before_the_rename_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        events.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().suffix))
        fsync(descriptor)

    def spy_replace(source: Path, destination: Path) -> None:
        events.append(("rename", Path(source).suffix))
        replace(source, destination)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    folder = tmp_path / "folder"
    write_text_atomic(folder / "a.txt", "a")
    assert events == [("fsync", ".tmp"), ("rename", ".tmp"), ("fsync", "")]

    events.clear()
    with atomic_directory(folder / "out") as temporary:
        (temporary / "b.bin").write_text("b")
    assert events == [("fsync", ".bin"), ("rename", ".tmp"), ("fsync", "")]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_refuses_what_dvc_cannot_read(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(tmp_path / "m.json", {"deep": [{"loss": value}]})
    with pytest.raises(ValueError, match="JSON"):
        value_hash({"loss": value})
    assert not list(tmp_path.iterdir())


def test_json_is_sorted_ascii_text(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "m.json", {"b": "é", "a": 1})
    assert (tmp_path / "m.json").read_bytes() == b'{\n  "a": 1,\n  "b": "\\u00e9"\n}\n'


@given(st.dictionaries(st.text(), JSON))
def test_value_hash_forgets_the_order_of_keys_and_nothing_else(value: dict[str, object]) -> None:
    turned = dict(reversed(value.items()))
    assert value_hash(turned) == value_hash(value)
    assert value_hash({**value, "\0one more": 1}) != value_hash(value)


def test_file_hash_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert file_sha256(tmp_path / "abc").startswith("ba7816bf8f01cfea414140de5dae2223b00361a396177a9c")
    (tmp_path / "json").write_text('{"a":[1,"\\u00e9"],"b":null}')
    assert value_hash({"b": None, "a": [1, "é"]}) == file_sha256(tmp_path / "json")
