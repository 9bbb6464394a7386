"""Our own training loop, on the CPU, one GPU or many: float32 master weights, a global batch, the best epoch kept.

Takes a head and `TrainingData`; gives the head with the weights of the epoch that held-out acceptance chose, and
the series of steps and epochs. Stopped or killed, it goes on from its last checkpoint and ends in the same bytes.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from speculators.models.eagle3 import Eagle3DraftModel

from eyas.console import Progress, console
from eyas.drafting.checkpoints import Checkpoints, load_checkpoint
from eyas.drafting.data import TrainingData, by_key
from eyas.drafting.feeding import Planned, device_batches
from eyas.drafting.flops import peak_flops
from eyas.drafting.global_batch import Steps
from eyas.drafting.gradients import Together, together
from eyas.drafting.heldout import Heldout
from eyas.drafting.optimizing import learning_rate
from eyas.drafting.ranks import Ranks, training_device
from eyas.drafting.records import StepRecord, Training, epoch_row, mean_epoch, step_row
from eyas.drafting.state import TrainingState, training_identity
from eyas.drafting.stepping import StepFigures, gradients
from eyas.drafting.stopping import Stop, StopAsked
from eyas.drafting.tracking import Trackers
from eyas.errors import EyasError
from eyas.params import Machine, TrainParams
from eyas.store.batches import PackedBatches
from eyas.targets.head import TargetHead

_DEFAULTS, _ALONE = Machine(), Ranks()


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


def _memory_mib(device: torch.device) -> int:
    """Most that was taken so far: allocated on the GPU, or resident where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


