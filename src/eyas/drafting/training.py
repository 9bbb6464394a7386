"""Our own training loop, on the CPU or one GPU: float32 master weights, AdamW, warm-up and cosine, the best epoch kept.

Takes a head and `TrainingData`; gives the head with the weights of the epoch that held-out acceptance chose, and
the series of steps and epochs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eyas.console import Progress, console
from eyas.drafting.acceptance import Acceptance, AcceptanceCounter, TargetChoice, target_choice
from eyas.drafting.data import Batch, TokenRow, by_key, device_batches
from eyas.drafting.forward import draft_states, head_loss, make_plan, trainable
from eyas.errors import EyasError
from eyas.params import TrainParams
from eyas.store.batches import PackedBatches
from eyas.store.reader import StoreReader
from eyas.targets.head import TargetHead


@dataclass(frozen=True)
class TrainingData:
    """What a head is trained and judged on, and how many processes read it."""

    reader: StoreReader
    train: Sequence[TokenRow]
    heldout: Sequence[TokenRow]
    workers: int


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step."""

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    waiting_share: float  # of the step's time, before its batch was there


@dataclass(frozen=True)
class EpochRecord:
    """One epoch and its held-out figures."""

    epoch: int
    train_loss: float
    heldout_loss: float
    heldout: Acceptance


@dataclass(frozen=True)
class Training:
    """What training did."""

    steps: list[StepRecord]
    epochs: list[EpochRecord]
    best: EpochRecord
    tokens_per_s: float  # of training alone
    waiting_share: float  # of training's time, for batches
    seconds: float


