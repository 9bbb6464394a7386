"""The shapes in which people keep conversations, brought into one: a list of (role, content) as given.

Takes a row's object; gives its turns with their roles and contents still unchecked (`rules` does that).
"""

from __future__ import annotations

from typing import Any

from eyas.conversations.faults import BadRow

_ANSWER_KEYS = ("response", "completion", "answer", "output")
_TOOL_KEYS = ("tool_calls", "function_call", "tool_call_id")

RawTurn = tuple[Any, Any]


def _turns(key: str, value: Any) -> list[RawTurn]:
    """``messages`` (role, content), ``conversations`` (from, value), or MT-bench's plain list of user turns."""
    if not isinstance(value, list):
        raise BadRow("bad_turn", f"`{key}` is not a list")
    if value and all(isinstance(turn, str) for turn in value):
        return [("user", turn) for turn in value]
    turns = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict):
            raise BadRow("bad_turn", f"turn {number} is not an object")
        if any(turn.get(name) for name in _TOOL_KEYS):
            raise BadRow("tool_turn", f"turn {number}")
        role_key, content_key = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
        if role_key not in turn:
            raise BadRow("bad_turn", f"turn {number} has no role")
        turns.append((turn[role_key], turn.get(content_key)))
    return turns


def _answer(row: dict[str, Any]) -> list[RawTurn]:
    key = next((k for k in _ANSWER_KEYS if row.get(k) not in (None, "")), None)
    return [] if key is None else [("assistant", row[key])]


def raw_turns(row: dict[str, Any]) -> tuple[list[RawTurn], bool]:
    """The turns of a row.

    Returns:
        The turns, and whether the shape has user turns only (so that one may follow the other).

    Raises:
        BadRow: no known shape, or tools.
    """
    if row.get("tools"):
        raise BadRow("tool_turn", "the row defines tools")
    system: list[RawTurn] = [("system", row["system"])] if row.get("system") else []
    for key in ("messages", "conversations", "turns"):
        if row.get(key) is not None:
            plain = isinstance(row[key], list) and all(isinstance(turn, str) for turn in row[key])
            return system + _turns(key, row[key]), plain
    if row.get("instruction") is not None:
        extra = row.get("input")
        if extra in (None, ""):
            return [*system, ("user", row["instruction"]), *_answer(row)], False
        return [*system, ("user", [row["instruction"], "", extra]), *_answer(row)], False
    for key in ("question", "prompt"):
        if row.get(key) is not None:
            asked = _turns(key, row[key]) if isinstance(row[key], list) else [("user", row[key])]
            return system + asked + _answer(row), False
    raise BadRow("unknown_shape", f"keys: {ascii(sorted(row))[:200]}")
