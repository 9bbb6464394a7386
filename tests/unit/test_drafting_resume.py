"""Stopped, killed or damaged, training goes on and ends in the bytes of an uninterrupted run."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.console import Progress
from eyas.drafting import training as training_module
from eyas.drafting.checkpoints import Checkpoints, load_checkpoint
from eyas.drafting.data import TrainingData
from eyas.drafting.heads import export
from eyas.drafting.records import Training
from eyas.drafting.training import fit
from eyas.errors import EyasError
from eyas.params import Machine, TrainParams
from eyas.store.batches import PackedBatches
from eyas.store.reader import StoreReader
from eyas.targets.head import load_head

from .test_drafting_data import make_case, make_store

# two epochs of ten steps
_PARAMS = TrainParams(epochs=2, lr=3e-3, tokens_per_step=64, ttt_steps=3, autocast="bfloat16")
_ROWS = 12


@dataclass(frozen=True)
class _Result:
    training: Training
    files: dict[str, bytes]  # of the exported head

    @property
    def steps(self) -> list[tuple[float | list[float], ...]]:
        """What is the same each time."""
        return [(s.step, s.epoch, s.loss, s.lr, s.grad_norm, s.loss_by_depth) for s in self.training.steps]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        times = ("tokens_per_s", "waiting_share", "mfu", "memory_mib")
        return [{name: value for name, value in vars(e).items() if name not in times} for e in self.training.epochs]


def _train(folder: Path, work: Path, params: TrainParams = _PARAMS, machine: Machine | None = None) -> _Result:
    """A head made anew and trained on the store in ``folder``."""
    case = make_case(folder, rows=_ROWS)
    data = TrainingData(StoreReader(folder / "store"), case.rows[1:], case.rows[:1], workers=1)
    training = fit(case.model, data, params, load_head(case.directory), 0.7, work, machine or Machine())
    with tempfile.TemporaryDirectory() as name:
        export(case.model, Path(name))
        return _Result(training, {file.name: file.read_bytes() for file in Path(name).iterdir()})


def _plans(folder: Path) -> list[PackedBatches]:
    keys = [row.key for row in make_case(folder, rows=_ROWS).rows[1:]]
    return [PackedBatches(StoreReader(folder / "store"), keys, 64, 0, epoch) for epoch in range(2)]


def _same(one: _Result, other: _Result) -> bool:
    assert one.steps == other.steps
    assert one.epochs == other.epochs
    assert one.training.best.epoch == other.training.best.epoch
    return one.files == other.files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and store."""
    folder = tmp_path_factory.mktemp("resume")
    make_store(folder, make_case(folder, rows=_ROWS).rows)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> _Result:
    """The uninterrupted run."""
    result = _train(folder, folder / "whole")
    assert [step.step for step in result.training.steps] == list(range(1, 21))
    return result


