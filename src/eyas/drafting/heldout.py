"""Held-out rows judged after each epoch: loss, and acceptance by simulated chain drafting.

Takes the validation rows and the target's whole head; gives figures that do not depend on the number of ranks: each judges
every so many batches, and what they found is added up in the batches' order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch

from eyas.console import Progress
from eyas.drafting.acceptance import Acceptance, AcceptanceCounter, TargetChoice, target_choice
from eyas.drafting.data import Batch, TrainingData, by_key
from eyas.drafting.feeding import Planned, device_batches
from eyas.drafting.forward import draft_states
from eyas.drafting.global_batch import selected
from eyas.drafting.gradients import Together
from eyas.drafting.loss import head_loss
from eyas.drafting.planning import Plan
from eyas.drafting.ranks import Ranks, training_device
from eyas.drafting.stepping import autocast
from eyas.drafting.stopping import Stop, StopAsked
from eyas.params import TrainParams
from eyas.store.batches import PackedBatches
from eyas.targets.head import TargetHead


class Heldout:
    """Validation batches' fixed part, computed once: the target's choices."""

    def __init__(
        self, data: TrainingData, params: TrainParams, target: TargetHead, temperature: float, ranks: Ranks
    ) -> None:
        self._rows, self._workers, self._ranks = by_key(data.heldout), data.workers, ranks
        plan = PackedBatches(data.reader, list(self._rows), params.pack_tokens, params.seed, epoch=0)
        self._batches = selected(plan, range(ranks.rank, len(plan), ranks.world))
        self._params, self._device = params, training_device()
        self._choices: list[TargetChoice] = []
        on_device = replace(
            target, norm_weight_H=target.norm_weight_H.to(self._device), head_VH=target.head_VH.to(self._device)
        )
        with Progress("the target's choices on held-out rows", len(self._batches), "batches") as progress:
            with self._open() as batches:
                for batch, _ in batches:
                    self._choices.append(target_choice(batch, on_device, temperature))
                    progress.advance()

    def _open(self) -> AbstractContextManager[Iterator[Planned]]:
        depths = self._params.ttt_steps
        return device_batches(self._batches, self._rows, self._device, self._workers, depths)

    @torch.no_grad()
    def evaluate(self, head: Together, stop: Stop) -> tuple[float, Acceptance]:
        """Loss, and acceptance by simulated chain drafting as deep as the head is trained.

        Raises:
            StopAsked: some rank was asked to stop; every rank raises it.
        """
        judged = []
        with head.whole(), self._open() as batches:
            for (batch, plan), choice in zip(batches, self._choices, strict=True):
                if stop.signal:
                    break
                judged.append(self._judge(head, batch, plan, choice))
        by_rank = self._ranks.gathered((stop.signal is not None, judged))
        if any(stopped for stopped, _ in by_rank):
            raise StopAsked
        counter = AcceptanceCounter(self._params.ttt_steps)
        losses, weights = [], []
        for place in range(sum(len(found) for _, found in by_rank)):
            loss, labels, counted = by_rank[place % self._ranks.world][1][place // self._ranks.world]
            losses.append(loss)
            weights.append(labels)
            counter.merge(counted)
        return float(np.average(losses, weights=weights)), counter.result()

    def _judge(
        self, head: Together, batch: Batch, plan: Plan, choice: TargetChoice
    ) -> tuple[float, int, AcceptanceCounter]:
        """Loss, labels and walks of one batch."""
        model, params, depths = head.model, self._params, self._params.ttt_steps
        with autocast(params, self._device):
            states_KNH = draft_states(model, batch, plan, depths)
            out = head_loss(model, states_KNH, batch, plan, params.loss, params.ttt_decay, False)
        ids_KN = out.draft_ids_KN.cpu().numpy()
        if model.d2t is not None:
            ids_KN = np.where(ids_KN >= 0, ids_KN + model.d2t.cpu().numpy()[ids_KN], -1)
        counter = AcceptanceCounter(depths)
        counter.add(batch, plan, ids_KN, choice)
        return out.loss.item(), len(plan.label_slots), counter
