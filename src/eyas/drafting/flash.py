"""Attention of a drafting chain on a GPU: FlashAttention over depth 0's keys, merged with the chain's own few keys.

What a chain's query sees is depth 0's keys of its document up to its slot, and one key of its own for each later depth. The
first part is one call of FlashAttention for all documents; its log-partition is joined with the own keys' scores, and in
the backward pass FlashAttention takes the joint output and log-partition, from which the joint probabilities follow
(https://arxiv.org/abs/2307.08691, section 3.1). No score is ever held.

Shape legend: T slots, N active slots, h attention heads, k key-value heads, d head size, E the chain's own keys.
"""

from __future__ import annotations

from typing import Any

import torch

from eyas.drafting.fused import compiled

_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
_LARGEST_HEAD = 256


def flash_serves(q_Nhd: torch.Tensor, values_Tkd: torch.Tensor) -> bool:
    """Whether the kernel takes such tensors: half precision on a GPU, heads of a multiple of 8 up to 256."""
    size = q_Nhd.shape[-1]
    half = values_Tkd.dtype in (torch.bfloat16, torch.float16)
    return bool(values_Tkd.is_cuda and half and size % 8 == 0 and size <= _LARGEST_HEAD)


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_Nhd: torch.Tensor,
        keys_Tkd: torch.Tensor,
        values_Tkd: torch.Tensor,
        active_N: torch.Tensor | None,
        starts: torch.Tensor,
        longest: int,
        scaling: float,
        left: int | None,
        *own: torch.Tensor,
    ) -> torch.Tensor:
        q_Thd = _spread(q_Nhd, active_N, len(keys_Tkd))
        out_Thd, partition_hT, seed, unused, _ = _flash_forward(
            q_Thd, keys_Tkd, values_Tkd, starts, starts, longest, longest, 0.0, True, False,
            scale=scaling, window_size_left=left, window_size_right=None if left is None else 0,
        )  # fmt: skip
        out_Nhd, partition_Nh = out_Thd, partition_hT.T
        if active_N is not None:
            out_Nhd, partition_Nh = out_Thd[active_N], partition_Nh[active_N]
        if own:
            out_Nhd, partition_Nh = compiled(_join)(q_Nhd, out_Nhd, partition_Nh, own, scaling)
        ctx.save_for_backward(
            q_Nhd, keys_Tkd, values_Tkd, active_N, starts, out_Nhd, partition_Nh, partition_hT, seed, unused, *own
        )
        ctx.longest, ctx.scaling, ctx.left = longest, scaling, left
        joint: torch.Tensor = out_Nhd
        return joint

    @staticmethod
    def backward(ctx: Any, grad_Nhd: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_Nhd, keys_Tkd, values_Tkd, active_N, starts, out_Nhd, partition_Nh, before_hT, seed, unused, *own = (
            ctx.saved_tensors
        )
        grad_Nhd, slots = grad_Nhd.contiguous(), len(keys_Tkd)
        joint_hT = partition_Nh.T.contiguous()
        if active_N is not None:  # other slots have no gradient, so that any finite partition serves there
            joint_hT = before_hT.index_copy(1, active_N, joint_hT)
        q_grad_Thd, keys_grad, values_grad = _flash_backward(
            _spread(grad_Nhd, active_N, slots), _spread(q_Nhd, active_N, slots), keys_Tkd, values_Tkd,
            _spread(out_Nhd, active_N, slots), joint_hT, starts, starts, ctx.longest, ctx.longest, 0.0, True,
            seed, unused, scale=ctx.scaling, window_size_left=ctx.left,
            window_size_right=None if ctx.left is None else 0,
        )  # fmt: skip
        q_grad_Nhd = q_grad_Thd if active_N is None else q_grad_Thd[active_N]
        if not own:
            return q_grad_Nhd, keys_grad, values_grad, *[None] * 5
        q_grad_Nhd, own_grads = compiled(_own_gradients)(
            q_Nhd, q_grad_Nhd, grad_Nhd, out_Nhd, partition_Nh, tuple(own), ctx.scaling
        )
        return q_grad_Nhd, keys_grad, values_grad, *[None] * 5, *own_grads


def _spread(x_Nhd: torch.Tensor, active_N: torch.Tensor | None, slots: int) -> torch.Tensor:
    """Rows back to their slots, zeros between."""
    if active_N is None:
        return x_Nhd
    return x_Nhd.new_zeros(slots, *x_Nhd.shape[1:]).index_copy_(0, active_N, x_Nhd)


def _grouped(x_Nhd: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[N, h, d] → [N, k, h / k, d], for products with keys [N, k, 1, d]."""
    grouped: torch.Tensor = x_Nhd.unflatten(1, (kv_heads, -1))
    return grouped.float()


def _join(
    q_Nhd: torch.Tensor,
    out_Nhd: torch.Tensor,
    partition_Nh: torch.Tensor,
    own: tuple[torch.Tensor, ...],
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-partition with the own keys among the others."""
    kv_heads = own[0].shape[1]
    q = _grouped(q_Nhd, kv_heads)
    scores = [(q * key.unsqueeze(2)).sum(-1).flatten(1) * scaling for key in own[::2]]
    joint_Nh = torch.logsumexp(torch.stack([partition_Nh, *scores]), 0)
    mixed = _grouped(out_Nhd, kv_heads) * (partition_Nh - joint_Nh).exp().unflatten(1, (kv_heads, -1)).unsqueeze(-1)
    for score, value in zip(scores, own[1::2], strict=True):
        weight = (score - joint_Nh).exp().unflatten(1, (kv_heads, -1)).unsqueeze(-1)
        mixed = mixed + weight * value.unsqueeze(2)
    return mixed.flatten(1, 2).to(out_Nhd.dtype), joint_Nh


def _own_gradients(
    q_Nhd: torch.Tensor,
    q_grad_Nhd: torch.Tensor,
    grad_Nhd: torch.Tensor,
    out_Nhd: torch.Tensor,
    partition_Nh: torch.Tensor,
    own: tuple[torch.Tensor, ...],
    scaling: float,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The queries' gradient with the own keys' share, and the gradients of own keys and values, key by key."""
    kv_heads = own[0].shape[1]
    q, grad, q_grad = (_grouped(x, kv_heads) for x in (q_Nhd, grad_Nhd, q_grad_Nhd))
    delta = (grad * _grouped(out_Nhd, kv_heads)).sum(-1, keepdim=True)
    partition = partition_Nh.unflatten(1, (kv_heads, -1)).unsqueeze(-1)
    grads: list[torch.Tensor] = []
    for key, value in zip(own[::2], own[1::2], strict=True):
        weight = ((q * key.unsqueeze(2)).sum(-1, keepdim=True) * scaling - partition).exp()
        slope = weight * ((grad * value.unsqueeze(2)).sum(-1, keepdim=True) - delta) * scaling
        q_grad = q_grad + slope * key.unsqueeze(2)
        grads += [(slope * q).sum(2).to(key.dtype), (weight * grad).sum(2).to(value.dtype)]
    return q_grad.flatten(1, 2).to(q_grad_Nhd.dtype), grads


def chain_attention(
    q_Nhd: torch.Tensor,
    keys_Tkd: torch.Tensor,
    values_Tkd: torch.Tensor,
    active_N: torch.Tensor | None,
    own: list[tuple[torch.Tensor, torch.Tensor]],
    bounds: torch.Tensor,
    longest: int,
    scaling: float,
    left: int | None,
) -> torch.Tensor:
    """Attention of each query to its document's keys up to its slot, and to its own later ones.

    Args:
        q_Nhd: queries at active slots.
        keys_Tkd: depth 0's keys at all slots, in the values' type or wider.
        values_Tkd: depth 0's values, bfloat16 or float16.
        active_N: the active slots, or None where all are.
        own: keys and values [N, k, d] of the later depths so far.
        bounds: [documents + 1], where documents begin, and the end; on the device.
        longest: slots of the longest document.
        scaling: of the scores.
        left: how many slots before its own a query still sees; None for all.

    Returns:
        [N, h * d], in the values' type.
    """
    dtype = values_Tkd.dtype
    flat = [tensor.to(dtype).contiguous() for pair in own for tensor in pair]
    out_Nhd: torch.Tensor = _ChainAttention.apply(  # type: ignore[no-untyped-call]
        q_Nhd.to(dtype).contiguous(), keys_Tkd.to(dtype).contiguous(), values_Tkd.contiguous(), active_N, bounds.int(),
        longest, scaling, left, *flat,
    )  # fmt: skip
    return out_Nhd.flatten(1)
