"""Model flops of a head from its shapes, and what a GPU could do; the share is the MFU.

Counted is what the loss needs, forward and backward: recomputation and slots that nothing depends on are not.
Shape legend: T slots, N active slots, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eyas.drafting.data import Batch
from eyas.drafting.planning import Plan

# dense bfloat16, without sparsity, from the makers' data sheets; by a part of the device's name
_PEAK_TFLOPS = {"H200": 989.0, "H100 80GB HBM3": 989.0}


def pack_flops(model: Eagle3DraftModel, batch: Batch, plan: Plan, depths: int) -> float:
    """Of one pack: projections, attention inside documents, output head and teacher; elementwise work is left out."""
    config = model.config.transformer_layer_config
    slots, active = len(batch.mask_T), len(plan.active_N)
    layer_weights = sum(weight.numel() for weight in model.layers.parameters() if weight.ndim == 2)
    head_weights = model.lm_head.weight.numel()
    matrices = 6.0 * (slots * model.fc.weight.numel() + depths * active * layer_weights)
    pairs = sum(own * length / 2 for own, length in zip(plan.active_lengths, batch.lengths, strict=True))
    attention = 12.0 * pairs * depths * len(model.layers) * config.num_attention_heads * config.head_dim
    # the output head is frozen: its gradient goes to the states alone
    labels = sum(map(len, plan.rows))
    total: float = matrices + attention + 4.0 * head_weights * labels + 2.0 * head_weights * len(plan.label_slots)
    return total


def peak_flops(device: torch.device, tflops: float | None) -> float | None:
    """Flops a second of one device: as given, or as known by its name; None for a CPU and where unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = tflops or next((value for part, value in _PEAK_TFLOPS.items() if part in name), None)
    return None if found is None else found * 1e12
