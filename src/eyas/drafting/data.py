"""Rows of the store joined with their loss masks, aligned as the head is fed when it is served, packed into batches.

Takes ``tokens.parquet`` rows and a store reader; gives `Batch`es of whole rows laid end to end, without padding.
A row of tokens x0..x(n-1) becomes n-1 slots. Slot p has the input token x(p+1), the auxiliary states of x(p), the
target's final state at x(p+1) as its teacher, and the mask of x(p+1): the mask travels with the label it weighs.
Shape legend: T slots, A auxiliary layers times hidden size, H hidden size, L recorded layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from eyas.errors import EyasError


class StoredRow(Protocol):
    """What a store gives for a key."""

    @property
    def input_ids(self) -> np.ndarray:
        """int32 [T]."""

    @property
    def hidden_TLH(self) -> np.ndarray:
        """uint16 [T, L, H], bfloat16 bit patterns."""


class RowReader(Protocol):
    """A store, seen from here."""

    def read(self, key: str) -> StoredRow:
        """The row of a key."""


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
    """Whole rows laid end to end; `lengths` has the slots of each."""

    input_ids_T: torch.Tensor  # int64
    aux_TA: torch.Tensor  # bfloat16
    final_TH: torch.Tensor  # bfloat16, before the target's final norm
    mask_T: torch.Tensor  # bool
    positions_T: torch.Tensor  # int64, from 1 in each row
    lengths: list[int]
    rows: list[TokenRow]

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the mask stays where batches are planned, on the CPU."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            input_ids_T=self.input_ids_T.to(device),
            aux_TA=self.aux_TA.to(device),
            final_TH=self.final_TH.to(device),
            positions_T=self.positions_T.to(device),
        )


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
        if row["split"] == split and row["kind"] != "greedy_probe"
    ]
    rows = [row for row in rows if row.supervised]
    if not rows:
        raise EyasError(f"tokens.parquet: no row of the {split} split supervises a token; the dataset is too small")
    return rows


def load_row(reader: RowReader, row: TokenRow) -> torch.Tensor:
    """The row's states, bfloat16 [n, L, H], sharing memory with what the reader gave.

    Raises:
        EyasError: the store has other tokens under this key.
    """
    stored = reader.read(row.key)
    if not np.array_equal(stored.input_ids, row.input_ids):
        raise EyasError(
            f"store: row {row.key} has other tokens than {row.conversation_id}; run the `extract` stage again"
        )
    return torch.from_numpy(stored.hidden_TLH.view(np.int16)).view(torch.bfloat16)


def collate(reader: RowReader, rows: Sequence[TokenRow]) -> Batch:
    """One batch of whole rows.

    Raises:
        EyasError: the store has other tokens under a row's key, or a mask does not weigh the inputs it marks.
    """
    states = [load_row(reader, row) for row in rows]
    ids = np.concatenate([row.input_ids[1:] for row in rows])
    mask = np.concatenate([row.loss_mask[1:] for row in rows])
    # taken from the unshifted table on purpose; a first token is never an input
    marked = np.concatenate([row.input_ids[row.loss_mask][int(row.loss_mask[0]) :] for row in rows])
    if not np.array_equal(ids[mask], marked):
        raise EyasError(f"batch of {rows[0].conversation_id}…: the loss mask weighs other inputs than it marks")
    return Batch(
        torch.from_numpy(ids.astype(np.int64)),
        torch.cat([s[:-1, :-1].flatten(1) for s in states]),
        torch.cat([s[1:, -1] for s in states]),
        torch.from_numpy(mask),
        torch.cat([torch.arange(1, row.slots + 1) for row in rows]),
        [row.slots for row in rows],
        list(rows),
    )


def pack(rows: Sequence[TokenRow], tokens_per_step: int, seed: int | None = None) -> list[list[TokenRow]]:
    """Fill batches with whole rows, in a seeded random order or as they come; a longer row is a batch of its own."""
    order = range(len(rows)) if seed is None else np.random.default_rng(seed).permutation(len(rows))
    packs: list[list[TokenRow]] = []
    room = 0
    for index in order:
        row = rows[index]
        if row.slots > room:
            packs.append([])
            room = tokens_per_step
        packs[-1].append(row)
        room -= row.slots
    return packs


def batches(reader: RowReader, packs: Sequence[Sequence[TokenRow]], device: torch.device) -> Iterator[Batch]:
    """Collate packs in order, one ahead of the consumer."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(collate, reader, packs[0])
        for following in [*packs[1:], None]:
            batch = ahead.result()
            if following is not None:
                ahead = pool.submit(collate, reader, following)
            yield batch.to(device)
