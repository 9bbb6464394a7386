"""Conversations of nothing but texts, whose template writes the same between them whatever they say.

For each sequence of roles it is found out once, with marks for the texts, whether every prompt and every finished turn is
the beginning of the whole; then one render of a conversation, compared with what the marks foretell, gives all boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eyas.templates.answers import CLOSE, OPEN
from eyas.templates.boundaries import TemplateRefusal

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]


def is_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages are texts alone, in which templates look for nothing and from which they strip nothing."""
    return all(
        message.keys() == {"role", "content"}
        and message["content"] == message["content"].strip()
        and OPEN not in message["content"]
        and CLOSE not in message["content"]
        for message in messages
    )


def texts_between(render: Render, roles: Sequence[str]) -> tuple[str, ...] | None:
    """What the template writes before, between and after the texts of a conversation; None where prompts are no prefixes.

    Args:
        render: gives the text of messages, ready for an answer or not; raises `TemplateRefusal`.
        roles: of the messages.
    """
    marked = [{"role": role, "content": f"eyas{number}text"} for number, role in enumerate(roles)]
    try:
        whole = render(marked, False)
        between: list[str] = []
        end = 0
        for number, message in enumerate(marked):
            start = whole.find(message["content"])
            if start < end or whole.count(message["content"]) != 1:
                return None
            if message["role"] == "assistant" and not (
                render(marked[:number], True) == whole[:start] and whole.startswith(render(marked[: number + 1], False))
            ):
                return None
            between.append(whole[end:start])
            end = start + len(message["content"])
    except TemplateRefusal:
        return None
    return (*between, whole[end:])


def answer_starts(between: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
    """The whole conversation as foretold, and where in it each answer begins."""
    parts: list[str] = []
    starts: list[int] = []
    length = 0
    for text, message in zip(between, messages, strict=False):
        length += len(text)
        if message["role"] == "assistant":
            starts.append(length)
        parts += (text, message["content"])
        length += len(message["content"])
    return "".join([*parts, between[-1]]), starts
