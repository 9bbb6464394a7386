"""What the training step has done for it on a GPU: functions compiled into few kernels, and gathers with a cheap gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for any number of rows; not before it is used, for importing the compiler takes seconds."""
    return torch.compile(function, dynamic=True)


def on_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function as it is to run there: compiled on a GPU, as it stands on a CPU."""
    return compiled(function) if device.type == "cuda" else function


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(chosen)
        ctx.count = len(rows)
        return rows.index_select(0, chosen)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (chosen,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.count, *gradient.shape[1:]).index_copy_(0, chosen, gradient), None


def take(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows by their numbers, each at most once, so that the gradient is a copy and no sum (which is slow where it must be exact)."""
    taken: torch.Tensor = _Take.apply(rows, chosen)  # type: ignore[no-untyped-call]
    return taken
