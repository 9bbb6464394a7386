"""The feed-forward part's products of a training step in float8.

Both inputs of a product are rounded to e4m3 with one scale a row (a weight's, along what is summed over), much as in torchao's recipe
`rowwise_with_gw_hp` (https://github.com/pytorch/ao/tree/main/torchao/float8); sums come out in bfloat16. A weight's gradient is
computed in bfloat16, and so is all else: attention, output head, teacher, held-out rows. Products with the output head are left out
because a head trained on seven million tokens was accepted less with them (`docs/performance.md`). On a GPU these are its float8 products
(compute capability 8.9 or later); on a CPU the same numbers, for tests.

Shape legend: M rows, K what is summed over, N columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from eyas.errors import EyasError

LARGEST = 448.0  # of e4m3
LEAST = 1e-30  # a row's largest entry is taken for at least this
_MULTIPLE = 16  # sizes that float8 products take
_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Rounded:
    """Rows of float8 numbers, each with a scale."""

    values_MK: torch.Tensor  # float8_e4m3fn
    scales_M1: torch.Tensor  # float32


def rounded(x_MK: torch.Tensor) -> Rounded:
    """Rows such that the largest magnitude of each becomes 448; what is no number stays none."""
    x_MK = x_MK.contiguous()
    if x_MK.is_cuda:
        from eyas.drafting.float8_kernels import rounded_rows

        return Rounded(*rounded_rows(x_MK))
    scales_M1 = x_MK.abs().amax(-1, keepdim=True).float().clamp(min=LEAST) / LARGEST
    return Rounded((x_MK / scales_M1).to(torch.float8_e4m3fn), scales_M1)


def rounded_columns(x_NK: torch.Tensor) -> Rounded:
    """The columns, as `rounded` does it with the rows of the transpose."""
    if x_NK.is_cuda:
        from eyas.drafting.float8_kernels import rounded_transpose

        return Rounded(*rounded_transpose(x_NK.contiguous()))
    return rounded(x_NK.T)


def product(a: Rounded, b: Rounded) -> torch.Tensor:
    """Rows of ``a`` [M, K] times rows of ``b`` [N, K]: [M, N] in bfloat16."""
    if a.values_MK.is_cuda:
        by_row = functional.ScalingType.RowWise
        summed: torch.Tensor = functional.scaled_mm(
            a.values_MK, b.values_MK.T, a.scales_M1, by_row, b.scales_M1, by_row, use_fast_accum=True
        )
        return summed
    with torch.autocast("cpu", enabled=False):
        return (a.values_MK.float() @ b.values_MK.float().T * a.scales_M1 * b.scales_M1.T).bfloat16()


class Float8Weight:
    """A weight [N, K] for products with it and back, rounded along K for the one and along N for the other."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._by_output, self._by_input = rounded(weight_NK), rounded_columns(weight_NK)

    def forward(self, x_MK: torch.Tensor) -> torch.Tensor:
        """[M, N]."""
        return product(rounded(x_MK), self._by_output)

    def backward(self, gradient_MN: torch.Tensor) -> torch.Tensor:
        """Gradient [M, K] by the product's input."""
        return product(rounded(gradient_MN), self._by_input)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight_NK: torch.Tensor, float8: Float8Weight) -> torch.Tensor:
        ctx.save_for_backward(x_MK)
        ctx.float8 = float8
        return float8.forward(x_MK)

    @staticmethod
    def backward(ctx: Any, gradient_MN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x_MK,) = ctx.saved_tensors
        return ctx.float8.backward(gradient_MN), gradient_MN.T @ x_MK, None


def linear(projection: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The projection (a `torch.nn.Linear` without bias) of bfloat16 rows; its weight is rounded now, for as many calls as come."""
    weight_NK = projection.weight.bfloat16()
    float8 = Float8Weight(weight_NK.detach())

    def projected(x_MK: torch.Tensor) -> torch.Tensor:
        product_MN: torch.Tensor = _Linear.apply(x_MK, weight_NK, float8)  # type: ignore[no-untyped-call]
        return product_MN

    return projected


def check_float8(model: Any, device: torch.device) -> None:
    """See whether a head can be trained so.

    Raises:
        EyasError: the GPU has no float8 products, or a size is not a multiple of 16.
    """
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        raise EyasError(
            f"train.autocast float8: {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, "
            "8.9 or later is needed; set train.autocast: bfloat16"
        )
    intermediate, hidden = model.layers[0].mlp.up_proj.weight.shape
    for name, size, or_else in (
        ("hidden size", hidden, ""),
        ("intermediate size", intermediate, ", or another draft.intermediate_size"),
    ):
        if size % _MULTIPLE:
            raise EyasError(
                f"train.autocast float8: the head's {name} is {size}, which is no multiple of {_MULTIPLE}; set "
                f"train.autocast: bfloat16{or_else}"
            )
