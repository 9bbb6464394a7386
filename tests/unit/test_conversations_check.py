"""`eyas conversations check`: what it prints, and when it fails."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from eyas.conversations.cli import app
from eyas.errors import EyasError

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
LEADING = {"conversations": [{"from": "gpt", "value": "Yes?"}, {"from": "human", "value": "Hi\0"}]}
UNKNOWN = {"messages": [{"role": "user", "content": "Hi"}, {"role": "kimi-k2", "content": "Hello!"}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments])


def write(name: str, rows: list[Any]) -> str:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    Path(name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return name


def test_json_of_one_file_counts_lines(folder: Path) -> None:
    result = check(write("a.jsonl", [GOOD, LEADING, "", UNKNOWN, "{", GOOD, GOOD]), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "rows": 6,
        "kept": 4,
        "rejected": [{"row": 4, "reason": "unknown_role"}, {"row": 5, "reason": "malformed_json"}],
        "repaired": [{"row": 2, "rule": "leading_assistant_dropped"}, {"row": 2, "rule": "nul_removed"}],
    }


def test_json_of_several_files_names_them(folder: Path) -> None:
    Path("chats").mkdir()
    write("chats/b.jsonl.gz", [GOOD, UNKNOWN])
    write("chats/a.jsonl", [LEADING, GOOD])
    other = write("other.json", [GOOD])
    result = check("chats", other, "*.json", "--json")
    assert json.loads(result.stdout) == {
        "rows": 5,
        "kept": 4,
        "rejected": [{"file": "chats/b.jsonl.gz", "row": 2, "reason": "unknown_role"}],
        "repaired": [
            {"file": "chats/a.jsonl", "row": 1, "rule": "leading_assistant_dropped"},
            {"file": "chats/a.jsonl", "row": 1, "rule": "nul_removed"},
        ],
    }


def test_too_many_faults_are_an_error_but_still_printed(folder: Path) -> None:
    name = write("a.jsonl", [GOOD, UNKNOWN, UNKNOWN])
    result = check(name, "--json")
    assert (result.exit_code, json.loads(result.stdout)["kept"]) == (1, 1)
    assert isinstance(result.exception, EyasError)
    assert "2 of 3 rows are faulty" in str(result.exception)
    assert check(name, "--max-rejected-share", "0.7").exit_code == 0


@pytest.mark.parametrize("rows", [[], [""], [UNKNOWN]])
def test_nothing_left_is_an_error(folder: Path, rows: list[Any]) -> None:
    result = check(write("a.jsonl", rows), "--json", "--max-rejected-share", "1")
    assert json.loads(result.stdout)["kept"] == 0
    assert isinstance(result.exception, EyasError)
    assert "can be used" in str(result.exception)


def test_a_missing_file_is_an_error(folder: Path) -> None:
    assert "no such file" in str(check("a.jsonl").exception)


def test_the_table_says_what_each_rule_means(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = check(write("a.jsonl", [GOOD, LEADING, UNKNOWN, GOOD, UNKNOWN]))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "3 of 5 rows are kept, 2 are rejected"
    (line,) = [line for line in lines if line.startswith("unknown_role")]
    assert "2" in line.split()
    assert "a role that is neither system, user, assistant nor tool" in line
    assert "row 3 turn 2: 'kimi-k2'" in line
    assert any(line.startswith("leading_assistant_dropped") for line in lines)
