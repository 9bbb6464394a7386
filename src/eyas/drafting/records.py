"""What training leaves for people: metrics and the two series that plots are made of.

Takes a `Training`; gives a dictionary for ``train.json`` and CSV texts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from eyas.drafting.training import EpochRecord, Training


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
    """One line a step."""
    return _csv(asdict(step) for step in training.steps)


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
