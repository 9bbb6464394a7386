"""Our own training loop, on the CPU or one GPU: float32 master weights, AdamW, warm-up and cosine, the best epoch kept.

Takes a head and `TrainingData`; gives the head with the weights of the epoch that held-out acceptance chose, and
the series of steps and epochs. Stopped or killed, it goes on from its last checkpoint and ends in the same bytes.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eyas.console import Progress, console
from eyas.drafting.acceptance import Acceptance, AcceptanceCounter, TargetChoice, target_choice
from eyas.drafting.checkpoints import Checkpoints
from eyas.drafting.data import Batch, TokenRow, by_key, device_batches
from eyas.drafting.forward import draft_states, head_loss, make_plan, trainable
from eyas.drafting.records import EpochRecord, StepRecord, Training
from eyas.drafting.state import TrainingState, training_identity
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


class _StopAsked(Exception):
    """Leaves the loop between two steps."""


class _Stop:
    """While open, SIGTERM and an interrupt ask for a stop after the step; a second one ends the process as ever."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def check(self) -> None:
        """Leave the loop if a stop was asked for."""
        if self.signal:
            raise _StopAsked

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self.__exit__()

    def __enter__(self) -> _Stop:
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


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
    def evaluate(self, model: Eagle3DraftModel, stop: _Stop) -> tuple[float, Acceptance]:
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
                stop.check()
        return float(np.average(losses, weights=weights)), counter.result()


def _autocast(params: TrainParams, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=params.autocast == "bfloat16")


def _train_step(
    model: Eagle3DraftModel, batch: Batch, params: TrainParams, optimizer: torch.optim.Optimizer, step: int
) -> tuple[float, list[float], float]:
    """One optimiser step; loss, loss by depth, and gradient norm before clipping.

    Raises:
        EyasError: either is not finite; the rows of the batch are named and no weight was changed.
    """
    plan = make_plan(batch, params.ttt_steps)
    with _autocast(params, batch.input_ids_T.device):
        states_KNH = draft_states(model, batch, plan, params.ttt_steps)
        out = head_loss(model, states_KNH, batch, plan, params.loss, params.ttt_decay, True)
    optimizer.zero_grad(set_to_none=True)
    out.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainable(model), params.clip_norm).item()
    value = out.loss.item()
    if not (math.isfinite(value) and math.isfinite(norm)):
        rows = ", ".join(row.conversation_id for row in batch.rows)
        raise EyasError(
            f"train: step {step}: loss {value}, gradient norm {norm}; conversations of the batch: {rows}. "
            "Look at their stored states, or lower train.lr"
        )
    optimizer.step()
    return value, out.by_depth_K.tolist(), norm


class _Loop:
    """Steps and judgements from where the state stands, with a checkpoint now and then."""

    def __init__(
        self, state: TrainingState, data: TrainingData, plans: Sequence[PackedBatches], params: TrainParams
    ) -> None:
        self.total = sum(map(len, plans))
        self._state, self._data, self._plans, self._params = state, data, plans, params
        self._rows = by_key(data.train)

    def run(self, heldout: _Heldout, checkpoints: Checkpoints) -> None:
        """Train to the end.

        Raises:
            EyasError: as `fit` says.
        """
        state = self._state
        with _Stop() as stop, Progress("training", self.total - len(state.steps), "steps") as progress:
            try:
                while state.epoch <= self._params.epochs:
                    self._train_epoch(checkpoints, stop, progress)
                    self._judge_epoch(heldout, stop)
                    self._save(checkpoints)
                    stop.check()
            except (_StopAsked, EyasError):
                # with an error: a signal to the whole process group has ended the processes that read the store
                if stop.signal is None:
                    raise
                self._save(checkpoints)
                raise EyasError(
                    f"train: {stop.signal} after {len(state.steps)} of {self.total} steps; "
                    "they are kept, run again to go on"
                ) from None

    def _train_epoch(self, checkpoints: Checkpoints, stop: _Stop, progress: Progress) -> None:
        state, plan = self._state, self._plans[self._state.epoch - 1]
        position, device = len(state.losses), training_device()
        if position == len(plan):
            return
        state.model.train()
        clock = time.monotonic()
        with device_batches(plan, self._rows, device, self._data.workers, position) as batches:
            for batch in batches:
                waiting = time.monotonic() - clock
                rate = learning_rate(len(state.steps), self.total, self._params)
                for group in state.optimizer.param_groups:
                    group["lr"] = rate
                number = len(state.steps) + 1
                loss, by_depth, norm = _train_step(state.model, batch, self._params, state.optimizer, number)
                taken = time.monotonic() - clock
                speed = sum(batch.lengths) / taken
                state.step_seconds, state.waited_seconds = state.step_seconds + taken, state.waited_seconds + waiting
                state.steps.append(StepRecord(number, state.epoch, loss, rate, norm, speed, waiting / taken, by_depth))
                progress.advance()
                stop.check()
                if checkpoints.due:
                    self._save(checkpoints)
                clock = time.monotonic()

    def _judge_epoch(self, heldout: _Heldout, stop: _Stop) -> None:
        state = self._state
        state.model.eval()
        loss, acceptance = heldout.evaluate(state.model, stop)
        state.end_epoch(EpochRecord(state.epoch, float(np.mean(state.losses)), loss, acceptance))
        console.print(
            f"epoch {len(state.epochs)}/{self._params.epochs}: loss {state.epochs[-1].train_loss:.3f}, "
            f"held out {loss:.3f}, "
            f"acceptance length {acceptance.length:.3f} ({acceptance.low:.3f} to {acceptance.high:.3f})"
        )

    def _save(self, checkpoints: Checkpoints) -> None:
        if self._state.steps:
            checkpoints.save(self._state.name, self._state.tensors(), self._state.records())


@_deterministic()
def fit(
    model: Eagle3DraftModel,
    data: TrainingData,
    params: TrainParams,
    target: TargetHead,
    temperature: float,
    work: Path,
) -> Training:
    """Train a head in place; afterwards it has the weights of the epoch with the greatest held-out acceptance length.

    Goes on from the last checkpoint in ``work`` where that belongs to the same training; the result is the same, bit for bit.

    Args:
        model: from `make_head`.
        data: rows of the two splits, and the store that has their states.
        params: of the optimisation.
        target: the target's final norm and output head, whole.
        temperature: that sampled rows were answered with.
        work: scratch for checkpoints; to be removed by the caller once the head is published.

    Raises:
        EyasError: a loss or gradient is not finite (the rows are named); the store is damaged; SIGTERM or an interrupt
            came, and what is done so far is kept; a checkpoint cannot be written.
    """
    device = training_device()
    plans = [
        PackedBatches(data.reader, list(by_key(data.train)), params.tokens_per_step, params.seed, epoch)
        for epoch in range(params.epochs)
    ]
    identity = training_identity(model, [*data.train, *data.heldout], plans, params, temperature, device)
    checkpoints = Checkpoints(work, identity)
    model.to(device)
    state = TrainingState(model, params)
    loop = _Loop(state, data, plans, params)
    if found := checkpoints.newest():
        state.restore(*found)
        console.print(f"a checkpoint holds {len(state.steps)} of {loop.total} steps; training goes on behind them")
    if state.epoch <= params.epochs:
        loop.run(_Heldout(data, params, target, temperature), checkpoints)
    model.eval()
    model.load_state_dict(state.best_weights, strict=False)
    tokens = params.epochs * sum(row.slots for row in data.train)
    return Training(
        state.steps,
        state.epochs,
        state.best,
        tokens / state.step_seconds,
        state.waited_seconds / state.step_seconds,
        state.seconds,
    )
