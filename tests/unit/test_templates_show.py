"""`eyas mask show`: the tokens and their mask, in colour and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.errors import EyasError
from eyas.templates.cli import app
from tests.templates.doubles import make_double

ROWS = [
    {"messages": [{"role": "user", "content": "Hi é日本🙂"}, {"role": "assistant", "content": "Hello <|im_end|> 🙂"}]},
    {"messages": []},
    {"prompt": "Nobody answers this."},
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "Bye"},
            {"role": "assistant", "content": "See you."},
        ]
    },
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def show(*arguments: str | Path) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["show", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_json(file: Path, tiny_target: Path) -> None:
    output, _ = show(file, "--target", tiny_target, "--json")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["row"] for row in rows] == [1, 4]
    for row in rows:
        assert set(row) == {"row", "input_ids", "loss_mask", "tokens"}
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["tokens"])
        assert set(row["loss_mask"]) == {0, 1}
    supervised = [
        "".join(text for text, inside in zip(row["tokens"], row["loss_mask"], strict=True) if inside) for row in rows
    ]
    assert supervised == ["Hello <|im_end|> 🙂<|im_end|>", "Hello!<|im_end|>See you.<|im_end|>"]
    assert "".join(rows[0]["tokens"]).startswith("<|im_start|>user\nHi é日本🙂<|im_end|>\n")


def test_rows_of_one_conversation_have_one_number(file: Path, tiny_target: Path, tmp_path: Path) -> None:
    make_double(tmp_path / "qwen3", "qwen3", tiny_target)
    output, _ = show(file, "--target", tmp_path / "qwen3", "--json", "--variable", "enable_thinking=false")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["row"] for row in rows] == [1, 4, 4]
    assert "</think>" not in [t for t, inside in zip(rows[0]["tokens"], rows[0]["loss_mask"], strict=True) if inside]


def test_limit(file: Path, tiny_target: Path) -> None:
    output, _ = show(file, "--target", tiny_target, "--json", "--limit", "1")
    assert len(output.splitlines()) == 1


def test_colours(file: Path, tiny_target: Path) -> None:
    output, _ = show(file, "--target", tiny_target)
    assert "row 1, 1 of 1: " in output
    assert " tokens supervised" in output
    assert "<|im_start|>user\nBye<|im_end|>" in output


def test_faults_are_named(file: Path, tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="no such file"):
        show(tmp_path / "absent.jsonl", "--target", tiny_target)
    with pytest.raises(EyasError, match="no such directory"):
        show(file, "--target", tmp_path / "absent")
    with pytest.raises(EyasError, match="expected NAME=VALUE"):
        show(file, "--target", tiny_target, "--variable", "enable_thinking")
    file.write_text('{"messages": []}\n')
    with pytest.raises(EyasError, match="no row has an answer"):
        show(file, "--target", tiny_target)
