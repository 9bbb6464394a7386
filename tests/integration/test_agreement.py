"""Simulated chain drafting says what serving measures, on the smoke profile's own head and held-out prompts.

Needs this checkout's smoke profile trained (`make repro`); one engine start and its answers take three minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.drafting.agreement import agreement

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.03  # of the acceptance length


def test_simulation_agrees_with_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / "data" / "smoke" / "draft_head").is_dir():
        pytest.skip("the smoke profile has no trained head here; `make repro` makes it")
    monkeypatch.chdir(ROOT)
    found = agreement("smoke")
    assert found["prompts"] == 32
    assert found["served"]["length"] > 1.3  # a head that guesses nothing would agree as well
    assert abs(found["relative_difference"]) < LIMIT
