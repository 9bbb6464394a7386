"""What all tests share: the tiny target, made once, and no network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("eyas", deadline=None, derandomize=True, database=None)
settings.load_profile("eyas")
_PRELOADED = os.environ.get("LD_PRELOAD")


@pytest.fixture(autouse=True)
def _preload_nothing_more() -> Iterator[None]:
    """vLLM's import has all later processes load torch's libraries; tests that ask what a process loads want none of that."""
    os.environ.pop("LD_PRELOAD", None)
    if _PRELOADED is not None:
        os.environ["LD_PRELOAD"] = _PRELOADED
    yield


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in Hugging Face layout; read it only."""
    from tests.tiny import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``data/input`` of a checkout that is otherwise empty, and is the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "input"
    folder.mkdir(parents=True)
    return folder
