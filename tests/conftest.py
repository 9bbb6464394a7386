"""What all tests share: the tiny target, made once, and no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("eyas", deadline=None, derandomize=True, database=None)
settings.load_profile("eyas")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in Hugging Face layout; read it only."""
    from tests.tiny import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")
