"""The one check of metrics: keys that stages always write, and plot series."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eyas.errors import EyasError
from eyas.metrics import KEYS, SERIES, STAGES, check_metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """The committed metrics of the smoke profile."""
    shutil.copytree(ROOT / "metrics" / "smoke", tmp_path / "smoke")
    return tmp_path


def test_the_committed_metrics_are_sound_and_all_are_looked_at(metrics: Path) -> None:
    assert set(KEYS) == set(STAGES)
    assert len(check_metrics("smoke", metrics)) == len(STAGES) + len(SERIES)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("position,ngram,eagle3\n1,0.5,nan\n", "line 2: eagle3 is nan"),
        ("position,ngram,eagle3\n1,0.5,-inf\n", "line 2: eagle3 is -inf"),
        ("position,ngram,eagle3\n1,0.5,0.5\n2,0.5\n", "line 3: 2 cells where the header has 3"),
        ("position,ngram,eagle3\n1,0.5,\n", "line 2: eagle3 is '', not a number"),
        ("position,ngram,eagle3\n1,0.5,high\n", "line 2: eagle3 is 'high', not a number"),
        ("position,ngram\n1,0.5\n", "no column eagle3"),
        ("position,ngram,eagle3\n", "no rows"),
        ("position,ngram,eagle3\n1,½,0.5\n", "is not ASCII"),
    ],
)
def test_a_series_that_plots_would_misread(metrics: Path, rows: str, said: str) -> None:
    (metrics / "smoke" / "acceptance.csv").write_text(rows)
    with pytest.raises(EyasError, match=r"acceptance\.csv") as raised:
        check_metrics("smoke", metrics)
    assert said in str(raised.value)


def test_a_series_nobody_told_of_is_checked_too(metrics: Path) -> None:
    (metrics / "smoke" / "speed.csv").write_text("set,rate\ngsm8k,1\nmt-bench,nan\n")
    with pytest.raises(EyasError, match=r"speed\.csv, line 3: rate is nan"):
        check_metrics("smoke", metrics)


def test_missing_series_and_keys_are_named_together(metrics: Path) -> None:
    (metrics / "smoke" / "train_steps.csv").unlink()
    benchmark = json.loads((metrics / "smoke" / "benchmark.json").read_text())
    del benchmark["eagle3"]["speedup"]
    (metrics / "smoke" / "benchmark.json").write_text(json.dumps(benchmark))
    with pytest.raises(EyasError) as raised:
        check_metrics("smoke", metrics)
    assert "train_steps.csv: missing; `dvc repro train@smoke`" in str(raised.value)
    assert "benchmark.json: eagle3.speedup missing" in str(raised.value)
