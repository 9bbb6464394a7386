"""Hidden states by transformers in float32, to check the engine's against.

Shape legend: T tokens, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

LARGEST_BYTES = 4 << 30


def affordable(directory: Path) -> bool:
    """Whether the target is small enough to be loaded a second time, in float32."""
    return sum(f.stat().st_size for f in directory.glob("*.safetensors")) <= LARGEST_BYTES


@torch.inference_mode()
def reference_states(
    directory: Path, rows: Sequence[Sequence[int]], layers: Sequence[int], *, trust_remote_code: bool
) -> list[torch.Tensor]:
    """States [T, L, H] float32 of each row; layer id k is the residual stream that enters layer k, before any norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=trust_remote_code)
    decoder = model.get_decoder()
    depth = len(decoder.layers)
    caught: dict[int, torch.Tensor] = {}

    def enter(layer: int) -> None:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            caught[layer] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        # the last id is what enters the final norm: transformers' own last hidden state is after it
        module = decoder.norm if layer == depth else decoder.layers[layer]
        module.register_forward_pre_hook(hook, with_kwargs=True)

    for layer in layers:
        enter(layer)
    result = []
    for row in rows:
        decoder(torch.tensor([list(row)]), use_cache=False)  # without the output head: no logits are asked for
        result.append(torch.stack([caught[layer] for layer in layers], dim=1))
    return result
