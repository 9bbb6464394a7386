"""The shapes in which people keep conversations, brought into one: a list of turns as given.

Takes a row's object; gives its turns with roles and contents still unchecked (`rules` does that).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from eyas.conversations.faults import BadRow
from eyas.conversations.strict_json import parse_json

_LIST_KEYS = ("messages", "conversations", "conversation", "turns")
_QUESTION_KEYS = ("question", "prompt")
_ANSWER_KEYS = ("response", "completion", "answer", "output")
_SYSTEM_KEYS = ("system", "system_prompt")
_REASONING_KEYS = ("reasoning_content", "thinking")
_TOOL_KEYS = ("tools", "functions")
_MARKS = (*_LIST_KEYS, *_QUESTION_KEYS, "instruction")
# what benchmark sets are known by
_NAME_KEYS = ("id", "prompt_id", "question_id", "category")
ROW_KEYS = frozenset(
    (*_MARKS, *_ANSWER_KEYS, *_REASONING_KEYS, *_SYSTEM_KEYS, *_TOOL_KEYS, *_NAME_KEYS, "input", "history")
)

_NOTHING: dict[str, Any] = {}


class RawTurn(NamedTuple):
    """A turn as given; ``more`` has its other keys."""

    role: Any
    content: Any
    more: Mapping[str, Any] = _NOTHING


class RawConversation(NamedTuple):
    """A row's turns and tools as given; ``plain`` if the shape has user turns only, so that one may follow the other."""

    turns: list[RawTurn]
    tools: Any
    plain: bool = False


def looks_like_row(value: Mapping[str, Any]) -> bool:
    """Whether an object has one of the keys that make a row."""
    return any(key in value for key in _MARKS)


def present(owner: Mapping[str, Any], key: str, repairs: set[str]) -> Any:
    """The value of a key; none if it is missing, which pandas may write as NaN."""
    value = owner.get(key)
    if isinstance(value, float) and value != value:
        repairs.add("nan_as_missing")
        return None
    return value


def _either(turn: Mapping[str, Any], keys: tuple[str, str], number: int) -> Any:
    """The value of whichever key a turn has; both may be there if they agree."""
    given = [turn[key] for key in keys if turn.get(key) is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise BadRow("bad_turn", f"turn {number} has both `{keys[0]}` and `{keys[1]}`, and they differ")
    return given[0] if given else None


def _turn(turn: Any, number: int) -> RawTurn:
    """``role`` and ``content`` (OpenAI), ``from`` and ``value`` (ShareGPT)."""
    if not isinstance(turn, dict):
        raise BadRow("bad_turn", f"turn {number} is not an object")
    if len(turn) == 2 and "role" in turn and "content" in turn:  # these two alone, for speed
        return RawTurn(turn["role"], turn["content"])
    if len(turn) == 2 and "from" in turn and "value" in turn:
        return RawTurn(turn["from"], turn["value"])
    if "role" not in turn and "from" not in turn:
        raise BadRow("bad_turn", f"turn {number} has no role")
    role, content = _either(turn, ("role", "from"), number), _either(turn, ("content", "value"), number)
    return RawTurn(role, content, turn)


def _turns(key: str, value: Any) -> list[RawTurn]:
    """A list of turns, which cells of tables hold as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value)
    if not isinstance(value, list):
        raise BadRow("bad_turn", f"`{key}` is not a list")
    return [_turn(turn, number) for number, turn in enumerate(value, 1)]


def _history(value: Any) -> list[RawTurn]:
    """Alpaca's earlier turns: pairs of question and answer."""
    if value in (None, "", []):
        return []
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise BadRow("bad_turn", "`history` is not a list of pairs")
    return list(itertools.chain.from_iterable((RawTurn("user", a), RawTurn("assistant", b)) for a, b in value))


def _answer(row: Mapping[str, Any], repairs: set[str]) -> list[RawTurn]:
    for key in _ANSWER_KEYS:
        value = present(row, key, repairs)
        if value in (None, "", []):
            continue
        if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
            return _turns(key, value)
        return [RawTurn("assistant", value, {name: row[name] for name in _REASONING_KEYS if name in row})]
    return []


def _asked(row: Mapping[str, Any], repairs: set[str]) -> list[RawTurn] | None:
    """The turns of the shapes that have a question and an answer under keys of their own."""
    instruction = present(row, "instruction", repairs)
    if instruction is not None:
        extra = present(row, "input", repairs)
        asked = instruction if extra in (None, "") else [instruction, "", extra]
        return [*_history(present(row, "history", repairs)), RawTurn("user", asked), *_answer(row, repairs)]
    for key in _QUESTION_KEYS:
        asked = present(row, key, repairs)
        if asked is not None:
            before = _turns(key, asked) if isinstance(asked, list) else [RawTurn("user", asked)]
            return before + _answer(row, repairs)
    return None


def raw_turns(row: Mapping[str, Any], repairs: set[str]) -> RawConversation:
    """The turns of a row; names of repairs are added to ``repairs``.

    Raises:
        BadRow: no known shape, or a list of turns that is none.
    """
    system = [RawTurn("system", row[key]) for key in _SYSTEM_KEYS if present(row, key, repairs)]
    tools = next((row[key] for key in _TOOL_KEYS if present(row, key, repairs)), None)
    for key in _LIST_KEYS:
        value = present(row, key, repairs)
        if value is None or value == "":
            continue
        if key == "turns" and isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
            return RawConversation([*system, *(RawTurn("user", turn) for turn in value)], tools, plain=True)
        return RawConversation(system + _turns(key, value), tools)
    asked = _asked(row, repairs)
    if asked is None:
        raise BadRow("unknown_shape", f"keys: {ascii(sorted(map(str, row)))[:200]}")
    return RawConversation(system + asked, tools)
