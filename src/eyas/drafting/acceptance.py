"""Held-out acceptance by simulated chain drafting: what greedy serving would accept, from stored states alone.

Takes the head's predictions on validation rows and the target's own choices there; gives acceptance by position and
acceptance length with a confidence interval.

The chain: at slot p the head drafts greedily from its own tokens and states. As long as a drafted token equals the
text's, feeding the draft's token and feeding the text's are the same, and after the first unequal one the chain is over;
so one pass over the text (`draft_states`) gives every chain exactly.
The walk: a turn is walked as it is served: draft from its first token, go on behind what was accepted. Steps are
counted where the walk stands, not at every slot; hard places get more steps than easy ones, and an average over slots flatters.
The approximation: the target's greedy choice is known only along the stored text. Where sampling left it at a
drafted position, the chain's later positions are unknown; chains that stayed on it stand in for them, weighted by the inverse of
the probability that the text stayed (known from the target's logits and the temperature), position by position. The walk goes on
along the text. For greedy text nothing of this applies and the simulation is exact up to numeric ties.
A token that ends its turn saves no step whether drafted or not, and counts as not accepted.
Shape legend: T slots, H hidden size, V target vocabulary, K depths, N active slots, R conversations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from eyas.drafting.data import Batch
from eyas.drafting.planning import Plan
from eyas.targets.head import TargetHead

_CHUNK = 256
_RESAMPLES = 1000


@dataclass(frozen=True)
class TargetChoice:
    """What the target does at each slot of a batch."""

    greedy_T: np.ndarray  # int64, its most likely next token; -1 where unsupervised
    stayed_T: np.ndarray  # float64, probability that the text's sampling would take that token


@dataclass(frozen=True)
class Acceptance:
    """Held-out acceptance, of drafted positions 1 to K."""

    by_position: list[float]  # accepted so far, as a share of steps
    length: float
    low: float  # 95 % bootstrap by conversation
    high: float
    steps: int


@torch.no_grad()
def target_choice(batch: Batch, target: TargetHead, temperature: float) -> TargetChoice:
    """Greedy choices over the whole vocabulary at supervised slots.

    Args:
        batch: of validation rows.
        target: final norm and output head, on the batch's device.
        temperature: that the rows were answered with; a nucleus (``top_p`` below 1) is not taken into account.
    """
    slots = torch.nonzero(batch.mask_T)[:, 0]
    greedy_T = np.full(len(batch.mask_T), -1, dtype=np.int64)
    stayed_T = np.ones(len(batch.mask_T))
    for part in slots.split(_CHUNK):
        final_NH = batch.final_TH[part.to(batch.final_TH.device)]
        logits_NV = target.logits(target.normed(final_NH))
        best_N1 = logits_NV.argmax(-1, keepdim=True)
        greedy_T[part.numpy()] = best_N1[:, 0].cpu().numpy()
        if temperature > 0:
            probabilities = torch.softmax(logits_NV / temperature, -1).gather(-1, best_N1)
            stayed_T[part.numpy()] = probabilities[:, 0].double().cpu().numpy()
    return TargetChoice(greedy_T, stayed_T)


class AcceptanceCounter:
    """Sums chains over batches, by conversation."""

    def __init__(self, depths: int) -> None:
        self._depths = depths
        nothing = partial(np.zeros, depths)  # by name, so that ranks can send it
        self._alive: dict[str, np.ndarray] = defaultdict(nothing)
        self._hits: dict[str, np.ndarray] = defaultdict(nothing)
        self._steps = 0

    def add(self, batch: Batch, plan: Plan, target_ids_KN: np.ndarray, choice: TargetChoice) -> None:
        """Walk every turn of a batch.

        Args:
            batch: of validation rows.
            plan: of the batch, made for at least as many depths.
            target_ids_KN: the head's predictions as the target's token ids, -1 where there is none.
            choice: the target's.
        """
        drafted_KT = np.full((self._depths, len(batch.mask_T)), -1, dtype=np.int64)
        drafted_KT[:, plan.active_N.cpu().numpy()] = target_ids_KN
        ids_T, mask_T = batch.input_ids_T.cpu().numpy(), batch.mask_T.numpy()
        start = 0
        for row, length in zip(batch.rows, batch.lengths, strict=True):
            for first, end in _turns(mask_T[start : start + length]):
                self._walk(row.conversation_id, start + first, start + end, drafted_KT, ids_T, choice)
            start += length

    def merge(self, other: AcceptanceCounter) -> None:
        """Add what another one has counted."""
        for own, found in ((self._alive, other._alive), (self._hits, other._hits)):
            for name, values in found.items():
                own[name] += values
        self._steps += other._steps

    def _walk(
        self, conversation: str, slot: int, end: int, drafted_KT: np.ndarray, ids_T: np.ndarray, choice: TargetChoice
    ) -> None:
        """Draft and go on until the turn's last token, the input of slot ``end - 1``, is out."""
        alive, hits = self._alive[conversation], self._hits[conversation]
        while slot + 1 < end:
            self._steps += 1
            weight, on_text = 1.0, True
            advanced = 1
            for depth in range(self._depths):
                alive[depth] += weight
                teacher = slot + depth
                # the drafted token is the input of slot teacher + 1; the turn's last saves no step
                if teacher + 2 >= end or drafted_KT[depth, slot] != choice.greedy_T[teacher]:
                    break
                hits[depth] += weight
                on_text = choice.greedy_T[teacher] == ids_T[teacher + 1]
                if not on_text:
                    break
                weight /= choice.stayed_T[teacher]
                advanced += 1
            slot += advanced

    def result(self, seed: int = 0) -> Acceptance:
        """Acceptance over all conversations added, with an interval by resampling them."""
        names = sorted(self._alive)
        alive_RK = np.stack([self._alive[n] for n in names])
        hits_RK = np.stack([self._hits[n] for n in names])
        by_position = _cumulative(hits_RK.sum(0), alive_RK.sum(0))
        draws = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), _RESAMPLES)
        lengths = 1 + _cumulative(draws @ hits_RK, draws @ alive_RK).sum(-1)
        low, high = np.percentile(lengths, [2.5, 97.5])
        return Acceptance(by_position.tolist(), float(1 + by_position.sum()), float(low), float(high), self._steps)


def _turns(mask: np.ndarray) -> Sequence[tuple[int, int]]:
    """Runs of supervised slots, as (first, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _cumulative(hits: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Product over positions of the share of chains that pass each; by the last axis."""
    share: np.ndarray = np.divide(hits, alive, out=np.zeros_like(hits, dtype=np.float64), where=alive > 0)
    return np.cumprod(share, -1)
