"""Optimisers by name and the course of their rate.

Takes a head's trainable weights by name and `TrainParams`; gives torch optimisers whose moments are float32 like the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from eyas.params import TrainParams

# rows of these are tokens, not directions of a hidden space
_NOT_HIDDEN = ("embed_tokens.", "lm_head.")


def learning_rate(step: int, total: int, params: TrainParams) -> float:
    """Linear warm-up over ``warmup_share`` of the steps, then down to zero as ``schedule`` says; steps count from 0."""
    warmup = round(params.warmup_share * total)
    if step < warmup:
        return params.lr * (step + 1) / warmup
    if params.schedule == "cosine":
        return params.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    falls = total - warmup if params.schedule == "linear" else min(total - warmup, round(params.decay_share * total))
    return params.lr * min(1.0, (total - step) / max(1, falls))


def make_optimizers(weights: Mapping[str, torch.Tensor], params: TrainParams) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the matrices and AdamW for the rest.

    Muon's steps are scaled to the size of AdamW's (Moonlight, https://arxiv.org/abs/2502.16982), so one rate serves both.
    """
    matrices = [
        weight
        for name, weight in weights.items()
        if params.optimizer == "muon" and weight.ndim == 2 and not name.startswith(_NOT_HIDDEN)
    ]
    taken = set(map(id, matrices))
    others = [weight for weight in weights.values() if id(weight) not in taken]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=params.lr, weight_decay=params.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    if others:
        optimizers.append(
            torch.optim.AdamW(others, lr=params.lr, betas=(0.9, 0.95), weight_decay=params.weight_decay, fused=True)
        )
    return optimizers
