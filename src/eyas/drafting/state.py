"""What a training has come to: weights, optimiser, records, times; taken to a checkpoint and back without loss.

`TrainingState` wraps a head while it is trained; `training_identity` says which checkpoints belong to a training.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eyas.drafting.acceptance import Acceptance
from eyas.drafting.data import TokenRow
from eyas.drafting.gradients import full, like
from eyas.drafting.optimizing import make_optimizers
from eyas.drafting.records import EpochRecord, StepRecord
from eyas.files import file_sha256, value_hash
from eyas.params import TrainParams
from eyas.store.batches import PackedBatches

_OTHERS = ("weights", "best", "random")  # what is not a moment in a checkpoint
_PACKAGES = ("speculators", "torch")


def training_identity(
    model: Eagle3DraftModel,
    rows: Sequence[TokenRow],
    plans: Sequence[PackedBatches],
    params: TrainParams,
    temperature: float,
    device: torch.device,
) -> str:
    """Hash over everything that decides a training's bytes, 32 hex digits.

    The target is part of it through the rows' keys, which hold the store's fingerprint.

    Args:
        model: before training; its configuration, trainable weights and draft vocabulary count.
        rows: of both splits, in order.
        plans: of the epochs.
        params: of the optimisation.
        temperature: that sampled rows were answered with.
        device: only its kind counts.
    """
    data = hashlib.sha256()
    for row in rows:
        data.update(f"{row.conversation_id}/{row.key}/".encode() + np.packbits(row.loss_mask).tobytes())
    for plan in plans:
        for batch in plan:
            data.update("/".join(batch.keys).encode() + b"\n")
    weights = hashlib.sha256()
    # what is frozen is the target's, and gigabytes of it
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    for name, tensor in sorted((name, tensor) for name, tensor in model.state_dict().items() if name not in frozen):
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        weights.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    parts = {
        # a checkpoint of older code would make a head that no code makes
        "code": {path.name: file_sha256(path) for path in Path(__file__).parent.glob("*.py")},
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "config": model.config.to_json_string(),
        "weights": weights.hexdigest(),
        "data": data.hexdigest(),
        "params": params.model_dump(mode="json"),
        "temperature": temperature,
        "device": device.type,
    }
    return value_hash(parts)[:32]


class TrainingState:
    """A head in training and all that its next step depends on."""

    def __init__(self, model: Eagle3DraftModel, params: TrainParams) -> None:
        """Begin; the model is on its device already."""
        self.model = model
        self.steps: list[StepRecord] = []
        self.epochs: list[EpochRecord] = []
        self.best_weights: dict[str, torch.Tensor] = {}
        self.step_seconds = self.waited_seconds = 0.0
        self._began = time.monotonic()
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._params = params
        self.optimizers = make_optimizers(self._weights, params)
        torch.manual_seed(params.seed)

    @property
    def epoch(self) -> int:
        """The epoch under way, from 1."""
        return len(self.epochs) + 1

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """Those that are trained."""
        return list(self._weights.values())

    @property
    def finished(self) -> bool:
        """Whether no epoch is to come: all are done, or none was better for `patience` of them."""
        patience = self._params.patience
        stale = bool(self.epochs) and patience is not None and self.epochs[-1].epoch - self.best.epoch >= patience
        return stale or self.epoch > self._params.epochs

    @property
    def position(self) -> int:
        """Steps done of the epoch under way."""
        return sum(record.epoch == self.epoch for record in self.steps)

    @property
    def losses(self) -> list[float]:
        """Of the steps of the epoch under way that changed the weights."""
        return [record.loss for record in self.steps if record.epoch == self.epoch and record.loss is not None]

    @property
    def skipped_in_row(self) -> int:
        """Steps at the end that were left out."""
        return sum(1 for _ in takewhile(lambda record: record.loss is None, reversed(self.steps)))

    @property
    def best(self) -> EpochRecord:
        """The epoch of the greatest held-out acceptance length; the first of several."""
        return max(self.epochs, key=lambda record: record.heldout.length)

    @property
    def seconds(self) -> float:
        """Since the training began, without what was lost in kills."""
        return time.monotonic() - self._began

    @property
    def name(self) -> str:
        """Of a checkpoint; sorts as the training goes on."""
        return f"{len(self.epochs):05d}-epochs-{len(self.steps):09d}-steps"

    def end_epoch(self, record: EpochRecord) -> None:
        """Take down a judged epoch, and keep the weights where it is the best so far."""
        self.epochs.append(record)
        if self.best is record:
            self.best_weights = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments in float32, the best epoch's weights, states of the random generators; whole, so all ranks ask."""
        named = {f"weights/{name}": full(weight.detach()) for name, weight in self._weights.items()}
        named |= {f"best/{name}": full(weight) for name, weight in self.best_weights.items()}
        for name, weight in self._weights.items():
            for optimizer in self.optimizers:
                named |= {f"{key}/{name}": full(value) for key, value in optimizer.state.get(weight, {}).items()}
        named["random/cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            named["random/cuda"] = torch.cuda.get_rng_state(self._device)
        return named

    def records(self) -> dict[str, Any]:
        """The rest, JSON-able."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "steps": [vars(record) for record in self.steps],
            "epochs": [vars(record) | {"heldout": vars(record.heldout)} for record in self.epochs],
            "step_seconds": self.step_seconds,
            "waited_seconds": self.waited_seconds,
            "seconds": self.seconds,
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], records: Mapping[str, Any]) -> None:
        """Go back to what `tensors` and `records` gave, bit for bit."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(like(tensors[f"weights/{name}"], weight))
        names = {id(weight): name for name, weight in self._weights.items()}
        kinds = {name.split("/", 1)[0] for name in tensors} - set(_OTHERS)
        for optimizer in self.optimizers:
            ordered = [weight for group in optimizer.param_groups for weight in group["params"]]
            # copies in memory of their own: a mapped file's alignment may choose another kernel
            moments = {
                index: {
                    kind: like(tensors[f"{kind}/{names[id(weight)]}"], weight)
                    for kind in kinds
                    if f"{kind}/{names[id(weight)]}" in tensors
                }
                for index, weight in enumerate(ordered)
            }
            optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
        self.steps = [StepRecord(**record) for record in records["steps"]]
        self.epochs = [
            EpochRecord(**record | {"heldout": Acceptance(**record["heldout"])}) for record in records["epochs"]
        ]
        if self.epochs:
            self.best_weights = {
                name: like(tensors[f"best/{name}"], weight).detach() for name, weight in self._weights.items()
            }
        self.step_seconds, self.waited_seconds = records["step_seconds"], records["waited_seconds"]
        self._began -= records["seconds"]
        torch.set_rng_state(tensors["random/cpu"].clone())
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random/cuda"].clone(), self._device)

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(iter(self._weights.values())).device
        return device
