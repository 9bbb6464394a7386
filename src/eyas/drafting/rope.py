"""Attention heads and rotary parameters of the head: given, or the target's reduced to a plain Llama layer's.

Takes the target's language-model config; gives what `LlamaConfig` needs, in the one form that transformers 5 and vLLM both read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eyas.errors import EyasError
from eyas.params import ROPE_NUMBERS, RopeParams

# Names for a kind that rotates a text as the plain one does: with text alone all of mrope's position axes are equal.
_SAME_KIND = {"mrope": "default", "deepseek_yarn": "yarn"}


def attention_shape(text: dict[str, Any], where: Path) -> tuple[int, int, int]:
    """Query heads, key-value heads and head size, as the target's.

    A target with latent attention (MLA: Kimi, DeepSeek) has no head size of its own; there the head takes that of its values.

    Raises:
        EyasError: the target's config says no head size, and its heads do not divide its width.
    """
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    latent = text.get("kv_lora_rank") is not None
    # where MLA's config has a `head_dim`, it is of the rotated part alone
    size = text.get("v_head_dim") if latent else text.get("head_dim")
    if not size and hidden % heads:
        raise EyasError(f"{where}: no head size, and {heads} attention heads do not divide the width {hidden}")
    return heads, text.get("num_key_value_heads") or heads, size or hidden // heads


def _of_layer(text: dict[str, Any], window: bool, where: Path) -> dict[str, Any]:
    """The target's parameters as they are, of its full or of its windowed attention where the two differ."""
    rope: dict[str, Any] = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        kind = "sliding_attention" if window else "full_attention"
        if kind not in rope:
            raise EyasError(f"{where}: no rotary parameters of {kind}, only of {', '.join(rope)}; set draft.rope")
        return {"rope_theta": text.get("rope_theta"), **rope[kind]}
    if window and text.get("rope_local_base_freq"):
        return {"rope_theta": text["rope_local_base_freq"]}
    return {"rope_theta": text.get("rope_theta")} | rope


def head_rope(given: RopeParams | None, text: dict[str, Any], window: bool, where: Path) -> dict[str, Any]:
    """The head's rotary parameters.

    Args:
        given: `draft.rope`; None takes the target's. Of those, what a plain Llama layer has no place for is left out:
            sections of mrope, and a partial rotation, for the head rotates its whole heads.
        text: config of the target's language model.
        window: whether the head's attention has a window; then it takes the target's windowed layers' parameters.
        where: of the config, for messages.

    Raises:
        EyasError: the target's kind is one that training and serving would not compute alike, or a number is missing.
    """
    if given is None:
        rope = _of_layer(text, window, where)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        kind = _SAME_KIND.get(kind, kind)
        found = {"original_max_position_embeddings": text.get("original_max_position_embeddings")} | rope
        wanted = {name: found.get(name) for name in ("rope_theta", *ROPE_NUMBERS.get(kind, ((), ()))[0])}
        wanted |= {name: found.get(name) for name in ROPE_NUMBERS.get(kind, ((), ()))[1]}
        try:
            given = RopeParams(rope_type=kind, **({"rope_theta": 10000.0} | _set(wanted)))
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}".lstrip(": ") for e in error.errors())
            raise EyasError(
                f"{where}: the head cannot take the target's rotary parameters ({kind}): {told}; set draft.rope"
            ) from None
    return given.model_dump(exclude_none=True)


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
