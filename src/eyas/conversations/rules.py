"""The rules that a conversation must keep; what is unambiguous is mended, the rest is a `BadRow`.

Takes raw turns; gives a `Conversation` that every chat template renders: an optional system message, then user
turns, each with at most one answer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from eyas.conversations.faults import BadRow
from eyas.conversations.shapes import raw_turns

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
}
_TOOL_ROLES = {"tool", "function", "function_call", "tool_call", "tool_response", "observation", "ipython"}


@dataclass(frozen=True)
class Message:
    """One turn: role ``system``, ``user`` or ``assistant``, and its text."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """A conversation that keeps the rules."""

    messages: tuple[Message, ...]

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
                return Conversation(self.messages[:position])
        return self


def _role(raw: Any, turn: int, repairs: set[str]) -> str:
    name = raw.strip().lower() if isinstance(raw, str) else ""
    if name in _TOOL_ROLES:
        raise BadRow("tool_turn", f"turn {turn} has the role {name}")
    if name not in _ROLES:
        raise BadRow("unknown_role", f"turn {turn}: {ascii(raw)[:100]}")
    if name == "developer":
        repairs.add("developer_as_system")
    return _ROLES[name]


def _text(raw: Any, turn: int) -> str:
    if not isinstance(raw, str):
        kind = raw.get("type", "object") if isinstance(raw, dict) else type(raw).__name__
        raise BadRow("not_text", f"turn {turn}: {ascii(kind)[:100]}")
    return raw


def _part(raw: Any, turn: int) -> str:
    """The text of one part of a content list: a string, or OpenAI's ``{"type": "text", "text": …}``."""
    is_text = isinstance(raw, dict) and raw.get("type") == "text"
    return _text(raw.get("text") if is_text else raw, turn)


def _content(raw: Any, turn: int, repairs: set[str]) -> str:
    if raw is None:
        raise BadRow("null_content", f"turn {turn}")
    # vLLM joins text parts with a line break, too
    text = "\n".join(_part(part, turn) for part in raw) if isinstance(raw, list) else _text(raw, turn)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("invalid_text", f"turn {turn}, character {error.start}") from None
    if "\0" in text:
        repairs.add("nul_removed")
        text = text.replace("\0", "")
    return text


def _ordered(turns: list[Message], repairs: set[str], plain: bool) -> list[Message]:
    """Drop what may go, then check who speaks after whom."""
    if turns and turns[0].role == "system" and not turns[0].content.strip():
        repairs.add("empty_system_dropped")
        turns = turns[1:]
    if turns and turns[-1].role == "assistant" and not turns[-1].content.strip():
        repairs.add("empty_last_answer_dropped")
        turns = turns[:-1]
    first = 1 if turns and turns[0].role == "system" else 0
    start = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
    if start is None:
        raise BadRow("no_user_turn", f"{len(turns)} turns")
    for number, turn in enumerate(turns[first:], first + 1):
        if turn.role == "system":
            raise BadRow("misplaced_system", f"turn {number}")
    if start > first:
        repairs.add("leading_assistant_dropped")
        turns = turns[:first] + turns[start:]
    for number, (before, after) in enumerate(itertools.pairwise(turns), 2):
        if before.role == after.role and not plain:
            raise BadRow(f"two_{after.role}_turns", f"turns {number - 1} and {number}")
    for number, turn in enumerate(turns, 1):
        if not turn.content.strip():
            raise BadRow("empty_turn", f"turn {number} ({turn.role})")
    return turns


def validate(row: dict[str, Any]) -> tuple[Conversation, list[str]]:
    """Check one row.

    Returns:
        The conversation, and the names of the repairs (keys of `REPAIRED`) that it needed.

    Raises:
        BadRow: the row breaks a rule that cannot be mended.
    """
    raw, plain = raw_turns(row)
    if not raw:
        raise BadRow("empty_conversation", "no turns")
    repairs: set[str] = set()
    roles = [_role(role, number, repairs) for number, (role, _) in enumerate(raw, 1)]
    contents = [_content(content, number, repairs) for number, (_, content) in enumerate(raw, 1)]
    turns = [Message(role, content) for role, content in zip(roles, contents, strict=True)]
    return Conversation(tuple(_ordered(turns, repairs, plain))), sorted(repairs)
