"""`make repro` and `make pull` on a second machine, through the commands that the Makefile runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.moving_checkout import PROFILE, TinyCheckout


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckout:
    """A machine that ran twice, with other parameters in between, and pushed both."""
    top = tmp_path_factory.mktemp("first")
    made = TinyCheckout(top / "eyas")
    for layers in ([1, 2, 3], [1, 2]):
        made.set_params(["one"], extract=PROFILE["extract"] | {"layers": layers})
        result = made.moving("repro", "one")
        assert result.returncode == 0, result.stderr
        assert "Running stage 'extract@one'" in result.stdout
    made.commit("built")
    assert made.moving("set", str(top / "remote")).returncode == 0
    pushed = made.moving("push", "one", "--runs")
    assert pushed.returncode == 0, pushed.stderr
    return made


@pytest.fixture
def second(first: TinyCheckout, tmp_path: Path) -> TinyCheckout:
    made = TinyCheckout.clone(first, tmp_path / "eyas")
    shutil.copy(first.folder / ".dvc/config.local", made.folder / ".dvc/config.local")
    return made


def test_a_fresh_clone_runs_nothing_and_leaves_the_outputs_where_they_are(second: TinyCheckout) -> None:
    result = second.moving("repro", "one")
    assert result.returncode == 0, result.stderr
    assert "Running stage" not in result.stdout
    assert "nothing to run" in result.stderr
    assert "outputs that are not here: 2" in result.stderr
    assert not second.objects.exists()


def test_pull_brings_the_outputs_and_never_overwrites_what_is_in_no_cache(second: TinyCheckout) -> None:
    assert second.moving("pull", "one").returncode == 0
    report = second.folder / "data/one/report"
    assert report.is_file()
    assert len(list((second.folder / "data/one/hidden_states").iterdir())) == 3
    report.unlink()
    report.write_text("my own\n")
    result = second.moving("pull", "one")
    assert result.returncode == 1
    assert "in no cache" in " ".join(result.stderr.split())
    assert report.read_text() == "my own\n"


def test_an_earlier_run_is_restored_not_computed(second: TinyCheckout) -> None:
    second.set_params(["one"], extract=PROFILE["extract"] | {"layers": [1, 2, 3]})
    result = second.moving("repro", "one")
    assert result.returncode == 0, result.stderr
    assert "Stage 'extract@one' is cached" in result.stdout
    assert "Running stage" not in result.stdout


def test_a_new_extraction_has_the_earlier_shards_at_hand(second: TinyCheckout) -> None:
    (second.folder / "data/input/d.h5").write_bytes(b"d" * 1000)
    result = second.moving("repro", "one")
    assert result.returncode == 0, result.stderr
    assert "Running stage 'extract@one'" in result.stdout
    assert "fetch" not in result.stderr  # a moment's work, so no progress line
    lists = [f for f in second.objects.rglob("*.dir") if b"a.h5" in f.read_bytes()]
    assert len(lists) == 2  # the store before, for the stage to reuse, and the one after


def test_an_output_that_was_deleted_comes_back_without_a_remote(first: TinyCheckout, tmp_path: Path) -> None:
    copy = TinyCheckout.__new__(TinyCheckout)
    copy.folder = tmp_path / "eyas"
    shutil.copytree(first.folder, copy.folder, symlinks=True)
    (copy.folder / ".dvc/config.local").unlink()
    (copy.folder / "data/one/report").unlink()
    result = copy.moving("repro", "one")
    assert result.returncode == 0, result.stderr
    assert "Running stage" not in result.stdout
    assert (copy.folder / "data/one/report").is_file()


def test_a_remote_that_does_not_answer_stops_only_what_would_run(first: TinyCheckout, second: TinyCheckout) -> None:
    config = second.folder / ".dvc/config.local"
    config.write_text(config.read_text().replace(str(first.folder.parent / "remote"), "ssh://127.0.0.1:1/eyas"))
    assert second.moving("repro", "one").returncode == 0
    second.set_params(["one"], extract=PROFILE["extract"] | {"layers": [1, 2, 3, 4]})
    result = second.moving("repro", "one")
    assert result.returncode == 1
    assert "ssh://127.0.0.1:1/eyas" in result.stderr
    assert "Running stage" not in result.stdout


def test_a_failing_stage_is_an_error(first: TinyCheckout, tmp_path: Path) -> None:
    copy = TinyCheckout.clone(first, tmp_path / "eyas")
    pipeline = copy.folder / "dvc.yaml"
    pipeline.write_text(pipeline.read_text().replace("cat data", "false && cat data"))
    shutil.copytree(first.folder / "data/one", copy.folder / "data/one")
    result = copy.moving("repro", "one")
    assert result.returncode == 1
    assert "failed with status" in result.stderr
