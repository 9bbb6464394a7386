"""The rules that a conversation must keep; what is unambiguous is mended, the rest is a `BadRow`.

Takes a row; gives a `Conversation` that chat templates render: an optional system message, then user turns, each with
at most one answer, which may call tools and go on after their results.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from eyas.conversations.contents import answer_of, reject_reasoning, text_of
from eyas.conversations.faults import BadRow
from eyas.conversations.shapes import RawTurn, present, raw_turns
from eyas.conversations.tools import OpenCalls, calls_of, calls_of_text, definitions_of, identifier

# Only names that cannot mean anything else: a model's name as a role may be anybody's turn.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "ipython": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_CALL_ROLES = ("function_call", "tool_call")  # ShareGPT: the turn is nothing but the call, as JSON text


@dataclass(frozen=True)
class Message:
    """One turn: role ``system``, ``user``, ``assistant`` or ``tool``, its text, and what else templates look at.

    ``tool_calls`` holds OpenAI's form: ``{"id", "type": "function", "function": {"name", "arguments": {…}}}``.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    tool_call_id: str | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message as templates and the column ``messages`` have it; what is not given has no key."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


@dataclass(frozen=True)
class Conversation:
    """A conversation that keeps the rules; ``tools`` holds OpenAI's tool definitions."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)

    @property
    def user_turns(self) -> list[str]:
        """The texts of the user turns."""
        return [message.content for message in self.messages if message.role == "user"]

    def cut(self, max_turns: int) -> Conversation:
        """The conversation up to and with the answer to its ``max_turns``-th user turn."""
        users = 0
        for position, message in enumerate(self.messages):
            users += message.role == "user"
            if users > max_turns:
                return replace(self, messages=self.messages[:position])
        return self


def _role(raw: Any, turn: int, repairs: set[str]) -> tuple[str, bool]:
    """The role, and whether the turn's text is a tool call."""
    name = raw if isinstance(raw, str) else ""
    if name not in _ROLES:
        name = name.strip().lower()
    if name not in _ROLES:
        raise BadRow("unknown_role", f"turn {turn}: {ascii(raw)[:100]}")
    if name == "developer":
        repairs.add("developer_as_system")
    return _ROLES[name], name in _CALL_ROLES


def _answer(content: Any, raw: RawTurn, turn: int, is_call: bool, repairs: set[str]) -> Message:
    calls = calls_of(raw.more, turn, repairs) if raw.more else ()
    if is_call:
        if calls:
            raise BadRow("bad_tool_call", f"turn {turn} is a call and has calls")
        content, calls = "", calls_of_text(content, turn, repairs)
    elif content is None and calls:
        content = ""
    if content is None:
        raise BadRow("null_content", f"turn {turn}")
    return Message("assistant", *answer_of(content, raw.more, turn, repairs), calls)


def _message(raw: RawTurn, turn: int, repairs: set[str]) -> Message:
    """One turn as a message; what it has beside role and content must befit the role."""
    role, is_call = _role(raw.role, turn, repairs)
    content = raw.content if isinstance(raw.content, str) else present({"content": raw.content}, "content", repairs)
    if role == "assistant":
        return _answer(content, raw, turn, is_call, repairs)
    if content is None:
        raise BadRow("null_content", f"turn {turn}")
    text = text_of(content, turn, repairs)
    if not raw.more:
        return Message(role, text)
    reject_reasoning(raw.more, turn)
    identity = identifier(raw.more.get("tool_call_id"), f"turn {turn}")
    if calls_of(raw.more, turn, repairs) or (identity is not None and role != "tool"):
        raise BadRow("bad_tool_call", f"turn {turn} ({role}) has what only a call or its result has")
    name = identifier(raw.more.get("name"), f"turn {turn}") if role == "tool" else None
    return Message(role, text, tool_call_id=identity, name=name)


def _check_calls(turns: list[Message]) -> None:
    """Match tools' results with calls: a result needs its call, and a call its result, unless it is the last turn."""
    open_calls = OpenCalls()
    for number, turn in enumerate(turns, 1):
        if turn.role == "tool":
            open_calls.answered(turn.tool_call_id, turn.name, number)
        else:
            open_calls.made(turn.tool_calls, number)
    if turns and turns[-1].role == "tool":
        open_calls.settled(len(turns) + 1)


def _check_order(turns: list[Message], plain: bool) -> None:
    """Check who speaks after whom, and that somebody says something."""
    for number, (before, after) in enumerate(itertools.pairwise(turns), 2):
        if before.role == after.role != "tool" and not plain:
            raise BadRow(f"two_{after.role}_turns", f"turns {number - 1} and {number}")
        if before.role == "tool" and after.role == "user":
            raise BadRow("missing_answer", f"between turns {number - 1} and {number}")
    for number, turn in enumerate(turns, 1):
        # a tool may have nothing to say, and so may an answer that calls one
        if not turn.content.strip() and turn.role != "tool" and not turn.tool_calls:
            raise BadRow("empty_turn", f"turn {number} ({turn.role})")


def _ordered(turns: list[Message], repairs: set[str], plain: bool) -> list[Message]:
    """Drop what may go, then check the rest."""
    if turns and turns[0].role == "system" and not turns[0].content.strip():
        repairs.add("empty_system_dropped")
        turns = turns[1:]
    if turns and turns[-1].role == "assistant" and not turns[-1].content.strip() and not turns[-1].tool_calls:
        repairs.add("empty_last_answer_dropped")
        turns = turns[:-1]
    first = 1 if turns and turns[0].role == "system" else 0
    for number, turn in enumerate(turns[first:], first + 1):
        if turn.role == "system":
            raise BadRow("misplaced_system", f"turn {number}")
    if any(turn.role == "tool" or turn.tool_calls for turn in turns):
        _check_calls(turns)
    start = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
    if start is None:
        raise BadRow("no_user_turn", f"{len(turns)} turns")
    if start > first:
        repairs.add("leading_assistant_dropped")
        turns = turns[:first] + turns[start:]
    _check_order(turns, plain)
    return turns


def validate(row: dict[str, Any]) -> tuple[Conversation, list[str]]:
    """Check one row.

    Returns:
        The conversation, and the names of the repairs (keys of `REPAIRED`) that it needed.

    Raises:
        BadRow: the row breaks a rule that cannot be mended.
    """
    repairs: set[str] = set()
    raw = raw_turns(row, repairs)
    if not raw.turns:
        raise BadRow("empty_conversation", "no turns")
    turns = [_message(turn, number, repairs) for number, turn in enumerate(raw.turns, 1)]
    tools = () if raw.tools is None else definitions_of(raw.tools, repairs)
    return Conversation(tuple(_ordered(turns, repairs, raw.plain)), tools), sorted(repairs)
