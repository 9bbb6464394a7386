"""Template tokens that the data merely quotes: kept apart from those that the template writes.

Before rendering, each such literal gives way to a character of Unicode's private planes; after rendering, whatever still
reads as a template token is the template's own, and the private characters say where text was quoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_FIRST, _LAST = 0xF0000, 0x10FFFD
_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


@dataclass(frozen=True)
class Quoted:
    """A conversation without the literals of template tokens, and what stands for each of them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    literals: Mapping[str, str] = field(default_factory=dict)  # private character -> literal

    def hide(self, text: str) -> str:
        """Text with private characters in place of the literals that this conversation quotes."""
        for character, literal in self.literals.items():
            text = text.replace(literal, character)
        return text

    def restore(self, text: str) -> str:
        """Rendered text as it reads with the literals back in their places."""
        for character, literal in self.literals.items():
            # a template that writes ASCII JSON escapes the private character
            text = text.replace(character, literal).replace(json.dumps(character)[1:-1], literal)
        return text


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _strings(part)]
    if isinstance(value, Sequence):
        return [text for part in value for text in _strings(part)]
    return []


def _mapped(value: Any, pattern: re.Pattern[str], characters: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: characters[match[0]], value)
    if isinstance(value, Mapping):
        return {_mapped(k, pattern, characters): _mapped(v, pattern, characters) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(part, pattern, characters) for part in value]
    return value


def quote(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    pattern: re.Pattern[str] | None,
    answer: str = "",
) -> Quoted:
    """Hide the literals of template tokens in the data.

    Args:
        messages: a conversation.
        tools: its tool definitions.
        pattern: matches any of the literals; none if there are none.
        answer: text that will be compared with what is rendered; its literals are hidden by the same characters.
    """
    if pattern is None:
        return Quoted(messages, tools)
    texts = [*_strings(messages), *_strings(tools), answer]
    literals = sorted({literal for text in texts for literal in pattern.findall(text)})
    if not literals:
        return Quoted(messages, tools)
    taken = {character for text in texts for character in _PRIVATE.findall(text)}
    free = (chr(code) for code in range(_FIRST, _LAST) if chr(code) not in taken)
    characters = dict(zip(literals, free, strict=False))
    hidden = {character: literal for literal, character in characters.items()}
    return Quoted(_mapped(messages, pattern, characters), _mapped(tools, pattern, characters), hidden)
