"""What training leaves for people: its records, metrics, and the two series that plots are made of.

Takes a `Training`; gives a dictionary for ``train.json`` and CSV texts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.drafting.acceptance import Acceptance


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step; of one that was left out there is no loss."""

    step: int
    epoch: int
    loss: float | None
    lr: float
    grad_norm: float | None
    tokens_per_s: float  # over all ranks
    waiting_share: float  # of the step's time, before its first batch was there
    mfu: float | None  # share of the peak; None where that is not known
    memory_mib: int  # most that was taken so far: allocated on the GPU, or resident
    loss_by_depth: list[float]  # undecayed
    accuracy_by_depth: list[float]  # share of labels drafted as the target would have it


@dataclass(frozen=True)
class EpochRecord:
    """One epoch and its held-out figures."""

    epoch: int
    train_loss: float
    train_loss_by_depth: list[float]
    train_accuracy_by_depth: list[float]
    tokens_per_s: float
    waiting_share: float
    mfu: float | None
    memory_mib: int
    grad_norm: float  # mean
    skipped: int  # steps that were left out
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


def train_metrics(training: Training) -> dict[str, Any]:
    """Figures of the epoch that was kept, and of the training as a whole."""
    best = training.best
    return {
        "heldout_acceptance_length": best.heldout.length,
        "heldout_acceptance_length_low": best.heldout.low,
        "heldout_acceptance_length_high": best.heldout.high,
        "heldout_acceptance": {str(i): share for i, share in enumerate(best.heldout.by_position, 1)},
        "heldout_draft_steps": best.heldout.steps,
        "heldout_loss": best.heldout_loss,
        "best_epoch": best.epoch,
        "epochs": len(training.epochs),
        "steps": len(training.steps),
        "skipped_steps": sum(record.loss is None for record in training.steps),
        "final_loss": training.epochs[-1].train_loss,
        "tokens_per_s": training.tokens_per_s,
        "waiting_share": training.waiting_share,
        "seconds": training.seconds,
    }


def mean_epoch(epoch: int, steps: Sequence[StepRecord], heldout_loss: float, heldout: Acceptance) -> EpochRecord:
    """An epoch out of its steps (at least one was not left out); means over steps, except for the memory."""
    done = [record for record in steps if record.loss is not None]
    shares = [record.mfu for record in steps if record.mfu is not None]
    return EpochRecord(
        epoch=epoch,
        train_loss=float(np.mean([record.loss for record in done])),
        train_loss_by_depth=np.mean([record.loss_by_depth for record in done], 0).tolist(),
        train_accuracy_by_depth=np.mean([record.accuracy_by_depth for record in done], 0).tolist(),
        tokens_per_s=float(np.mean([record.tokens_per_s for record in steps])),
        waiting_share=float(np.mean([record.waiting_share for record in steps])),
        mfu=float(np.mean(shares)) if shares else None,
        memory_mib=max(record.memory_mib for record in steps),
        grad_norm=float(np.mean([record.grad_norm for record in done])),
        skipped=len(steps) - len(done),
        heldout_loss=heldout_loss,
        heldout=heldout,
    )


def step_row(record: StepRecord) -> dict[str, Any]:
    """The columns of one step, with loss and accuracy of each depth."""
    row = {name: value for name, value in vars(record).items() if not name.endswith("_by_depth")}
    return row | _by_depth("loss", record.loss_by_depth) | _by_depth("accuracy", record.accuracy_by_depth)


def epoch_row(record: EpochRecord) -> dict[str, Any]:
    """The columns of one epoch, with acceptance by position."""
    row = {name: value for name, value in vars(record).items() if not name.endswith("_by_depth") and name != "heldout"}
    row |= {
        "heldout_acceptance_length": record.heldout.length,
        "heldout_acceptance_length_low": record.heldout.low,
        "heldout_acceptance_length_high": record.heldout.high,
    }
    row |= _by_depth("heldout_acceptance", record.heldout.by_position)
    row |= _by_depth("train_loss", record.train_loss_by_depth)
    return row | _by_depth("train_accuracy", record.train_accuracy_by_depth)


def steps_csv(training: Training) -> str:
    """One line a step; those that were left out have nothing to plot."""
    return _csv(step_row(record) for record in training.steps if record.loss is not None)


def epochs_csv(epochs: Sequence[EpochRecord]) -> str:
    """One line an epoch."""
    return _csv(map(epoch_row, epochs))


def _by_depth(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_{depth}": value for depth, value in enumerate(values, 1)}


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(text, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()
