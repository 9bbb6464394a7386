"""What README and docs/ name is there: make targets, eyas commands, files that they link to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from eyas.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def code(page: Path) -> list[str]:
    """Code of a page: spans between backticks, and indented or fenced lines."""
    text = page.read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]+)`", text)
    return spans + [line.strip() for line in text.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {m for text in code(page) for m in re.findall(r"(?:^|&& )make ([a-z-]+)", text)}
    assert named <= targets, named - targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_eyas_commands_exist(page: Path) -> None:
    group = typer.main.get_command(app)
    for text in code(page):
        words = text.split()
        if len(words) > 1 and words[0] == "eyas":
            command = group
            for word in words[1:]:
                if not hasattr(command, "commands") or word.startswith("-"):
                    break
                assert word.rstrip(",") in command.commands, text
                command = command.commands[word.rstrip(",")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link