class Loop:
    """Steps and judgements from where the state stands, with a checkpoint now and then."""

    def __init__(
        self,
        head: Together,
        state: TrainingState,
        data: TrainingData,
        epochs: Sequence[Steps],
        params: TrainParams,
        machine: Machine,
        ranks: Ranks,
    ) -> None:
        self.total = sum(map(len, epochs))
        self._head, self._state, self._data, self._epochs = head, state, data, epochs
        self._params, self._ranks, self._rows = params, ranks, by_key(data.train)
        self._device = training_device()
        self._peak = peak_flops(self._device, machine.peak_tflops)

    def run(self, heldout: Heldout, checkpoints: Checkpoints | None, trackers: Trackers) -> None:
        """Train to the end; only the first rank has checkpoints.

        Raises:
            EyasError: as `fit` says.
        """
        state = self._state
        left = self.total - len(state.steps)
        with Stop(self._ranks.world == 1) as stop, Progress("training", left, "steps") as progress:
            try:
                while not state.finished:
                    self.train_epoch(checkpoints, stop, progress, trackers)
                    self._judge_epoch(heldout, stop, trackers)
                    self._save(checkpoints)
                    if any(self._ranks.gathered(stop.signal is not None)):
                        raise StopAsked
            except (StopAsked, EyasError) as error:
                # with an error: a signal to the whole process group has ended the processes that read the store
                alone = self._ranks.world == 1 and stop.signal is not None
                if not (isinstance(error, StopAsked) or alone):
                    raise
                self._save(checkpoints)
                raise EyasError(
                    f"train: {stop.signal or 'a stop'} after {len(state.steps)} of {self.total} steps; "
                    "they are kept, run again to go on"
                ) from None

    def train_epoch(self, checkpoints: Checkpoints | None, stop: Stop, progress: Progress, trackers: Trackers) -> None:
        """The steps that are left of the epoch, on all ranks.

        Raises:
            StopAsked: a rank was asked to stop; the step is done.
            EyasError: a batch without a finite gradient, where that is to stop the training.
        """
        state, steps = self._state, self._epochs[self._state.epoch - 1]
        first, params = state.position, self._params
        if first == len(steps):
            return
        state.model.train()
        mine = steps.share_of(self._ranks, first)
        with device_batches(mine, self._rows, self._device, self._data.workers, params.ttt_steps) as opened:
            batches = _Timed(opened)
            for place in range(first, len(steps)):
                batches.waited, began = 0.0, time.monotonic()
                figures = gradients(
                    self._head,
                    batches,
                    steps.shares(place, self._ranks),
                    steps.label_counts(place, params.ttt_steps),
                    len(steps.packs(place)),
                    params,
                    self._ranks,
                    (stop.signal is not None, checkpoints is not None and checkpoints.due()),
                    state.weights,
                )
                self._update(steps, place, figures, began, batches.waited)
                trackers.log("step", len(state.steps), step_row(state.steps[-1]))
                progress.advance()
                # alone there is nobody to agree with, and no step to wait for
                if figures.stop or (self._ranks.world == 1 and stop.signal):
                    raise StopAsked
                if figures.save:
                    self._save(checkpoints)

    def _update(self, steps: Steps, place: int, figures: StepFigures, began: float, waited: float) -> None:
        """Change the weights by a step's gradient, or leave it out, and take the step down."""
        state, params = self._state, self._params
        rate, number = learning_rate(len(state.steps), self.total, params), len(state.steps) + 1
        if figures.finite:
            for optimizer in state.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
        else:
            self._leave_out(steps, place, figures, number)
        taken = time.monotonic() - began
        labels = steps.label_counts(place, params.ttt_steps)
        state.step_seconds, state.waited_seconds = state.step_seconds + taken, state.waited_seconds + waited
        state.steps.append(
            StepRecord(
                step=number,
                epoch=state.epoch,
                loss=figures.loss if figures.finite else None,
                lr=rate,
                grad_norm=figures.grad_norm if figures.finite else None,
                tokens_per_s=steps.slots(place) / taken,
                waiting_share=waited / taken,
                mfu=figures.flops / (taken * self._peak * self._ranks.world) if self._peak else None,
                memory_mib=_memory_mib(self._device),
                loss_by_depth=figures.by_depth if figures.finite else [],
                accuracy_by_depth=[hits / max(1, count) for hits, count in zip(figures.hits, labels, strict=True)],
            )
        )

    def _leave_out(self, steps: Steps, place: int, figures: StepFigures, number: int) -> None:
        """Name the rows of a step that is not finite; go on where that is wanted.

        Raises:
            EyasError: it is not, or too many steps in a row were left out; no weight was changed.
        """
        rows = steps.rows(place)
        suspects = figures.bad_packs or range(len(rows))
        names = ", ".join(row.conversation_id for pack in suspects for row in rows[pack])
        message = (
            f"train: step {number}: loss {figures.loss}, gradient norm {figures.grad_norm}; conversations: {names}. "
        )
        in_row = self._state.skipped_in_row + 1
        if self._params.on_nan == "stop":
            raise EyasError(message + "Look at their stored states, or lower train.lr")
        if in_row > self._params.max_skipped:
            raise EyasError(message + f"{in_row} steps in a row are not finite; look at the store, or lower train.lr")
        console.print(escape(message) + "The step is left out")

    def _judge_epoch(self, heldout: Heldout, stop: Stop, trackers: Trackers) -> None:
        state, ranks = self._state, self._ranks
        sums = ranks.gathered([weight.detach().double().sum().item() for weight in self._local_weights()])
        if any(found != sums[0] for found in sums):
            raise EyasError("train: the ranks' weights differ; a GPU or its memory may be faulty. Run again to go on")
        if not state.losses:
            raise EyasError(f"train: epoch {state.epoch} has no step that is finite; look at the store")
        state.model.eval()
        loss, acceptance = heldout.evaluate(self._head, stop)
        done = [record for record in state.steps if record.epoch == state.epoch]
        state.end_epoch(mean_epoch(state.epoch, done, loss, acceptance))
        record = state.epochs[-1]
        trackers.log("epoch", len(state.epochs), epoch_row(record))
        console.print(
            f"epoch {len(state.epochs)}/{self._params.epochs}: loss {record.train_loss:.3f}, "
            f"held out {loss:.3f}, "
            f"acceptance length {acceptance.length:.3f} ({acceptance.low:.3f} to {acceptance.high:.3f})"
        )
        if state.finished and state.epoch <= self._params.epochs:
            console.print(f"no better epoch for {self._params.patience}: training ends here")

    def _local_weights(self) -> list[torch.Tensor]:
        """What every rank must have alike: replicas, not shards."""
        return [] if self._head.sharded else list(self._state.weights)

    def _save(self, checkpoints: Checkpoints | None) -> None:
        """Write a checkpoint; the other ranks give what they have, and wait until it is there."""
        if not self._state.steps:
            return
        tensors = self._state.tensors()
        if checkpoints is not None:
            checkpoints.save(self._state.name, tensors, self._state.records())
        self._ranks.of_first(None)


