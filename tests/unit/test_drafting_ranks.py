"""Several ranks train as one: the same losses for the same global batch, and clear ends when one of them goes."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from eyas.drafting.data import TrainingData
from eyas.drafting.launching import Inputs, train
from eyas.drafting.records import Training
from eyas.errors import EyasError
from eyas.params import Machine, TrainParams
from eyas.store.reader import StoreReader
from eyas.targets.head import load_head

from .test_drafting_data import make_case, make_store

# three packs a step, so two ranks share them unequally
_PARAMS = TrainParams(
    epochs=2, lr=3e-3, tokens_per_step=192, tokens_per_pack=64, ttt_steps=3, autocast="float32", ttt_decay=0.8
)
_ROWS = 12
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these ranks meet on CPUs")


def inputs(folder: Path, params: TrainParams, sharers: int) -> Inputs:
    """Made anew in each rank, which writes the target for itself: another one may be reading its own."""
    case = make_case(folder / f"{os.getpid()}", rows=_ROWS)
    data = TrainingData(StoreReader(folder / "store"), case.rows[3:], case.rows[:3], workers=1)
    return Inputs(case.model, data, params, load_head(case.directory), 0.7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_store(folder, make_case(folder, rows=_ROWS).rows)
    return folder


def _train(
    folder: Path, work: Path, machine: Machine, params: TrainParams = _PARAMS
) -> tuple[Training, dict[str, torch.Tensor]]:
    trained, training = train(partial(inputs, folder, params), params, work, machine)
    return training, trained.model.state_dict()


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[Training, dict[str, torch.Tensor]]:
    return _train(folder, folder / "alone", Machine(train_ranks=1))


def _alike(one: tuple[Training, dict[str, torch.Tensor]], other: tuple[Training, dict[str, torch.Tensor]]) -> None:
    assert len(one[0].steps) == len(other[0].steps)
    for a, b in zip(one[0].steps, other[0].steps, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=2e-5)
        assert a.loss_by_depth == pytest.approx(b.loss_by_depth, rel=2e-5)
        assert a.accuracy_by_depth == pytest.approx(b.accuracy_by_depth, abs=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    for x, y in zip(one[0].epochs, other[0].epochs, strict=True):
        assert x.heldout_loss == pytest.approx(y.heldout_loss, rel=2e-5)
        assert x.heldout.steps == y.heldout.steps
    assert all(torch.allclose(tensor.float(), other[1][name].float(), atol=2e-4) for name, tensor in one[1].items())


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(
    sharding: str, folder: Path, alone: tuple[Training, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    _alike(alone, _train(folder, tmp_path, Machine.model_validate({"train_ranks": 2, "train_sharding": sharding})))


def test_shards_train_as_one_in_float8(folder: Path, tmp_path: Path) -> None:
    params = _PARAMS.model_copy(update={"autocast": "float8"})
    alone, _ = _train(folder, tmp_path / "alone", Machine(train_ranks=1), params)
    shards, _ = _train(folder, tmp_path / "shards", Machine(train_ranks=2, train_sharding="fsdp"), params)
    for a, b in zip(alone.steps, shards.steps, strict=True):
        # not as near as `_alike` has it: a sum that differs in its last bit may be rounded to another float8 number
        assert a.loss == pytest.approx(b.loss, rel=2e-4)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=2e-3)


def test_a_killed_rank_ends_all_and_another_number_of_ranks_goes_on(
    folder: Path, alone: tuple[Training, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    def kill() -> None:
        while not list(tmp_path.glob("*/0*")):
            time.sleep(0.01)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        second = [pid for pid in map(int, children) if _is_rank(pid)][-1]
        os.kill(second, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EyasError, match=r"rank 1 of 2 ended \(exit status -9"):
        _train(folder, tmp_path, Machine(train_ranks=2, checkpoint_steps=1))
    killer.join()
    _alike(alone, _train(folder, tmp_path, Machine(train_ranks=1)))


def _is_rank(pid: int) -> bool:
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_sigterm_reaches_all_and_ends_in_a_checkpoint(
    folder: Path, alone: tuple[Training, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    def stop() -> None:
        while not list(tmp_path.glob("*/0*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(EyasError, match="they are kept, run again to go on"):
        _train(folder, tmp_path, Machine(train_ranks=2, checkpoint_steps=1))
    stopper.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    _alike(alone, _train(folder, tmp_path, Machine(train_ranks=2)))


def test_more_ranks_than_packs_are_not_started(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = _PARAMS.model_copy(update={"tokens_per_pack": None, "epochs": 1})
    _train(folder, tmp_path, Machine(train_ranks=2), params)
    assert "1 of 2 ranks train" in capsys.readouterr().err
