"""Sources of the Hugging Face hub, loaded by `datasets`; the network is never asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from eyas.params import SourceParams
from tests.prepared import prepare, questions, turns, write


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `datasets` takes for the data set ``made/up``: it looks for a folder of that name first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "made" / "up"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("offline", [False, True])
def test_a_data_set_of_the_hub_is_read(repository: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)  # read when `datasets` was imported
    rows: list[dict[str, Any]] = [turns(("user", row["prompt"])) for row in questions(60)]
    rows[10] = turns(("bing", "Hi"))
    write(repository, "train.jsonl", rows)
    write(repository, "test.jsonl", [turns(("user", row["prompt"])) for row in questions(5, start=100)])
    made = prepare(("hub:made/up", 50))
    assert (made.metrics["kept"], made.metrics["reasons"]) == (50, {"over_cap": 9, "unknown_role": 1})
    assert {row["source"] for row in made.rows} == {"hub:made/up"}
    [rejected] = made.rejected
    assert (rejected["file"], rejected["row"], rejected["reason"]) == ("default/train", 11, "unknown_role")
    both = prepare(sources=[SourceParams(source="hub:made/up"), SourceParams(source="hub:made/up", split="test")])
    assert both.metrics["sources"] == {"hub:made/up": 64}
    assert prepare(("hub:made/up", None), benchmark_sets=[SourceParams(source="hub:made/up", split="test")]).metrics[
        "benchmark_prompts"
    ] == {"up": 5}


def test_without_the_hub_the_error_says_what_to_do(tmp_path: Path) -> None:
    script = (
        "from tests.prepared import prepare\nfrom eyas.errors import EyasError\n"
        "try:\n    prepare(('hub:some-one/chats', None))\n"
        "except EyasError as error:\n    print(error)\n"
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": f"{root}:{root / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    for part in (
        "dataset.sources.0: hub:some-one/chats (default/train) could not be loaded",
        "hf download --repo-type dataset some-one/chats",
        "data/input/chats/",
    ):
        assert part in done.stdout, json.dumps([done.stdout, done.stderr[-2000:]])
