"""A generated answer as a message: what was thought, and what was said."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.templates.tokens import TemplateTokens

OPEN, CLOSE = "<think>", "</think>"
_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"


def split_answer(tokens: TemplateTokens, ids: Sequence[int], *, think_opened: bool) -> tuple[str, str]:
    """Reasoning and content of a generated answer; the reasoning is empty where there is none.

    Args:
        tokens: of the target.
        ids: as generated.
        think_opened: the prompt ended in an opened think block.
    """
    if tokens.id_of(_CHANNEL) is not None and tokens.id_of(_MESSAGE) is not None:
        return _by_channel(tokens, ids)
    opening, closing = tokens.id_of(OPEN), tokens.id_of(CLOSE)
    if closing is not None and closing in ids:
        at = list(ids).index(closing)
        thought, said = tokens.decode(ids[:at], special=False), tokens.decode(ids[at + 1 :], special=False)
        opened = think_opened or opening in ids[:at] or thought.lstrip().startswith(OPEN)
    else:
        text = tokens.decode(ids, special=False)
        opened = think_opened or text.lstrip().startswith(OPEN) or (opening is not None and opening in ids[:2])
        thought, _, said = text.partition(CLOSE)
    if not opened:
        return "", tokens.decode(ids, special=False)
    return thought.strip().removeprefix(OPEN).strip(), said.lstrip("\n")


def _by_channel(tokens: TemplateTokens, ids: Sequence[int]) -> tuple[str, str]:
    """gpt-oss: ``<|channel|>`` name ``<|message|>`` text, then the next part or the end."""
    channel, message = tokens.id_of(_CHANNEL), tokens.id_of(_MESSAGE)
    special = set(tokens.special_ids)
    parts: dict[str, list[str]] = {}
    name, start, inside = "final", 0, True
    for position, token in enumerate([*ids, -1]):
        if token != -1 and token not in special:
            continue
        text = tokens.decode(ids[start:position], special=False)
        if inside and text:
            parts.setdefault("analysis" if name == "analysis" else "final", []).append(text)
        elif token == message and text:
            name = text.split()[0]
        start, inside = position + 1, token == message
        if token == channel:
            name = "final"
    return "\n".join(parts.get("analysis", [])), "\n".join(parts.get("final", []))
