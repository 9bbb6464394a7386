"""What watches a training: real DVCLive series, through a stop and a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.drafting import training as training_module
from eyas.drafting.data import TrainingData
from eyas.drafting.records import Training
from eyas.drafting.tracking import Trackers
from eyas.drafting.training import fit
from eyas.params import Machine, TrainParams
from eyas.store.reader import StoreReader
from eyas.targets.head import load_head

from .test_drafting_data import make_case, make_store

# two epochs of two steps
_PARAMS = TrainParams(epochs=2, lr=3e-3, tokens_per_step=64, ttt_steps=2, autocast="float32")
_ROWS = 4


def _train(folder: Path) -> Training:
    """Trains with a checkpoint every second step, and DVCLive in ``folder/work/live``."""
    case = make_case(folder, rows=_ROWS)
    data = TrainingData(StoreReader(folder / "store"), case.rows[1:], case.rows[:1], workers=1)
    machine = Machine(track=["dvclive"], checkpoint_steps=2)
    return fit(case.model, data, _PARAMS, load_head(case.directory), 0.7, folder / "work" / "train", machine)


def _series(folder: Path, name: str) -> tuple[list[int], list[str]]:
    header, *lines = (folder / "plots" / "metrics" / f"{name}.tsv").read_text().splitlines()
    assert header.split("\t") == ["step", Path(name).name]
    return [int(line.split("\t")[0]) for line in lines], [line.split("\t")[1] for line in lines]


@pytest.mark.parametrize("last", [("step", 3), ("epoch", 1)])
def test_series_of_a_killed_training_have_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: tuple[str, int]
) -> None:
    class Killed(BaseException):
        """Nothing catches it, as nothing catches a kill."""

    class Dies(Trackers):
        def log(self, prefix: str, step: int, row: Any) -> None:
            super().log(prefix, step, row)
            if (prefix, step) == last:
                raise Killed

    make_store(tmp_path, make_case(tmp_path, rows=_ROWS).rows)
    live = tmp_path / "work" / "live" / "dvclive"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training_module, "Trackers", Dies)
        _train(tmp_path)
    assert _series(live, f"{last[0]}s/grad_norm")[0][-1] == last[1]
    training = _train(tmp_path)  # from the checkpoint behind the second step: the last row comes once more
    steps, losses = _series(live, "steps/loss")
    assert steps == [step.step for step in training.steps] == [1, 2, 3, 4]
    assert [float(loss) for loss in losses] == [step.loss for step in training.steps]
    epochs, lengths = _series(live, "epochs/heldout_acceptance_length")
    assert epochs == [1, 2]
    assert [float(length) for length in lengths] == [epoch.heldout.length for epoch in training.epochs]
    latest = json.loads((live / "metrics.json").read_text())
    assert latest["steps"]["loss"] == training.steps[-1].loss
    assert latest["epochs"]["train_loss"] == training.epochs[-1].train_loss


def test_files_that_a_kill_left_half_written_do_no_harm(tmp_path: Path) -> None:
    def log(steps: range) -> None:
        with Trackers(["dvclive"], tmp_path, steps[0] - 1) as trackers:
            for step in steps:
                trackers.log("step", step, {"step": step, "loss": step / 2, "mfu": None})

    log(range(1, 5))
    live = tmp_path / "dvclive"
    (live / "metrics.json").write_text('{"steps": {"lo')
    with (live / "plots" / "metrics" / "steps" / "loss.tsv").open("a") as stream:
        stream.write("5\t2.")
    log(range(4, 7))
    assert _series(live, "steps/loss") == ([1, 2, 3, 4, 5, 6], ["0.5", "1.0", "1.5", "2.0", "2.5", "3.0"])
    assert not (live / "plots" / "metrics" / "steps" / "mfu.tsv").exists()
    log(range(1, 3))  # a training that starts afresh
    assert _series(live, "steps/loss") == ([1, 2], ["0.5", "1.0"])


def test_dvc_plots_draws_the_series(tmp_path: Path) -> None:
    live = Path(".work", "smoke", "live")
    with Trackers(["dvclive"], tmp_path / live, 0) as trackers:
        for step in (1, 2):
            trackers.log("step", step, {"loss": step / 4})
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".dvcignore").write_text(".work\n")  # as this project has it: DVC reads one file there, and no folder
    series = live / "dvclive" / "plots" / "metrics" / "steps" / "loss.tsv"
    command = [sys.executable, "-m", "dvc", "plots", "show", str(series), "-o", "page"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert '"loss": "0.5"' in (tmp_path / "page" / "index.html").read_text()


def test_no_tracker_is_imported_unasked() -> None:
    code = "import sys, eyas.drafting.tracking; print([m for m in ('dvclive', 'wandb', 'tensorboard') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
