"""What training leaves for people: its records, metrics, and the two series that plots are made of.

Takes a `Training`; gives a dictionary for ``train.json`` and CSV texts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.drafting.acceptance import Acceptance


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
    loss_by_depth: list[float]  # undecayed


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
        "steps": len(training.steps),
        "final_loss": training.epochs[-1].train_loss,
        "tokens_per_s": training.tokens_per_s,
        "waiting_share": training.waiting_share,
        "seconds": training.seconds,
    }


def steps_csv(training: Training) -> str:
    """One line a step, with the loss of each depth."""
    return _csv(
        {name: value for name, value in vars(record).items() if name != "loss_by_depth"}
        | {f"loss_{i}": loss for i, loss in enumerate(record.loss_by_depth, 1)}
        for record in training.steps
    )


def epochs_csv(epochs: Sequence[EpochRecord]) -> str:
    """One line an epoch, with acceptance by position."""
    return _csv(
        {
            "epoch": record.epoch,
            "train_loss": record.train_loss,
            "heldout_loss": record.heldout_loss,
            "heldout_acceptance_length": record.heldout.length,
            "heldout_acceptance_length_low": record.heldout.low,
            "heldout_acceptance_length_high": record.heldout.high,
        }
        | {f"heldout_acceptance_{i}": share for i, share in enumerate(record.heldout.by_position, 1)}
        for record in epochs
    )


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(text, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()
