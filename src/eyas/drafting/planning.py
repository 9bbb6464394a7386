"""Which slots of a batch take part in which depth of the training-time test.

Takes a `Batch`, whose mask is on the CPU; gives a `Plan` with its index tensors on the batch's device. All is found on the CPU, and
one copy on the current stream brings it to the device: a stream of its own does not wait for what the device computes meanwhile.
Shape legend: T slots, N active slots, K depths, F = T + K - 1, U slots whose token a query is fed, D documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from eyas.drafting.data import Batch


@dataclass(frozen=True)
class Plan:
    """Index tensors are int64, and views of ``indices``, which is on the batch's device."""

    indices: torch.Tensor  # all of the others that are on the device
    active_N: torch.Tensor  # slots that weigh in the loss at some depth
    label_slots: torch.Tensor  # slots whose teacher is asked, ascending
    rows: list[torch.Tensor]  # by depth: the active row that predicts a label ...
    labels: list[torch.Tensor]  # ... and which of `label_slots` it is, ascending
    planned_labels: list[torch.Tensor]  # the same on the CPU, where chunks are cut without waiting for the device
    fed_U: torch.Tensor  # slots whose token some depth's query is fed, ascending; up to K - 1 past the batch's end
    fed_rows: list[torch.Tensor]  # by depth: the row of `fed_U` that each active slot is fed
    places: list[torch.Tensor]  # the active slots of each document, counted from its start
    bounds: torch.Tensor  # [D + 1], where documents begin, and the end
    lengths: list[int]  # slots of each document

    @property
    def active_lengths(self) -> list[int]:
        """Active slots of each document."""
        return [len(places) for places in self.places]

    @property
    def all_active(self) -> bool:
        """Whether no slot is left out."""
        return len(self.active_N) == sum(self.lengths)


def make_plan(batch: Batch, depths: int) -> Plan:
    """Plan a batch: depth d at slot p predicts the teacher of slot p + d, within the same document."""
    mask_T, lengths = batch.mask_T.numpy(), batch.lengths
    count = len(mask_T)
    bounds = np.array([0, *accumulate(lengths)])
    left_T = np.repeat(bounds[1:], lengths) - np.arange(count)  # slots to the document's end, its own included
    after_F = np.append(mask_T, np.zeros(depths - 1, dtype=bool))
    counts_KT = np.stack([after_F[depth : depth + count] & (left_T > depth) for depth in range(depths)])
    active_T = np.any(counts_KT, axis=0)
    active_N = active_T.nonzero()[0]
    row_of_T, label_of_T = active_T.cumsum() - 1, mask_T.cumsum() - 1
    sources = [counts_T.nonzero()[0] for counts_T in counts_KT]
    labels = [label_of_T[source + depth] for depth, source in enumerate(sources)]
    fed_F = np.zeros(count + depths - 1, dtype=bool)
    for depth in range(depths):
        fed_F[active_N + depth] = True
    row_of_F = fed_F.cumsum() - 1
    parts = [
        [active_N, mask_T.nonzero()[0], fed_F.nonzero()[0], bounds],
        [row_of_T[source] for source in sources],
        labels,
        [row_of_F[active_N + depth] for depth in range(depths)],
        [own_T.nonzero()[0] for own_T in np.split(active_T, bounds[1:-1])],
    ]
    flat = torch.from_numpy(np.concatenate([part for group in parts for part in group]))
    indices = flat.to(batch.input_ids_T.device)
    views = iter(indices.split([len(part) for group in parts for part in group]))
    fixed, rows, label_rows, fed_rows, places = ([next(views) for _ in group] for group in parts)
    active, label_slots, fed_U, document_bounds = fixed
    return Plan(
        indices=indices,
        active_N=active,
        label_slots=label_slots,
        rows=rows,
        labels=label_rows,
        planned_labels=[torch.from_numpy(own) for own in labels],
        fed_U=fed_U,
        fed_rows=fed_rows,
        places=places,
        bounds=document_bounds,
        lengths=lengths,
    )
