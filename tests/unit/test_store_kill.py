"""Kill -9 and more at random moments: `benchmarks/store/kills.py`, with a few kills."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "store"


def test_killed_extractions_end_in_the_bytes_of_uninterrupted_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    kills = importlib.import_module("kills")
    tally = kills.kill_loop(tmp_path, kills=8, seed=1)
    sys.modules.pop("kills")
    assert tally.violations == []
    assert tally.kills.total() == 8
    assert len({phase for phase, _ in tally.kills}) >= 3
    assert tally.completed >= 1
    assert tally.rows_checked > 60
