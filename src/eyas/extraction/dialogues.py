"""A conversation on its way: what is still to be said, what the target has answered, and in which context.

The target answers in place of every assistant turn of the data. Where that turn called tools and their results follow, call and
results belong together: the target's own answer is kept to train on, and the history goes on with the data's call and its results.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from eyas.conversations.loops import is_looped
from eyas.extraction.answers import Answer
from eyas.params import ResponseParams
from eyas.tables import CONVERSATIONS, KEPT, PROBE, read_batches
from eyas.templates.boundaries import common_prefix
from eyas.templates.chat import ChatTemplate, Message

_BATCH_ROWS = 256


@dataclass(frozen=True)
class Turn:
    """One answer with what the target read before it."""

    shared: int  # so many leading ids of the previous turn's prompt and answer open this prompt
    prompt_ids: list[int]  # the rest of the prompt
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    looped: bool


@dataclass
class Dialogue:
    """A conversation and the target's answers so far."""

    conversation_id: str
    split: str
    source: str
    kind: str  # "sampled" or "greedy"; `PROBE` for the self-check of extraction; `KEPT` with the data's answers
    tools: list[dict[str, Any]]
    pending: deque[Message]  # what is still to be said: system, user and tool turns, and calls that tool turns answer
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    over: bool = False
    cut: bool = False  # no room was left in the context for the next answer
    refused: str | None = None  # the template's own words, where it does not take the conversation
    looped: int = 0  # answers that loop
    dropped: int = 0  # answers that a loop cost: the one that loops and those that would have come after it
    _read: list[int] = field(default_factory=list)  # the last prompt
    _wrote: list[int] = field(default_factory=list)  # the answer to it

    @property
    def greedy(self) -> bool:
        """Whether the answers are the most probable ones, whatever the seed."""
        return self.kind != "sampled"

    def say(self) -> bool:
        """Go on to where the target's turn is; false where the conversation ends before."""
        while self.pending:
            self.messages.append(self.pending.popleft())
            if self._targets_turn():
                return True
        return False

    def _targets_turn(self) -> bool:
        role = self.messages[-1]["role"]
        return role == "user" or (role == "tool" and not (self.pending and self.pending[0]["role"] == "tool"))

    def prompt(self, template: ChatTemplate) -> list[int]:
        """What the target reads now; goes on from its own last answer, token by token, where the history holds that.

        Raises:
            TemplateRefusal: the template does not take the conversation.
        """
        if self.turns:
            return template.next_prompt_ids(self.messages, self._read, self._wrote, self.tools)
        return template.prompt_ids(self.messages, self.tools)

    def answered(self, prompt: list[int], answer: Answer, template: ChatTemplate, *, drop_looped: bool) -> None:
        """Take the target's answer; the conversation ends before one that loops, if those are to be dropped."""
        looped = is_looped(answer.token_ids)
        self.looped += looped
        if looped and drop_looped and self.kind != PROBE:
            self.dropped = 1 + self._answers_to_come()
            self.end()
            return
        shared = common_prefix(self._read + self._wrote, prompt)
        values = answer.token_ids, answer.logprobs, answer.finish_reason
        self.turns.append(Turn(shared, prompt[shared:], *values, looped))
        self._read, self._wrote = prompt, answer.token_ids
        if not (self.pending and self.pending[0]["role"] == "assistant"):
            self.messages.append(template.parse_answer(answer.token_ids))

    def _answers_to_come(self) -> int:
        roles: list[str] = [m["role"] for m in self.pending]
        last_tools = sum(role == "tool" != after for role, after in pairwise([*roles, ""]))
        return roles.count("user") + last_tools

    def end(self) -> None:
        """End here, with the last assistant turn."""
        self.pending.clear()
        self.over = True
        self.messages = _until_last_answer(self.messages)

    def row(self) -> dict[str, Any] | None:
        """The row of the table of responses; None where there is nothing to train on."""
        if not (self.messages if self.kind == KEPT else self.turns):
            return None
        return {
            "conversation_id": self.conversation_id,
            "split": self.split,
            "source": self.source,
            "kind": self.kind,
            "messages": json.dumps(self.messages, ensure_ascii=False),
            "tools": json.dumps(self.tools, ensure_ascii=False),
            "turns": [vars(turn) for turn in self.turns],
        }


def read_dialogues(conversations: Path, params: ResponseParams) -> Iterator[Dialogue]:
    """All conversations of a table, and after them the first ones of the validation split as greedy probes."""
    answered = "sampled" if params.temperature > 0 else "greedy"
    probes: list[dict[str, Any]] = []
    for row in (row for batch in read_batches(conversations, CONVERSATIONS, _BATCH_ROWS) for row in batch):
        if row["split"] == "validation" and len(probes) < params.greedy_probes:
            probes.append(row)
        yield _from_row(row, KEPT if params.mode == "keep" else answered)
    yield from (_from_row(row, PROBE) for row in probes)


def _from_row(row: dict[str, Any], kind: str) -> Dialogue:
    return dialogue(row, kind, json.loads(row["messages"]), json.loads(row["tools"]))


def dialogue(row: dict[str, Any], kind: str, messages: Sequence[Message], tools: list[dict[str, Any]]) -> Dialogue:
    """A conversation whose assistant turns the target is to answer, or, of kind `KEPT`, one with the answers that it holds.

    Args:
        row: with `conversation_id`, `split`, `source`.
        kind: "sampled", "greedy", `PROBE` or `KEPT`.
        messages: the data's.
        tools: definitions of the tools that it may call.
    """
    names = row["conversation_id"], row["split"], row["source"]
    if kind == KEPT:
        return Dialogue(*names, kind, tools, deque(), _until_last_answer(messages), over=True)
    following = [*messages[1:], {"role": ""}]
    said = [
        m for m, after in zip(messages, following, strict=True) if m["role"] != "assistant" or after["role"] == "tool"
    ]
    return Dialogue(*names, kind, tools, deque(said))


def _until_last_answer(messages: Sequence[Message]) -> list[Message]:
    ends = [number for number, m in enumerate(messages, 1) if m["role"] == "assistant"]
    return list(messages[: ends[-1]]) if ends else []
