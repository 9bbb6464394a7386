"""One optimiser step over the packs of a global batch.

Takes a rank's packs; gives the step's figures, the same on every rank. A loss does not depend on how the packs are dealt out:
it is scaled by the labels of the whole step, and gradients are sums.
Shape legend: K depths, M packs of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from eyas.drafting.feeding import Planned
from eyas.drafting.flops import pack_flops
from eyas.drafting.global_batch import Share
from eyas.drafting.gradients import Together, full
from eyas.drafting.loss import head_loss
from eyas.drafting.ranks import Ranks
from eyas.params import TrainParams


@dataclass(frozen=True)
class StepFigures:
    """What one step gave; norm before clipping."""

    loss: float
    by_depth: list[float]  # undecayed
    hits: list[float]  # labels that were drafted as the target would have it, by depth
    grad_norm: float
    flops: float
    bad_packs: list[int]  # whose loss is not finite
    stop: bool  # some rank was asked to stop
    save: bool  # the first rank wants a checkpoint

    @property
    def finite(self) -> bool:
        """Whether the weights may be changed by it."""
        return not self.bad_packs and math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def autocast(params: TrainParams, device: torch.device) -> torch.autocast:
    """The compute type of the head; what is computed in float8 is chosen beside it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=params.autocast != "float32")


def gradients(
    head: Together,
    batches: Iterator[Planned],
    shares: Sequence[Share],
    label_counts_K: Sequence[int],
    packs: int,
    params: TrainParams,
    ranks: Ranks,
    asked: tuple[bool, bool],
    weights: Sequence[torch.nn.Parameter],
) -> StepFigures:
    """Loss and clipped gradient of a step; the weights are not changed.

    Args:
        head: gathers the gradients.
        batches: this rank's packs with their plans, one for each of ``shares``.
        shares: this rank's part of the step.
        label_counts_K: labels of the whole step.
        packs: of the whole step.
        params: of the optimisation.
        ranks: that take part.
        asked: whether this rank was asked to stop, and whether it wants a checkpoint.
        weights: that are trained.
    """
    depths = params.ttt_steps
    for weight in weights:
        weight.grad = None
    outputs = []
    flops = 0.0
    for place, share in enumerate(shares):
        batch, plan = next(batches)
        with autocast(params, batch.input_ids_T.device):
            states_KNH = head.states(batch, plan, depths)
            out = head_loss(head.model, states_KNH, batch, plan, params.loss, params.ttt_decay, True, label_counts_K)
        head.before_backward(place == len(shares) - 1)
        (out.loss if share.counts else out.loss * 0.0).backward()
        if share.counts:
            outputs.append((share.pack, out))
            flops += pack_flops(head.model, batch, plan, depths)
    head.wait()
    norm = full(torch.nn.utils.clip_grad_norm_(weights, params.clip_norm)).item()
    pack_loss_M = torch.zeros(packs, dtype=torch.float64)
    sums = torch.zeros(2, depths, dtype=torch.float64)  # of losses, of hits
    for pack, out in outputs:
        pack_loss_M[pack] = out.loss.item()
        sums += torch.stack([out.by_depth_K, out.hits_K]).cpu()
    # float64 holds sums of a few float32 values to the last bit that they have
    own = torch.tensor([flops, *asked], dtype=torch.float64)
    whole = ranks.total(torch.cat([own, sums.flatten(), pack_loss_M]))
    flops, stops, saves = whole[:3].tolist()
    by_depth, hits = whole[3 : 3 + 2 * depths].view(2, depths).tolist()
    losses = whole[3 + 2 * depths :].tolist()
    bad = [pack for pack, value in enumerate(losses) if not math.isfinite(value)]
    return StepFigures(sum(losses), by_depth, hits, norm, flops, bad, stops > 0, saves > 0)