@pytest.fixture
def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Trains until SIGTERM comes in the ``steps``-th step of this part; gives the message."""

    def train(work: Path, steps: int, params: TrainParams = _PARAMS) -> str:
        class Terminated(Progress):
            def advance(self, count: int = 1) -> None:
                super().advance(count)
                if self.description == "training" and self.done == steps:
                    os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch, pytest.raises(EyasError) as raised:
            patch.setattr(training_module, "Progress", Terminated)
            _train(folder, work, params)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return str(raised.value)

    return train


def test_ten_resume_ten_is_twenty(
    folder: Path, whole: _Result, stopped: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert "SIGTERM after 10 of 20 steps" in stopped(tmp_path, 10)
    time.sleep(1)
    resumed = _train(folder, tmp_path)
    passed = time.monotonic() - began
    assert "10 of 20 steps; training goes on" in capsys.readouterr().err
    assert _same(resumed, whole)
    training = resumed.training
    slots = [batch.tokens - len(batch.keys) for plan in _plans(folder) for batch in plan]
    in_steps = sum(count / step.tokens_per_s for count, step in zip(slots, training.steps, strict=True))
    assert training.tokens_per_s == pytest.approx(sum(slots) / in_steps)
    assert in_steps < training.seconds < passed - 1  # of both parts, without the pause between
    again = _train(folder, tmp_path)  # as after a kill behind the last step
    assert again.training.steps == training.steps
    assert _same(again, whole)


def test_a_stop_changes_nothing_in_float8(folder: Path, stopped: Callable[..., str], tmp_path: Path) -> None:
    params = _PARAMS.model_copy(update={"autocast": "float8"})
    whole = _train(folder, tmp_path / "whole", params)
    stopped(tmp_path / "parts", 10, params)
    assert _same(_train(folder, tmp_path / "parts", params), whole)


def test_a_damaged_checkpoint_is_passed_over(
    folder: Path, whole: _Result, stopped: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path, 13)
    older, newest = sorted(next(tmp_path.iterdir()).iterdir())
    assert (older.name, newest.name) == ("00001-epochs-000000010-steps", "00001-epochs-000000013-steps")
    _flip_bit(newest / "tensors.safetensors")
    capsys.readouterr()
    resumed = _train(folder, tmp_path)
    printed = " ".join(capsys.readouterr().err.split())
    assert "damaged" in printed and "tensors.safetensors" in printed
    assert "10 of 20 steps; training goes on" in printed
    assert _same(resumed, whole)


def test_other_parameters_start_afresh(
    stopped: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path, 3)
    (first,) = tmp_path.iterdir()
    assert "have changed" not in capsys.readouterr().err
    message = stopped(tmp_path, 2, _PARAMS.model_copy(update={"lr": 1e-3}))
    assert "after 2 of 20 steps" in message
    assert "have changed" in capsys.readouterr().err
    (second,) = tmp_path.iterdir()
    assert second != first
    assert [path.name for path in second.iterdir()] == ["00000-epochs-000000002-steps"]


def _child(folder: Path, work: Path) -> None:
    """Trains in a process group of its own, with a checkpoint after each step; exit status 3 where asked to stop."""
    os.setpgrp()
    try:
        _train(folder, work, machine=Machine(checkpoint_steps=1))
    except EyasError as error:
        os._exit(3 if "SIGTERM after" in str(error) else 1)


def test_kills_at_random_moments_end_in_the_same_bytes(folder: Path, whole: _Result, tmp_path: Path) -> None:
    # one that has CUDA cannot be forked; without it the imports are made once for all children
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload([__name__])
    source = random.Random(0)
    todo = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL]
    while todo:
        before = set(tmp_path.glob("*/0*"))
        child = context.Process(target=_child, args=(folder, tmp_path))
        child.start()
        assert child.pid is not None
        while child.is_alive() and not set(tmp_path.glob("*/0*")) - before:
            time.sleep(0.01)
        time.sleep(source.uniform(0, 0.2))
        with suppress(ProcessLookupError):
            os.killpg(child.pid, todo[0])  # the processes that read the store as well, as schedulers do
        child.join()
        if child.exitcode == 0:  # too late: begin again
            shutil.rmtree(tmp_path)
        else:
            assert child.exitcode == (3 if todo.pop(0) == signal.SIGTERM else -signal.SIGKILL)
    resumed = _train(folder, tmp_path)
    assert _same(resumed, whole)
    (scratch,) = tmp_path.iterdir()
    assert len(list(scratch.iterdir())) == 2  # nothing half written, none too many


def _flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "checksums.json"])
@pytest.mark.parametrize("damage", [_flip_bit, _truncate, Path.unlink])
def test_damage_is_found(file: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "identity")
    for number in range(3):
        checkpoints.save(f"{number}", {"x": torch.full((100,), number)}, {"loss": 0.1 * number, "number": number})
    assert sorted(path.name for path in (tmp_path / "identity").iterdir()) == ["1", "2"]
    damage(tmp_path / "identity" / "2" / file)
    found = Checkpoints(tmp_path, "identity").newest()
    assert found is not None
    tensors, state = load_checkpoint(found)
    assert tensors["x"].tolist() == [1] * 100
    assert state == {"loss": 0.1, "number": 1}
    assert [path.name for path in (tmp_path / "identity").iterdir()] == ["1"]


def test_a_half_written_checkpoint_is_removed(tmp_path: Path) -> None:
    (tmp_path / "identity" / ".1.0123abcd.tmp").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, "identity")
    assert checkpoints.newest() is None
    assert not list((tmp_path / "identity").iterdir())
