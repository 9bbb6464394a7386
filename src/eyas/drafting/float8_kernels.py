"""Rounding to float8 on a GPU, in Triton.

By rows: one program a row, which is read for its largest entry, and again to be written. By columns, for a weight's way back: a
program a tile, which is written transposed, as the product wants it (a transposed copy that is rounded by rows took 0.3 ms for 50 M
numbers, most of it for the copy).

Shape legend: M rows, N rows of a weight, K columns.
"""

# Triton reads the annotations of a kernel as its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.drafting import float8

_BLOCK = 4096
_WARPS = 8
_TILE = 64


@triton.jit
def _round(rows, values, scales, columns, LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    rows += row * columns
    values += row * columns
    largest = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(rows + offsets, mask=offsets < columns, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
    largest = tl.maximum(largest, LEAST)
    tl.store(scales + row, largest / LARGEST)
    factor = LARGEST / largest
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        x = tl.load(rows + offsets, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(values + offsets, (x * factor).to(values.dtype.element_ty), mask=inside)


@triton.jit
def _round_transposed(rows, values, factors, height, width, TILE: tl.constexpr):
    down = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    across = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (down < height)[:, None] & (across < width)[None, :]
    x = tl.load(rows + down[:, None] * width + across[None, :], mask=inside, other=0.0).to(tl.float32)
    x *= tl.load(factors + across, mask=across < width, other=0.0)[None, :]
    turned = tl.trans(x.to(values.dtype.element_ty))
    tl.store(values + across[:, None] * height + down[None, :], turned, mask=tl.trans(inside))


def rounded_rows(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values float8_e4m3fn [M, K] and scales float32 [M, 1] of contiguous rows, as `eyas.drafting.float8.rounded` says."""
    count, columns = x_MK.shape
    values_MK = torch.empty_like(x_MK, dtype=torch.float8_e4m3fn)
    scales_M1 = torch.empty(count, 1, device=x_MK.device)
    if count:
        _round[(count,)](
            x_MK,
            values_MK,
            scales_M1,
            columns,
            LARGEST=float8.LARGEST,
            LEAST=float8.LEAST,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return values_MK, scales_M1


def rounded_transpose(x_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values float8_e4m3fn [K, N] and scales float32 [K, 1] of a contiguous matrix, as `eyas.drafting.float8.rounded_columns` says."""
    height, width = x_NK.shape
    values_KN = torch.empty(width, height, dtype=torch.float8_e4m3fn, device=x_NK.device)
    largest_K = torch.linalg.vector_norm(x_NK, torch.inf, dim=0).float().clamp(min=float8.LEAST)
    grid = (triton.cdiv(height, _TILE), triton.cdiv(width, _TILE))
    _round_transposed[grid](x_NK, values_KN, float8.LARGEST / largest_K, height, width, TILE=_TILE)
    return values_KN, largest_K[:, None] / float8.LARGEST