class _Timed(Iterator[Planned]):
    """Batches, and the seconds spent waiting for them."""

    def __init__(self, batches: Iterator[Planned]) -> None:
        self._batches, self.waited = batches, 0.0

    def __next__(self) -> Planned:
        began = time.monotonic()
        try:
            return next(self._batches)
        finally:
            self.waited += time.monotonic() - began


@_deterministic()
def fit(
    model: Eagle3DraftModel,
    data: TrainingData,
    params: TrainParams,
    target: TargetHead,
    temperature: float,
    work: Path,
    machine: Machine = _DEFAULTS,
    ranks: Ranks = _ALONE,
) -> Training:
    """Train a head in place; afterwards it has the weights of the epoch with the greatest held-out acceptance length.

    Goes on from the last checkpoint in ``work`` where that belongs to the same training; the result is the same, bit for bit.
    Ranks that share weights out leave them so; the whole head is in the last checkpoint.

    Args:
        model: from `make_head`; the same on every rank.
        data: rows of the two splits, and the store that has their states.
        params: of the optimisation.
        target: the target's final norm and output head, whole.
        temperature: that sampled rows were answered with.
        work: scratch for checkpoints; to be removed by the caller once the head is published.
        machine: when checkpoints are written, how ranks share weights out, where series go.
        ranks: that train together; the others call `fit` as well.

    Raises:
        EyasError: a loss or gradient is not finite (the rows are named); the store is damaged; SIGTERM or an interrupt
            came, and what is done so far is kept; a checkpoint cannot be written; the ranks have other inputs.
    """
    device = training_device()
    rows = by_key(data.train)
    plans = [
        PackedBatches(data.reader, list(rows), params.pack_tokens, params.seed, epoch) for epoch in range(params.epochs)
    ]
    identity = training_identity(model, [*data.train, *data.heldout], plans, params, temperature, device)
    if len(set(ranks.gathered(identity))) > 1:
        raise EyasError("train: the ranks have other code, data, parameters or weights; give all of them the same")
    checkpoints = None
    if ranks.first:
        checkpoints = Checkpoints(
            work, identity, machine.checkpoints_kept, machine.checkpoint_minutes, machine.checkpoint_steps
        )
    model.to(device)
    head = together(model, ranks, machine.train_sharding, params, device)
    state = TrainingState(model, params)
    epochs = [Steps(plan, params.packs_per_step, rows) for plan in plans]
    loop = Loop(head, state, data, epochs, params, machine, ranks)
    if found := ranks.of_first(checkpoints.newest() if checkpoints else None):
        state.restore(*load_checkpoint(found))
        console.print(f"a checkpoint holds {len(state.steps)} of {loop.total} steps; training goes on behind them")
    if not state.finished:
        with Trackers(machine.track if ranks.first else [], work.parent / "live", len(state.steps)) as trackers:
            loop.run(Heldout(data, params, target, temperature, ranks), checkpoints, trackers)
    if not head.sharded:
        model.eval()
        model.load_state_dict(state.best_weights, strict=False)
    tokens = sum(epochs[record.epoch - 1].slots(place) for place, record in _places(state.steps))
    return Training(
        state.steps,
        state.epochs,
        state.best,
        tokens / state.step_seconds,
        state.waited_seconds / state.step_seconds,
        state.seconds,
    )


def _places(steps: Sequence[StepRecord]) -> Iterator[tuple[int, StepRecord]]:
    """Each step's place in its epoch, from 0."""
    for _, records in groupby(steps, key=lambda record: record.epoch):
        yield from enumerate(records)
