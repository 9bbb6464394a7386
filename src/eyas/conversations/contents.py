"""What a turn says: its text and its reasoning, out of strings, lists of parts, and inline ``<think>``.

Takes raw values of unknown type; gives text that every tokenizer accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.conversations.faults import BadRow
from eyas.conversations.shapes import present

MAX_TURN_BYTES = 4 << 20
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_OPEN, _CLOSE = "<think>", "</think>"


def _text(raw: Any, turn: int) -> str:
    if not isinstance(raw, str):
        kind = raw.get("type", "object") if isinstance(raw, dict) else type(raw).__name__
        raise BadRow("not_text", f"turn {turn}: {ascii(kind)[:100]}")
    return raw


def _part(raw: Any, turn: int) -> str:
    """The text of one part of a content list: a string, or OpenAI's ``{"type": "text", "text": …}``."""
    is_text = isinstance(raw, dict) and raw.get("type") in _TEXT_PARTS
    return _text(raw.get("text") if is_text else raw, turn)


def text_of(raw: Any, turn: int, repairs: set[str]) -> str:
    """The text of a string or of a list of parts.

    Raises:
        BadRow: it is no text, too long, or holds lone surrogates.
    """
    # vLLM joins text parts with a line break, too
    text = "\n".join(_part(part, turn) for part in raw) if isinstance(raw, list) else _text(raw, turn)
    size = len(text)
    if not text.isascii():
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise BadRow("invalid_text", f"turn {turn}, character {error.start}") from None
    if size > MAX_TURN_BYTES:
        raise BadRow("turn_too_long", f"turn {turn}: {size} bytes")
    if "\0" in text:
        repairs.add("nul_removed")
        text = text.replace("\0", "")
    return text


def _split_inline(text: str, turn: int, repairs: set[str]) -> tuple[str, str]:
    """The reasoning in ``<think>`` at the start of an answer, and the rest; further on it is text like any other."""
    start = text.lstrip()
    if start.startswith(_OPEN):
        reasoning, closed, rest = start.removeprefix(_OPEN).partition(_CLOSE)
        if not closed:
            raise BadRow("unclosed_think", f"turn {turn}")
        if rest.lstrip().startswith(_OPEN):
            raise BadRow("two_reasonings", f"turn {turn}")
        repairs.add("inline_think_split")
        return reasoning.strip(), rest.lstrip("\r\n")
    before, closed, after = text.partition(_CLOSE)
    # an answer whose prompt ended in <think>; prose about the two has both, or goes on in the line
    if closed and _OPEN not in before and after[:1] in ("", "\r", "\n"):
        raise BadRow("unopened_think", f"turn {turn}")
    return "", text


def _thinking_parts(raw: Any, turn: int, repairs: set[str]) -> tuple[str, Any]:
    """Parts ``{"type": "thinking", "thinking": …}`` before the text, and the other parts."""
    if not isinstance(raw, list):
        return "", raw
    count = next(
        (i for i, part in enumerate(raw) if not (isinstance(part, dict) and part.get("type") == "thinking")), len(raw)
    )
    return "\n".join(text_of(part.get("thinking"), turn, repairs) for part in raw[:count]), raw[count:]


def answer_of(raw: Any, more: Mapping[str, Any], turn: int, repairs: set[str]) -> tuple[str, str]:
    """Text and reasoning of an assistant turn.

    Raises:
        BadRow: as `text_of`; reasoning that is not closed, not opened, or given twice and differently.
    """
    given: list[str] = []
    if more or isinstance(raw, list):
        for key in _REASONING_KEYS:
            value = present(more, key, repairs)
            if value is not None:
                given.append(text_of(value, turn, repairs).strip())
        thinking, raw = _thinking_parts(raw, turn, repairs)
        given.append(thinking.strip())
    text = text_of(raw, turn, repairs)
    if _CLOSE in text or _OPEN in text:
        inline, text = _split_inline(text, turn, repairs)
        given.append(inline)
    reasonings = {reasoning for reasoning in given if reasoning}
    if len(reasonings) > 1:
        raise BadRow("two_reasonings", f"turn {turn}")
    return text, reasonings.pop() if reasonings else ""


def reject_reasoning(more: Mapping[str, Any], turn: int) -> None:
    """Refuse reasoning on a turn that is not the assistant's.

    Raises:
        BadRow: ``misplaced_reasoning``.
    """
    if any(isinstance(more.get(key), (str, list)) and more.get(key) for key in _REASONING_KEYS):
        raise BadRow("misplaced_reasoning", f"turn {turn}")
