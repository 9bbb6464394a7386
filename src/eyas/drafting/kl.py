"""KL divergence of the head's distribution from the target's own, row by row, with its gradient by the head's logits.

On a CPU in torch's own operations; on a GPU by `eyas.drafting.kl_kernels`.

Shape legend: C labels in a chunk, M rows in a chunk, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.targets.head import soft_capped


@dataclass(frozen=True)
class Teacher:
    """What the target says at the labels of a chunk."""

    values_CV: torch.Tensor  # on a CPU probabilities, float32; on a GPU logits, as they came
    best_C: torch.Tensor  # int64, most likely tokens
    entropy_C: torch.Tensor  # float32
    partition_C: torch.Tensor  # float32, of the logits
    cap: float | None  # of the logits


def taught(logits_CV: torch.Tensor, cap: float | None) -> Teacher:
    """Take the target's logits, held within ±``cap`` where it is given.

    On a CPU the log-partition comes out of the softmax at its largest entry; `torch.logsumexp` takes ten times as long there.
    """
    if logits_CV.is_cuda:
        from eyas.drafting.kl_kernels import teacher_rows

        best_C, partition_C, entropy_C = teacher_rows(logits_CV, cap)
        return Teacher(logits_CV, best_C, entropy_C, partition_C, cap)
    logits_CV = soft_capped(logits_CV.float(), cap)
    best_C1 = logits_CV.argmax(-1, keepdim=True)
    probabilities_CV = torch.softmax(logits_CV, -1)
    partition_C = _partition(logits_CV, probabilities_CV, best_C1)
    entropy_C = partition_C - (probabilities_CV * logits_CV).sum(-1)
    return Teacher(probabilities_CV, best_C1[:, 0], entropy_C, partition_C, cap)


def kl_rows(
    logits_MV: torch.Tensor, teacher: Teacher, labels_M: torch.Tensor | None, weight: torch.Tensor, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """KL divergences float32 [M], most likely tokens int64 [M], and the weighted gradient by the logits, in their type.

    Args:
        logits_MV: of the head; overwritten on a GPU.
        teacher: of the chunk.
        labels_M: which of its rows each row has; None where they are the same.
        weight: of the gradient, one number on the device.
        gradient: whether it is wanted; None is given otherwise.
    """
    if logits_MV.is_cuda:
        from eyas.drafting.kl_kernels import student_rows

        logits_CV, partition_C, entropy_C = teacher.values_CV, teacher.partition_C, teacher.entropy_C
        loss_M, best_M = student_rows(
            logits_MV, logits_CV, partition_C, entropy_C, teacher.cap, labels_M, weight, gradient
        )
        return loss_M, best_M, logits_MV if gradient else None
    teacher_MV, entropy_M = teacher.values_CV, teacher.entropy_C
    if labels_M is not None:
        teacher_MV, entropy_M = teacher_MV[labels_M], entropy_M[labels_M]
    dtype, logits_MV = logits_MV.dtype, logits_MV.float()
    best_M1 = logits_MV.argmax(-1, keepdim=True)
    cross_M = (teacher_MV * logits_MV).sum(-1)
    drafted_MV = torch.softmax(logits_MV, -1)
    loss_M = _partition(logits_MV, drafted_MV, best_M1) - cross_M - entropy_M
    return loss_M, best_M1[:, 0], drafted_MV.sub_(teacher_MV).mul_(weight).to(dtype) if gradient else None


def _partition(logits_MV: torch.Tensor, probabilities_MV: torch.Tensor, best_M1: torch.Tensor) -> torch.Tensor:
    return logits_MV.gather(-1, best_M1)[:, 0] - probabilities_MV.gather(-1, best_M1)[:, 0].log()
