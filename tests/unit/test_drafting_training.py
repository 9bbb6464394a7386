"""The loop learns, repeats itself, keeps the best epoch, names bad rows; the checkpoint is what vLLM reads."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from speculators.model import SpeculatorModel

from eyas.drafting.data import TrainingData
from eyas.drafting.gradients import Together
from eyas.drafting.heads import export
from eyas.drafting.heldout import Heldout
from eyas.drafting.optimizing import learning_rate, make_optimizers
from eyas.drafting.records import Training, epochs_csv, steps_csv, train_metrics
from eyas.drafting.tracking import Trackers
from eyas.drafting.training import fit
from eyas.errors import EyasError
from eyas.params import TrainParams
from eyas.targets.head import load_head

from .test_drafting_data import Case, make_case, make_store, states_of

_PARAMS = TrainParams(epochs=3, lr=3e-3, tokens_per_step=64, ttt_steps=3, autocast="float32")


def _fit(case: Case, params: TrainParams = _PARAMS, changed: Mapping[str, np.ndarray] | None = None) -> Training:
    data = TrainingData(make_store(case.folder, case.rows, changed), case.rows[1:], case.rows[:1], workers=1)
    return fit(case.model, data, params, load_head(case.directory), 0.7, case.folder / "training")


def test_learns_and_repeats_itself(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        case = make_case(tmp_path / name, rows=6)
        runs.append((_fit(case), case.model.state_dict()))
    losses = [[s.loss for s in training.steps] for training, _ in runs]
    assert losses[0] == losses[1]
    assert all(torch.equal(runs[0][1][n], runs[1][1][n]) for n in runs[0][1])
    epochs = runs[0][0].epochs
    assert epochs[-1].train_loss < epochs[0].train_loss
    assert runs[0][0].tokens_per_s > 0
    assert all(0 < step.waiting_share < 1 for step in runs[0][0].steps)
    assert 0 < train_metrics(runs[0][0])["waiting_share"] < 1


def test_frozen_weights_stay(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=4)
    frozen = {n: p.clone() for n, p in case.model.named_parameters() if not p.requires_grad}
    assert set(frozen) == {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    _fit(case)
    assert all(torch.equal(p, dict(case.model.named_parameters())[n].cpu()) for n, p in frozen.items())


def test_best_epoch_is_kept_by_acceptance_not_by_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.drafting.acceptance import Acceptance

    case = make_case(tmp_path, rows=4)
    figures = iter([(3.0, 1.2), (2.0, 1.6), (1.0, 1.4)])
    states = []

    def evaluate(_self: object, head: Together, _stop: object) -> tuple[float, Acceptance]:
        states.append({n: p.detach().clone() for n, p in head.model.named_parameters()})
        loss, length = next(figures)
        return loss, Acceptance([length - 1], length, length, length, 1)

    monkeypatch.setattr(Heldout, "evaluate", evaluate)
    training = _fit(case)
    assert training.best.epoch == 2
    assert all(torch.equal(p, states[1][n]) for n, p in case.model.named_parameters())


def test_a_bad_batch_names_its_rows_and_changes_nothing(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=3)
    key = case.rows[1].key
    bits = states_of(case.rows[1]).copy()
    bits[2, 0, 0] = 0x7FC0  # NaN
    with pytest.raises(EyasError, match=case.rows[1].conversation_id):
        _fit(case, changed={key: bits})
    assert all(p.isfinite().all() for p in case.model.parameters())


def test_a_bad_step_is_left_out_where_that_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = make_case(tmp_path, rows=6)
    bits = states_of(case.rows[1]).copy()
    bits[2, 0, 0] = 0x7FC0  # NaN
    params = _PARAMS.model_copy(update={"on_nan": "skip"})
    training = _fit(case, params, changed={case.rows[1].key: bits})
    left_out = [step for step in training.steps if step.loss is None]
    assert [step.epoch for step in left_out] == [1, 2, 3]
    assert all(p.isfinite().all() for p in case.model.parameters())
    assert training.epochs[-1].train_loss < training.epochs[0].train_loss
    assert case.rows[1].conversation_id in capsys.readouterr().err
    assert train_metrics(training)["skipped_steps"] == 3
    lines = list(csv.DictReader(io.StringIO(steps_csv(training))))
    assert len(lines) == len(training.steps) - 3
    assert all(line["loss_3"] for line in lines)


def test_too_many_bad_steps_in_a_row_end_it(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=6)
    changed = {}
    for row in case.rows[1:]:
        changed[row.key] = states_of(row).copy()
        changed[row.key][2, 0, 0] = 0x7FC0
    params = _PARAMS.model_copy(update={"on_nan": "skip", "max_skipped": 1})
    with pytest.raises(EyasError, match="2 steps in a row are not finite"):
        _fit(case, params, changed=changed)


def test_patience_ends_a_training_that_gets_no_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.drafting.acceptance import Acceptance

    case = make_case(tmp_path, rows=4)
    lengths = iter([1.6, 1.4, 1.7])
    monkeypatch.setattr(
        Heldout, "evaluate", lambda *_: (1.0, Acceptance([0.5], length := next(lengths), length, length, 1))
    )
    training = _fit(case, _PARAMS.model_copy(update={"patience": 1}))
    assert [epoch.epoch for epoch in training.epochs] == [1, 2]
    assert training.best.epoch == 1


def test_muon_takes_the_matrices_and_learns(tmp_path: Path) -> None:
    params = _PARAMS.model_copy(update={"optimizer": "muon"})
    case = make_case(tmp_path, rows=6)
    own = {name: weight for name, weight in case.model.named_parameters() if weight.requires_grad}
    muon, adamw = make_optimizers(own, params)
    assert isinstance(muon, torch.optim.Muon)
    assert all(weight.ndim == 2 for group in muon.param_groups for weight in group["params"])
    assert all(weight.ndim == 1 for group in adamw.param_groups for weight in group["params"])
    training = _fit(case, params)
    assert training.epochs[-1].train_loss < training.epochs[0].train_loss


@pytest.mark.parametrize("name", ["dvclive", "tensorboard", "wandb"])
def test_a_tracker_without_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    with pytest.raises(EyasError, match=f"track: {name}: the package is missing"):
        Trackers([name], tmp_path, 0)


def test_series_have_the_loss_of_each_depth(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=4)
    training = _fit(case, _PARAMS.model_copy(update={"ttt_decay": 0.5, "epochs": 1}))
    lines = list(csv.DictReader(io.StringIO(steps_csv(training))))
    assert len(lines) == len(training.steps) == train_metrics(training)["steps"]
    assert [name for name in lines[0] if name.startswith("loss_")] == ["loss_1", "loss_2", "loss_3"]
    for line in lines:
        weighted = sum(0.5**depth * float(line[f"loss_{depth + 1}"]) for depth in range(3))
        assert float(line["loss"]) == pytest.approx(weighted, rel=1e-4)
    assert [line["epoch"] for line in csv.DictReader(io.StringIO(epochs_csv(training.epochs)))] == ["1"]


def test_bfloat16_autocast_keeps_master_weights(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=4)
    training = _fit(case, _PARAMS.model_copy(update={"autocast": "bfloat16"}))
    assert all(p.dtype == torch.float32 for p in case.model.parameters())
    assert all(math.isfinite(s.loss) for s in training.steps)


def test_learning_rate_warms_up_and_ends_at_zero() -> None:
    params = _PARAMS.model_copy(update={"lr": 1.0, "warmup_share": 0.1})
    rates = [learning_rate(s, 100, params) for s in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == 1.0 == rates[10]
    assert all(np.diff(rates[10:]) < 0)
    assert rates[-1] < 0.001


def test_schedules_fall_as_they_are_called() -> None:
    rates = {
        name: [
            learning_rate(s, 100, _PARAMS.model_copy(update={"lr": 1.0, "warmup_share": 0.1, "schedule": name}))
            for s in range(100)
        ]
        for name in ("linear", "wsd")
    }
    assert rates["linear"][10] == pytest.approx(1.0)
    assert rates["linear"][55] == pytest.approx(0.5)
    assert rates["wsd"][10] == rates["wsd"][80] == 1.0
    assert rates["wsd"][90] == pytest.approx(0.5)
    assert all(np.diff(rates["wsd"][80:]) < 0)


def test_export_is_deterministic_and_names_no_path(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=2)
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        export(case.model, tmp_path / name)
        written.append({f.name: f.read_bytes() for f in sorted((tmp_path / name).iterdir())})
    assert written[0] == written[1]
    config = json.loads(written[0]["config.json"])
    assert str(tmp_path) not in written[0]["config.json"].decode()
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["norm_output"] and config["norm_before_fc"] and config["norm_before_residual"]
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10000.0
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    assert not any(name.startswith("verifier") for name in tensors)
    for name, tensor in case.model.state_dict().items():
        if name in tensors:
            assert torch.equal(tensors[name].to(tensor.dtype), tensor), name


def test_speculators_reads_the_checkpoint(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=2)
    directory = tmp_path / "head"
    directory.mkdir()
    export(case.model, directory)
    config = json.loads((directory / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(case.directory)
    (directory / "config.json").write_text(json.dumps(config))
    loaded = SpeculatorModel.from_pretrained(directory, torch_dtype=torch.float32)
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].to(tensor.dtype), tensor), name


def test_vllm_reads_the_config(tmp_path: Path) -> None:
    from vllm.transformers_utils.configs.speculators import base as speculators

    case = make_case(tmp_path, rows=2)
    directory = tmp_path / "head"
    directory.mkdir()
    export(case.model, directory)
    config = speculators.SpeculatorsConfig.from_pretrained(str(directory))
    assert config.architectures == ["Eagle3LlamaForCausalLM"]
    assert config.norm_output and config.norm_before_fc and config.norm_before_residual
    assert config.draft_vocab_size == 128 and config.vocab_size == 512 and config.head_dim == 16