def training_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _deterministic() -> Iterator[None]:
    """Same bytes each time; cuBLAS reads its variable when it starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # it writes over every new tensor only to show reads of unset memory
    filling: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        filling.fill_uninitialized_memory = fill


def learning_rate(step: int, total: int, params: TrainParams) -> float:
    """Linear warm-up over ``warmup_share`` of the steps, then a cosine to zero; steps count from 0."""
    warmup = round(params.warmup_share * total)
    if step < warmup:
        return params.lr * (step + 1) / warmup
    return params.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class _Heldout:
    """Validation batches' fixed part, computed once: the target's choices."""

    def __init__(self, data: TrainingData, params: TrainParams, target: TargetHead, temperature: float) -> None:
        self._rows, self._workers = by_key(data.heldout), data.workers
        self._batches = PackedBatches(data.reader, list(self._rows), params.tokens_per_step, params.seed, epoch=0)
        self._params, self._device = params, training_device()
        self._choices: list[TargetChoice] = []
        on_device = replace(
            target, norm_weight_H=target.norm_weight_H.to(self._device), head_VH=target.head_VH.to(self._device)
        )
        with Progress("the target's choices on held-out rows", len(self._batches), "batches") as progress:
            with self._open() as batches:
                for batch in batches:
                    self._choices.append(target_choice(batch, on_device, temperature))
                    progress.advance()

    def _open(self) -> AbstractContextManager[Iterator[Batch]]:
        return device_batches(self._batches, self._rows, self._device, self._workers)

    @torch.no_grad()
    def evaluate(self, model: Eagle3DraftModel) -> tuple[float, Acceptance]:
        """Loss, and acceptance by simulated chain drafting as deep as the head is trained."""
        params, depths = self._params, self._params.ttt_steps
        counter = AcceptanceCounter(depths)
        losses, weights = [], []
        offsets = None if model.d2t is None else model.d2t.cpu().numpy()
        with self._open() as batches:
            for batch, choice in zip(batches, self._choices, strict=True):
                plan = make_plan(batch, depths)
                with _autocast(params, self._device):
                    states_KNH = draft_states(model, batch, plan, depths)
                    out = head_loss(model, states_KNH, batch, plan, params.loss, params.ttt_decay, False)
                ids_KN = out.draft_ids_KN.cpu().numpy()
                if offsets is not None:
                    ids_KN = np.where(ids_KN >= 0, ids_KN + offsets[ids_KN], -1)
                counter.add(batch, plan, ids_KN, choice)
                losses.append(out.loss.item())
                weights.append(len(plan.label_slots))
        return float(np.average(losses, weights=weights)), counter.result()


def _autocast(params: TrainParams, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=params.autocast == "bfloat16")


def _train_step(
    model: Eagle3DraftModel, batch: Batch, params: TrainParams, optimizer: torch.optim.Optimizer, step: int
) -> tuple[float, float]:
    """One optimiser step; loss and gradient norm before clipping.

    Raises:
        EyasError: either is not finite; the rows of the batch are named and no weight was changed.
    """
    plan = make_plan(batch, params.ttt_steps)
    with _autocast(params, batch.input_ids_T.device):
        states_KNH = draft_states(model, batch, plan, params.ttt_steps)
        loss = head_loss(model, states_KNH, batch, plan, params.loss, params.ttt_decay, True).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainable(model), params.clip_norm).item()
    value = loss.item()
    if not (math.isfinite(value) and math.isfinite(norm)):
        rows = ", ".join(row.conversation_id for row in batch.rows)
        raise EyasError(
            f"train: step {step}: loss {value}, gradient norm {norm}; conversations of the batch: {rows}. "
            "Look at their stored states, or lower train.lr"
        )
    optimizer.step()
    return value, norm


@_deterministic()
def fit(
    model: Eagle3DraftModel, data: TrainingData, params: TrainParams, target: TargetHead, temperature: float
) -> Training:
    """Train a head in place; afterwards it has the weights of the epoch with the greatest held-out acceptance length.

    Args:
        model: from `make_head`.
        data: rows of the two splits, and the store that has their states.
        params: of the optimisation.
        target: the target's final norm and output head, whole.
        temperature: that sampled rows were answered with.

    Raises:
        EyasError: a loss or gradient is not finite (the rows are named); the store is damaged.
    """
    started = time.monotonic()
    device = training_device()
    model.to(device)
    torch.manual_seed(params.seed)
    heldout = _Heldout(data, params, target, temperature)
    optimizer = torch.optim.AdamW(
        trainable(model), lr=params.lr, betas=(0.9, 0.95), weight_decay=params.weight_decay, fused=True
    )
    rows = by_key(data.train)
    plans = [
        PackedBatches(data.reader, list(rows), params.tokens_per_step, params.seed, epoch)
        for epoch in range(params.epochs)
    ]
    total = sum(map(len, plans))
    steps: list[StepRecord] = []
    epochs: list[EpochRecord] = []
    best_state: dict[str, Any] = {}
    best: EpochRecord | None = None
    seconds = waited = 0.0
    with Progress("training", total, "steps") as progress:
        for epoch, plan in enumerate(plans, 1):
            model.train()
            losses: list[float] = []
            clock = time.monotonic()
            with device_batches(plan, rows, device, data.workers) as batches:
                for batch in batches:
                    waiting = time.monotonic() - clock
                    rate = learning_rate(len(steps), total, params)
                    for group in optimizer.param_groups:
                        group["lr"] = rate
                    loss, norm = _train_step(model, batch, params, optimizer, len(steps) + 1)
                    now = time.monotonic()
                    taken, clock = now - clock, now
                    seconds, waited = seconds + taken, waited + waiting
                    losses.append(loss)
                    speed = sum(batch.lengths) / taken
                    steps.append(StepRecord(len(steps) + 1, epoch, loss, rate, norm, speed, waiting / taken))
                    progress.advance()
            model.eval()
            heldout_loss, acceptance = heldout.evaluate(model)
            epochs.append(EpochRecord(epoch, float(np.mean(losses)), heldout_loss, acceptance))
            console.print(
                f"epoch {epoch}/{params.epochs}: loss {epochs[-1].train_loss:.3f}, held out {heldout_loss:.3f}, "
                f"acceptance length {acceptance.length:.3f} ({acceptance.low:.3f} to {acceptance.high:.3f})"
            )
            if best is None or acceptance.length > best.heldout.length:
                best = epochs[-1]
                best_state = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    assert best is not None
    model.load_state_dict(best_state, strict=False)
    tokens = params.epochs * sum(row.slots for row in data.train)
    return Training(steps, epochs, best, tokens / seconds, waited / seconds, time.monotonic() - started)
