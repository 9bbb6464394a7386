"""The rows of `eyas.drafting.kl` on a GPU, in Triton: the gradient takes the logits' place, and no probability is held.

One program walks a row twice: for its sums, and for the gradient. The teacher stays logits in the type that they came in, where
torch's compiler wrote its probabilities in float32 and read them at each depth.

Shape legend: C labels in a chunk, M rows in a chunk, V draft vocabulary.
"""

# Triton reads the annotations of a kernel as its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

# of some that were tried at 32,000 columns (docs/performance.md)
_BLOCK = 4096
_WARPS = 8


@triton.jit
def _capped(x, cap, CAPPED: tl.constexpr):
    if CAPPED:  # cap * tanh(x / cap)
        x = cap * (2.0 / (1.0 + tl.exp(-2.0 * x / cap)) - 1.0)
    return x


@triton.jit
def _teacher(logits, best, partition, entropy, columns, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    largest, place, total, mean = float("-inf"), 0, 0.0, 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        x = _capped(tl.load(logits + offsets, mask=inside, other=0.0).to(tl.float32), cap, CAPPED)
        x = tl.where(inside, x, float("-inf"))
        block_largest, block_place = tl.max(x, 0), tl.argmax(x, 0)
        place = tl.where(block_largest > largest, start + block_place, place)
        raised = tl.maximum(largest, block_largest)
        shrunk = tl.exp(largest - raised)
        weight = tl.exp(x - raised)
        total = total * shrunk + tl.sum(weight, 0)
        mean = mean * shrunk + tl.sum(tl.where(inside, weight * x, 0.0), 0)
        largest = raised
    whole = largest + tl.log(total)
    tl.store(best + row, place)
    tl.store(partition + row, whole)
    tl.store(entropy + row, whole - mean / total)


@triton.jit
def _student(
    logits, taught, partition, entropy, labels, scale, loss, best, columns, cap,
    CAPPED: tl.constexpr, CHOSEN: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row) if CHOSEN else row
    logits += row * columns
    taught += label * columns
    taught_whole = tl.load(partition + label)
    largest, place, total, cross = float("-inf"), 0, 0.0, 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        x = tl.load(logits + offsets, mask=inside, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        t = tl.load(taught + offsets, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        wanted = tl.exp(_capped(t, cap, CAPPED) - taught_whole)
        block_largest, block_place = tl.max(x, 0), tl.argmax(x, 0)
        place = tl.where(block_largest > largest, start + block_place, place)
        raised = tl.maximum(largest, block_largest)
        total = total * tl.exp(largest - raised) + tl.sum(tl.exp(x - raised), 0)
        cross += tl.sum(tl.where(inside, wanted * x, 0.0), 0)
        largest = raised
    whole = largest + tl.log(total)
    tl.store(best + row, place)
    tl.store(loss + row, whole - cross - tl.load(entropy + label))
    if GRADIENT:
        factor = tl.load(scale)
        for start in range(0, columns, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < columns
            x = tl.load(logits + offsets, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            t = tl.load(taught + offsets, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            wanted = tl.exp(_capped(t, cap, CAPPED) - taught_whole)
            slope = (tl.exp(x - whole) - wanted) * factor
            tl.store(logits + offsets, slope.to(logits.dtype.element_ty), mask=inside)


def teacher_rows(logits_CV: torch.Tensor, cap: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Most likely tokens int64 [C], log-partitions and entropies float32 [C] of logits, held within ±cap where it is given."""
    count, columns = logits_CV.shape
    best_C = torch.empty(count, dtype=torch.long, device=logits_CV.device)
    partition_C, entropy_C = torch.empty(2, count, device=logits_CV.device)
    _teacher[(count,)](
        logits_CV, best_C, partition_C, entropy_C, columns, cap or 1.0, CAPPED=cap is not None, BLOCK=_BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip
    return best_C, partition_C, entropy_C


def student_rows(
    logits_MV: torch.Tensor,
    teacher_CV: torch.Tensor,
    partition_C: torch.Tensor,
    entropy_C: torch.Tensor,
    cap: float | None,
    labels_M: torch.Tensor | None,
    weight: torch.Tensor,
    gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL divergences float32 [M] and most likely tokens int64 [M]; with ``gradient`` the weighted slope replaces the logits.

    Args:
        logits_MV: of the head, contiguous.
        teacher_CV: the target's logits, contiguous.
        partition_C: of `teacher_rows`.
        entropy_C: of `teacher_rows`.
        cap: as given to `teacher_rows`.
        labels_M: the teacher's row of each row; None where they are the same.
        weight: of the gradient; one number on the device.
        gradient: whether it is asked for.
    """
    count, columns = logits_MV.shape
    loss_M = torch.empty(count, device=logits_MV.device)
    best_M = torch.empty(count, dtype=torch.long, device=logits_MV.device)
    _student[(count,)](
        logits_MV, teacher_CV, partition_C, entropy_C, labels_M, weight, loss_M, best_M, columns, cap or 1.0,
        CAPPED=cap is not None, CHOSEN=labels_M is not None, GRADIENT=gradient, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return loss_M, best_M
