"""Batches of the store joined with their loss masks, aligned as the head is fed when it is served.

Takes ``tokens.parquet`` rows and a plan of the store's rows; gives `Batch`es of whole rows laid end to end, without
padding, on the device. A row of tokens x0..x(n-1) becomes n-1 slots. Slot p has the input token x(p+1), the auxiliary
states of x(p), the target's final state at x(p+1) as its teacher, and the mask of x(p+1): the mask travels with the label
it weighs.
Shape legend: T slots, N packed tokens, L recorded layers, H hidden size, E = L * H, A = (L - 1) * H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from eyas.errors import EyasError
from eyas.store.feed import FedBatch
from eyas.store.reader import StoreReader
from eyas.tables import PROBE


@dataclass(frozen=True)
class TokenRow:
    """One row of ``tokens.parquet`` and its key in the store."""

    conversation_id: str
    key: str
    input_ids: np.ndarray  # int32 [n]
    loss_mask: np.ndarray  # bool [n]

    @property
    def slots(self) -> int:
        """Slots that the row takes in a batch."""
        return len(self.input_ids) - 1

    @property
    def supervised(self) -> int:
        """Slots that weigh in the loss."""
        return int(self.loss_mask[1:].sum())


@dataclass(frozen=True)
class Batch:
    """Whole rows laid end to end; `lengths` has the slots of each. The mask is on the CPU, where batches are planned."""

    input_ids_T: torch.Tensor  # int64
    aux_TA: torch.Tensor  # bfloat16
    final_TH: torch.Tensor  # bfloat16, before the target's final norm
    mask_T: torch.Tensor  # bool
    positions_T: torch.Tensor  # int64, from 1 in each row
    lengths: list[int]
    rows: list[TokenRow]


@dataclass(frozen=True)
class TrainingData:
    """What a head is trained and judged on, and how many processes read it."""

    reader: StoreReader
    train: Sequence[TokenRow]
    heldout: Sequence[TokenRow]
    workers: int


def token_rows(table: Sequence[dict[str, Any]], split: str, key_of: Callable[[Sequence[int]], str]) -> list[TokenRow]:
    """Rows of one split that supervise at least one slot, in the order of the table; greedy probes are for the self-check.

    Args:
        table: rows of ``tokens.parquet``.
        split: ``train`` or ``validation``.
        key_of: the store's key of a row's tokens.

    Raises:
        EyasError: the split has no such row.
    """
    rows = [
        TokenRow(
            row["conversation_id"],
            key_of(row["input_ids"]),
            np.asarray(row["input_ids"], dtype=np.int32),
            np.asarray(row["loss_mask"], dtype=bool),
        )
        for row in table
        if row["split"] == split and row["kind"] != PROBE
    ]
    rows = [row for row in rows if row.supervised]
    if not rows:
        raise EyasError(f"tokens.parquet: no row of the {split} split supervises a token; the dataset is too small")
    return rows


def by_key(rows: Sequence[TokenRow]) -> dict[str, list[TokenRow]]:
    """Rows by their key in the store; conversations of the same tokens share one."""
    found: dict[str, list[TokenRow]] = {}
    for row in rows:
        found.setdefault(row.key, []).append(row)
    return found


def to_batch(fed: FedBatch, rows_by_key: Mapping[str, Sequence[TokenRow]], device: torch.device) -> Batch:
    """Join packed rows with their masks, and cut the slots out of their states on the device.

    To a GPU the packed states go as they are; the fed buffer must not change until the current stream has copied it. On the
    CPU nothing of the batch shares memory with the buffer.

    Args:
        fed: the packed rows.
        rows_by_key: of the token table, as `by_key` gives them.
        device: where the batch goes.

    Raises:
        EyasError: the store has other tokens under a row's key, or a mask does not weigh the inputs it marks.
    """
    rows, before = [], []
    for key, end, length in zip(fed.batch.keys, accumulate(fed.lengths), fed.lengths, strict=True):
        for row in rows_by_key[key]:
            if not np.array_equal(fed.input_ids[end - length : end], row.input_ids):
                raise EyasError(
                    f"store: row {row.key} has other tokens than {row.conversation_id}; run the `extract` stage again"
                )
            rows.append(row)
            before.append(np.arange(end - length, end - 1))
    ids = np.concatenate([row.input_ids[1:] for row in rows])
    mask = np.concatenate([row.loss_mask[1:] for row in rows])
    # taken from the unshifted table on purpose; a first token is never an input
    marked = np.concatenate([row.input_ids[row.loss_mask][int(row.loss_mask[0]) :] for row in rows])
    if not np.array_equal(ids[mask], marked):
        raise EyasError(f"batch of {rows[0].conversation_id}…: the loss mask weighs other inputs than it marks")
    states_NLH = torch.from_numpy(fed.hidden_TLH.view(np.int16)).view(torch.bfloat16).to(device, non_blocking=True)
    states_NE, hidden = states_NLH.flatten(1), states_NLH.shape[2]
    before_T = torch.from_numpy(np.concatenate(before)).to(device)
    return Batch(
        torch.from_numpy(ids.astype(np.int64)).to(device),
        states_NE[:, :-hidden].index_select(0, before_T),
        states_NE[:, -hidden:].index_select(0, before_T + 1),
        torch.from_numpy(mask),
        torch.cat([torch.arange(1, row.slots + 1) for row in rows]).to(device),
        [row.slots for row in rows],
        rows,
    )
