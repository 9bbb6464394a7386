"""The target's own way from a stored state to the next token: final norm, then output head.

Takes a target's directory; gives its final norm, output head and embeddings, read from safetensors by name.
Shape legend: N positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from eyas.errors import EyasError
from eyas.targets.resolve import read_config

_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"
_EMBEDDINGS = "model.embed_tokens.weight"
# Their norms multiply by (1 + weight): Gemma 1 to 3 and Qwen3-Next/3.5; plain RMSNorm elsewhere.
_UNIT_OFFSET_TYPES = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)


def soft_capped(logits_NV: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits held within ±cap, as Gemma 2 does (``final_logit_softcapping``); None leaves them."""
    return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)


@dataclass(frozen=True)
class TargetHead:
    """Final norm and output head, in float32."""

    norm_weight_H: torch.Tensor
    norm_eps: float
    unit_offset: bool
    head_VH: torch.Tensor
    softcap: float | None = None

    def normed(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """RMSNorm of states as they are stored (before the norm), float32."""
        hidden_NH = hidden_NH.float()
        scale = torch.rsqrt(hidden_NH.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        weight = 1.0 + self.norm_weight_H if self.unit_offset else self.norm_weight_H
        return hidden_NH * scale * weight

    def logits(self, normed_NH: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of normed states, float32."""
        return soft_capped(normed_NH @ self.head_VH.T, self.softcap)


def weight_files(directory: Path) -> dict[str, Path]:
    """The file that each tensor of a directory in Hugging Face layout is in."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    names: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            names |= dict.fromkeys(tensors.keys(), path)
    return names


def load_tensor(directory: Path, name: str) -> torch.Tensor | None:
    """A tensor of the language model by its plain name, whatever prefix a multimodal wrapper puts before it.

    Returns:
        The tensor as stored, or None where there is none of that name.

    Raises:
        EyasError: several tensors answer to the name.
    """
    files = weight_files(directory)
    plain = {n: ".".join(part for part in n.split(".") if part != "language_model") for n in files}
    found = [n for n, p in plain.items() if ("." + p).endswith("." + name) and "vision" not in n and "visual" not in n]
    exact = [n for n in found if n == name] or found
    if len(exact) > 1:
        raise EyasError(f"{directory}: several tensors may be {name}: {', '.join(sorted(exact))}")
    if not exact:
        return None
    with safe_open(files[exact[0]], "pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(exact[0])
    return tensor


def load_head(directory: Path) -> TargetHead:
    """The target's final norm and output head (its embeddings where the two are tied).

    Raises:
        EyasError: the tensors are not there.
    """
    config = read_config(directory)
    text = config.get("text_config") or config
    norm = load_tensor(directory, _NORM)
    head = load_tensor(directory, _HEAD)
    if head is None:
        head = load_tensor(directory, _EMBEDDINGS)
    if norm is None or head is None:
        raise EyasError(f"{directory}: no tensor {_NORM if norm is None else _HEAD}; the self-check needs it")
    return TargetHead(
        norm.float(),
        float(text.get("rms_norm_eps", 1e-6)),
        str(text.get("model_type")) in _UNIT_OFFSET_TYPES,
        head.float(),
        text.get("final_logit_softcapping"),
    )
