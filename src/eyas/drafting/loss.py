"""The head's loss against the target's own distribution, at supervised slots and for all depths, with its gradient and predictions.

Takes the states of `eyas.drafting.forward`; the teacher is asked once for each label, and no logits outlive their chunk.
Shape legend: N active slots, K depths, C labels in a chunk, M rows in a chunk, P columns in a part, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from torch.nn import functional

from eyas.drafting.data import Batch
from eyas.drafting.forward import compute_type, normed_as
from eyas.drafting.fused import on_device
from eyas.drafting.kl import kl_rows, taught
from eyas.drafting.planning import Plan
from eyas.targets.head import soft_capped

_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 28}
_CPU_COLUMNS = 512
# speculators divides by the count plus this
_REDUCTION_EPS = 1e-5


class _Precomputed(torch.autograd.Function):
    """A loss whose gradient was computed with it."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, loss: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * output, None, None


@dataclass(frozen=True)
class HeadLoss:
    """Loss (differentiable where asked), and what the head predicts."""

    loss: torch.Tensor
    by_depth_K: torch.Tensor  # float32, undecayed
    draft_ids_KN: torch.Tensor  # int64, most likely draft token; -1 where a depth has no label
    hits_K: torch.Tensor  # float32, labels whose most likely draft token is the target's own


def _logits(states_MH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """The product with an output head; on a CPU in parts that stay in its cache, which is up to 1.6 times as fast."""
    if states_MH.is_cuda:
        return functional.linear(states_MH, weight_VH)
    logits_MV = states_MH.new_empty(len(states_MH), len(weight_VH))
    for part_MP, weight_PH in zip(logits_MV.split(_CPU_COLUMNS, 1), weight_VH.split(_CPU_COLUMNS), strict=True):
        torch.mm(states_MH, weight_PH.T, out=part_MP)
    return logits_MV


def head_loss(
    model: Eagle3DraftModel,
    states_KNH: torch.Tensor,
    batch: Batch,
    plan: Plan,
    loss: str,
    decay: float,
    gradient: bool,
    label_counts_K: Sequence[int] | None = None,
) -> HeadLoss:
    """Loss of every depth against the target's own distribution over the draft vocabulary.

    A depth's loss is the mean over its labels, depth d weighs ``decay ** d``, as in speculators. Labels go through in
    chunks; each chunk's teacher is computed once and serves all depths.

    Args:
        model: gives output head, and the target's norm and head.
        states_KNH: of `draft_states`.
        batch: has the target's final states.
        plan: of the batch.
        loss: a name that speculators knows.
        decay: weight of a depth by the one before.
        gradient: whether the loss is to be differentiated by the states.
        label_counts_K: labels that each depth's loss is the mean over, where the batch is a part of a step; default: its own.
    """
    depths, active = states_KNH.shape[:2]
    device = states_KNH.device
    # autocast itself would convert a frozen weight at each use
    weight_VH, teacher_VH = (
        head.weight.to(compute_type(head.weight)) for head in (model.lm_head, model.verifier_lm_head)
    )
    loss_function = None if loss == "kl_div" else resolve_loss_config(loss, "eager")[loss][0]
    by_depth_K, hits_K = torch.zeros(depths, device=device), torch.zeros(depths, device=device)
    draft_ids_KN = torch.full((depths, active), -1, dtype=torch.long, device=device)
    gradient_KNH = torch.zeros_like(states_KNH) if gradient else states_KNH.new_zeros(0)
    counts_K = label_counts_K if label_counts_K is not None else [len(rows) for rows in plan.rows]
    # filled there: a copy from here would wait until the device is done with all before it
    scales_K = torch.stack([torch.full((), 1.0 / (count + _REDUCTION_EPS), device=device) for count in counts_K])
    decays_K = decay ** torch.arange(depths, device=device)
    weights_K = scales_K * decays_K
    cap = getattr(model, "teacher_softcap", None)
    total = len(plan.label_slots)
    parts = max(1, -(-total * weight_VH.element_size() * len(weight_VH) // _CHUNK_BYTES[device.type]))
    chunk = -(-total // parts)
    bounds = torch.arange(0, total + chunk, chunk)
    cuts = [torch.searchsorted(labels, bounds).tolist() for labels in plan.planned_labels]
    with torch.no_grad():
        for number, first in enumerate(range(0, total, chunk)):
            final_CH = batch.final_TH[plan.label_slots[first : first + chunk]].float()
            asked_CH = on_device(normed_as, device)(model.verifier_norm, final_CH, teacher_VH.dtype)
            teacher_CV = _logits(asked_CH, teacher_VH)
            if loss_function is None:
                teacher = taught(teacher_CV, cap)
                best_C = teacher.best_C
            else:
                teacher_CV = soft_capped(teacher_CV.float(), cap)
                best_C = teacher_CV.argmax(-1)
            for depth in range(depths):
                here = slice(cuts[depth][number], cuts[depth][number + 1])
                rows_M, labels_M = plan.rows[depth][here], plan.labels[depth][here] - first
                if not len(rows_M):
                    continue
                chosen_M = None if len(labels_M) == len(teacher_CV) else labels_M
                states_MH = states_KNH[depth, rows_M].to(weight_VH.dtype)
                logits_MV = _logits(states_MH, weight_VH)
                if loss_function is None:
                    loss_M, best_M, slope_MV = kl_rows(logits_MV, teacher, chosen_M, weights_K[depth], gradient)
                else:
                    logits_MV, teacher_MV = logits_MV.float(), teacher_CV[labels_M]
                    best_M = logits_MV.argmax(-1)
                    with torch.enable_grad():
                        logits_MV.requires_grad_(gradient)
                        loss_M = loss_function(logits_MV[None], teacher_MV[None])[0]
                        slope_MV = (
                            torch.autograd.grad(loss_M.sum() * weights_K[depth], logits_MV)[0] if gradient else None
                        )
                by_depth_K[depth] += loss_M.detach().sum() * scales_K[depth]
                draft_ids_KN[depth].index_copy_(0, rows_M, best_M)
                hits_K[depth] += (best_M == best_C[labels_M]).sum()
                if slope_MV is not None:
                    pulled_MH = functional.linear(slope_MV, weight_VH.T)
                    gradient_KNH[depth].index_copy_(0, rows_M, pulled_MH.to(gradient_KNH.dtype))
    value = (by_depth_K * decays_K).sum()
    if gradient:
        value = _Precomputed.apply(states_KNH, value, gradient_KNH)  # type: ignore[no-untyped-call]
    return HeadLoss(value, by_depth_K, draft_ids_KN, hits_K)
