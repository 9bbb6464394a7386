"""Tools: definitions and calls brought into OpenAI's form, and results matched with the calls they answer.

Takes raw values of unknown type; gives what chat templates take, with arguments as objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eyas.conversations.contents import MAX_TURN_BYTES
from eyas.conversations.faults import BadRow
from eyas.conversations.strict_json import parse_json

_MAX_DEPTH = 64
Call = dict[str, Any]


def _nested_too_deep(value: Any, left: int = _MAX_DEPTH) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_nested_too_deep(child, left - 1) for child in children)


def _check_json(value: Any, reason: str, where: str) -> None:
    """Refuse what JSON text or a tokenizer cannot hold: NaN, lone surrogates, endless nesting, types of other formats."""
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8"))
    except UnicodeEncodeError:
        raise BadRow("invalid_text", where) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(reason, f"{where}: {ascii(str(error))[:100]}") from None
    if size > MAX_TURN_BYTES:
        raise BadRow("turn_too_long", f"{where}: {size} bytes")
    if _nested_too_deep(value):
        raise BadRow(reason, f"{where}: nested more than {_MAX_DEPTH} deep")


def _parsed(value: Any, reason: str, where: str) -> Any:
    """The value that a JSON text holds, or the value itself if it is no text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except BadRow as fault:
        raise BadRow(reason, f"{where}: {fault.detail}") from None


def definitions_of(raw: Any, repairs: set[str]) -> tuple[dict[str, Any], ...]:
    """A row's tools, given as a list or as JSON text, in OpenAI's form.

    Raises:
        BadRow: ``bad_tools``.
    """
    raw = _parsed(raw, "bad_tools", "tools") if raw != "" else None
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise BadRow("bad_tools", "no list")
    return tuple(_definition(tool, f"tool {number}", repairs) for number, tool in enumerate(raw, 1))


def _definition(raw: Any, where: str, repairs: set[str]) -> dict[str, Any]:
    tool = _parsed(raw, "bad_tools", where)
    if isinstance(tool, dict) and "function" not in tool and tool.get("type", "function") == "function":
        repairs.add("bare_tools_wrapped")
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool.get("function") if isinstance(tool, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"].strip()
    if not named or tool.get("type", "function") != "function":
        raise BadRow("bad_tools", f"{where} is not a function with a name")
    _check_json(tool, "bad_tools", where)
    return {"type": "function", **tool}


def identifier(raw: Any, where: str) -> str | None:
    """An id of a call: text, or a number as text; none if it is missing or empty.

    Raises:
        BadRow: it is something else.
    """
    if raw is None or raw == "":
        return None
    if isinstance(raw, bool) or not isinstance(raw, (str, int)):
        raise BadRow("bad_tool_call", f"{where}: an id that is not text")
    _check_json(raw, "bad_tool_call", where)
    return str(raw)


def _call(raw: Any, where: str) -> Call:
    """One call: OpenAI's form, or its function alone."""
    if not isinstance(raw, dict) or raw.get("type") not in (None, "function"):
        raise BadRow("bad_tool_call", f"{where} is not a function call")
    function = raw["function"] if raw.get("function") is not None else raw
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise BadRow("bad_tool_call", f"{where} names no function")
    _check_json(name, "bad_tool_call", where)
    arguments = function.get("arguments")
    # OpenAI's API writes no arguments as an empty text
    arguments = {} if arguments in (None, "") else _parsed(arguments, "bad_tool_arguments", where)
    if not isinstance(arguments, dict):
        raise BadRow("bad_tool_arguments", f"{where}: a JSON {type(arguments).__name__}")
    _check_json(arguments, "bad_tool_arguments", where)
    call: Call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    identity = identifier(raw.get("id"), where)
    return call if identity is None else {"id": identity, **call}


def calls_of(more: Mapping[str, Any], turn: int, repairs: set[str]) -> tuple[Call, ...]:
    """The calls under ``tool_calls`` (a list, or JSON text) or ``function_call`` of a turn.

    Raises:
        BadRow: ``bad_tool_call``, ``bad_tool_arguments``.
    """
    old, new = more.get("function_call"), more.get("tool_calls")
    new = _parsed(new, "bad_tool_call", f"turn {turn}") if new != "" else None
    # Parquet gives an object that is missing all of its keys
    if old in (None, "") or (isinstance(old, dict) and not any(old.values())):
        raw = [] if new is None else new
    elif new in (None, []):
        repairs.add("function_call_as_tool_call")
        raw = [_parsed(old, "bad_tool_call", f"turn {turn}")]
    else:
        raw = None
    if not isinstance(raw, list):
        raise BadRow("bad_tool_call", f"turn {turn} has no list of calls, or two kinds of them")
    return _calls(raw, turn)


def calls_of_text(raw: Any, turn: int, repairs: set[str]) -> tuple[Call, ...]:
    """The calls of a turn that is one: ShareGPT's ``function_call`` with a JSON object, or a list of them, as its text.

    Raises:
        BadRow: ``bad_tool_call``, ``bad_tool_arguments``.
    """
    repairs.add("function_call_as_tool_call")
    value = _parsed(raw, "bad_tool_call", f"turn {turn}")
    calls = _calls(value if isinstance(value, list) else [value], turn)
    if not calls:
        raise BadRow("bad_tool_call", f"turn {turn} holds no call")
    return calls


def _calls(raw: list[Any], turn: int) -> tuple[Call, ...]:
    calls = tuple(_call(call, f"turn {turn}, call {number}") for number, call in enumerate(raw, 1))
    identities = [call["id"] for call in calls if "id" in call]
    if len(set(identities)) != len(identities):
        raise BadRow("bad_tool_call", f"turn {turn}: two calls of one id")
    return calls


class OpenCalls:
    """The calls that wait for their results while one goes through the turns of a conversation."""

    def __init__(self) -> None:
        self._waiting: list[Call] = []

    def made(self, calls: tuple[Call, ...], turn: int) -> None:
        """Note the calls (or none) of an assistant turn; raises `BadRow` if earlier ones still wait."""
        self.settled(turn)
        self._waiting = list(calls)

    def settled(self, turn: int) -> None:
        """Raise `BadRow` unless all calls before this turn have their results."""
        if self._waiting:
            raise BadRow(
                "unanswered_tool_call", f"before turn {turn}: {ascii(self._waiting[0]['function']['name'])[:100]}"
            )

    def answered(self, identity: str | None, name: str | None, turn: int) -> None:
        """Match a result with a call: by id, else by name, else the first that waits; raises `BadRow` if there is none."""
        if not self._waiting:
            raise BadRow("orphan_tool_result", f"turn {turn}")
        named = identity is not None and any("id" in call for call in self._waiting)
        if named:
            fits = [call for call in self._waiting if call.get("id") == identity]
        else:
            fits = [call for call in self._waiting if name is None or call["function"]["name"] == name]
        if not fits:
            raise BadRow("mismatched_tool_result", f"turn {turn}: {ascii(identity if named else name)[:100]}")
        self._waiting.remove(fits[0])
