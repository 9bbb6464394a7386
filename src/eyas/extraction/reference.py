"""Hidden states by transformers in float32, to check the engine's against.

Shape legend: B rows, T tokens, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

LARGEST_BYTES = 4 << 30


def affordable(directory: Path) -> bool:
    """Whether the target is small enough to be loaded a second time, in float32."""
    return sum(f.stat().st_size for f in directory.glob("*.safetensors")) <= LARGEST_BYTES


@torch.inference_mode()
def entering_states(decoder: Any, layers: Sequence[int], ids_BT: torch.Tensor) -> torch.Tensor:
    """One pass of a transformers decoder, and the residual stream that enters the named layers, before any norm.

    Args:
        decoder: what a causal model's ``get_decoder`` gives: ``layers``, then ``norm``.
        layers: layer ids; the number of layers stands for what leaves the last one.
        ids_BT: token ids int64 [B, T], on the decoder's device. Rows may be padded behind.

    Returns:
        States [B, T, L, H], layers in the order asked for, in the decoder's dtype and on its device.
    """
    depth = len(decoder.layers)
    caught: dict[int, torch.Tensor] = {}

    def watch(layer: int) -> RemovableHandle:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            # a copy, as a layer may add to its input in place
            caught[layer] = (args[0] if args else kwargs["hidden_states"]).clone()

        # the last id is what enters the final norm: transformers' own last hidden state is after it
        module: torch.nn.Module = decoder.norm if layer == depth else decoder.layers[layer]
        return module.register_forward_pre_hook(hook, with_kwargs=True)

    with ExitStack() as watching:
        for layer in layers:
            watching.callback(watch(layer).remove)
        decoder(ids_BT, use_cache=False)  # without the output head: no logits are asked for
    return torch.stack([caught[layer] for layer in layers], dim=2)


def reference_states(
    directory: Path, rows: Sequence[Sequence[int]], layers: Sequence[int], *, trust_remote_code: bool
) -> list[torch.Tensor]:
    """States [T, L, H] float32 of each row; layer id k is the residual stream that enters layer k, before any norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=trust_remote_code)
    decoder = model.get_decoder()
    return [entering_states(decoder, layers, torch.tensor([list(row)]))[0] for row in rows]
