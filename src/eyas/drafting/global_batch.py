"""The steps of an epoch: which packed batches make up one optimiser step, and which of them a rank computes.

Takes an epoch's plan; the grouping knows nothing of ranks. Step s has the packs s*m to s*m+m-1; rank r of w takes its packs r,
r+w, … Where they do not divide, a rank computes the step's first pack once more, with no weight, so that all ranks work alike.
Shape legend: K depths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eyas.drafting.data import TokenRow
from eyas.drafting.ranks import Ranks
from eyas.store.batches import Batch, PackedBatches


@dataclass(frozen=True)
class Share:
    """One pack of a rank: its place in the step, and whether it weighs."""

    pack: int
    counts: bool


class Steps:
    """An epoch's optimiser steps."""

    def __init__(self, plan: PackedBatches, packs_per_step: int, rows: Mapping[str, Sequence[TokenRow]]) -> None:
        """Group a plan of all packs.

        Args:
            plan: of one rank, that is, of all.
            packs_per_step: the last step has what is left.
            rows: of the token table, by key.
        """
        self.plan, self._size, self._rows = plan, packs_per_step, rows

    def __len__(self) -> int:
        return (len(self.plan) + self._size - 1) // self._size

    def packs(self, step: int) -> list[Batch]:
        """The packs of a step, from 0."""
        first = step * self._size
        return [self.plan[index] for index in range(first, min(first + self._size, len(self.plan)))]

    def rows(self, step: int) -> list[list[TokenRow]]:
        """The rows of each of its packs."""
        return [[row for key in pack.keys for row in self._rows[key]] for pack in self.packs(step)]

    def label_counts(self, step: int, depths: int) -> list[int]:
        """Labels of a step by depth [K]: depth d has those that lie d slots or more behind the start of their row."""
        masks = [row.loss_mask for rows in self.rows(step) for row in rows]
        return [sum(int(np.count_nonzero(mask[1 + depth :])) for mask in masks) for depth in range(depths)]

    def slots(self, step: int) -> int:
        """Slots of a step over all ranks."""
        return sum(row.slots for rows in self.rows(step) for row in rows)

    def shares(self, step: int, ranks: Ranks) -> list[Share]:
        """What one rank computes of a step; as many packs as every other rank."""
        count = len(self.packs(step))
        places = range(ranks.rank, -(-count // ranks.world) * ranks.world, ranks.world)
        return [Share(place, True) if place < count else Share(0, False) for place in places]

    def share_of(self, ranks: Ranks, start: int) -> PackedBatches:
        """A plan of one rank's packs alone, from a step on."""
        return selected(
            self.plan,
            [step * self._size + share.pack for step in range(start, len(self)) for share in self.shares(step, ranks)],
        )


def selected(plan: PackedBatches, positions: Sequence[int]) -> PackedBatches:
    """The plan of some of a plan's batches, in the order given."""
    return _Selected(plan, positions)


class _Selected(PackedBatches):
    def __init__(self, plan: PackedBatches, positions: Sequence[int]) -> None:
        self.reader, self.tokens_per_batch, self._capacity = plan.reader, plan.tokens_per_batch, plan.capacity
        self._batches = [plan[position] for position in positions]
