"""A server's greedy answer in the terminal, with the draft tokens that the target accepted told from its own.

A step of the target ends with a token of its own; all before it in the step are drafts that it accepted. The stream has a
step in each chunk as long as the server serves nobody else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from eyas.benchmark.endpoint import stream_steps
from eyas.errors import EyasError
from eyas.extraction.server import Server, client_of
from eyas.templates.chat import ChatTemplate, TemplateRefusal

ACCEPTED = "black on green"
_UNFINISHED = "�"  # what decoders put for bytes that are no character, or not yet
_CHARACTER_TOKENS = 4  # bytes of the longest character
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal obeys some of them


@dataclass
class Count:
    """What an answer was made of.

    Attributes:
        tokens: all of them.
        steps: steps of the target behind the prompt's own, which gives the first token.
        accepted: draft tokens that were accepted.
    """

    tokens: int = 0
    steps: int = -1
    accepted: int = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Count a step."""
        self.tokens += len(token_ids)
        self.steps += 1
        self.accepted += len(token_ids) - 1

    def line(self) -> str:
        """The count in words."""
        each = f", {(self.tokens - 1) / self.steps:.2f} tokens a step" if self.steps else ""
        return f"{self.tokens} tokens, {self.steps} step{'s' * (self.steps != 1)}{each}, {self.accepted / self.tokens:.0%} were accepted drafts"


class Pieces:
    """The text of tokens one by one; a character that several make up comes with the last of them, special tokens are left out."""

    def __init__(self, template: ChatTemplate) -> None:
        self._decode = template.tokens.decode
        self._special = frozenset(template.special_ids)
        self._context: list[int] = []  # some decoders drop the space before a first word
        self._open: list[int] = []

    def text(self, token_id: int) -> str:
        """What this token completes, the empty text if nothing."""
        if token_id in self._special:
            text = self.rest()
            self._context = [token_id]
            return text
        self._open.append(token_id)
        if self._decoded().endswith(_UNFINISHED) and len(self._open) < _CHARACTER_TOKENS:
            return ""
        return self.rest()

    def rest(self) -> str:
        """What is held back, finished or not."""
        text = self._decoded() if self._open else ""
        self._context, self._open = self._open[-1:] or self._context, []
        return _CONTROL.sub(_UNFINISHED, text)

    def _decoded(self) -> str:
        before = self._decode(self._context, special=True)
        return self._decode([*self._context, *self._open], special=True)[len(before) :]


def marked(accepted: str, out: Console) -> Text:
    """Text of accepted drafts: in colour, or in brackets where there is none."""
    if out.color_system is not None and not out.no_color:
        return Text(accepted, ACCEPTED)
    return Text(accepted and f"[{accepted}]")


class Screen:
    """Shows steps as they come."""

    def __init__(self, template: ChatTemplate, out: Console) -> None:
        self._pieces, self._out = Pieces(template), out

    def step(self, token_ids: Sequence[int]) -> None:
        """Show a step."""
        accepted = "".join(map(self._pieces.text, token_ids[:-1]))
        own = self._pieces.text(token_ids[-1])
        self._print(marked(accepted, self._out), Text(own))

    def end(self) -> None:
        """Show what was held back, and end the line."""
        self._print(Text(self._pieces.rest() + "\n"))

    def _print(self, *texts: Text) -> None:
        self._out.print(Text.assemble(*texts), end="", soft_wrap=True)


async def show_answer(
    server: Server, template: ChatTemplate, prompt: str, *, max_tokens: int, context: int, out: Console
) -> Count:
    """Ask a server and show its answer while it comes.

    Args:
        server: from `open_server`.
        template: the target's.
        prompt: the user's text, alone in its conversation.
        max_tokens: longest answer.
        context: longest prompt and answer together.
        out: where to show it.

    Raises:
        EyasError: the prompt cannot be put or is too long, or the server fails.
    """
    try:
        prompt_ids = template.prompt_ids([{"role": "user", "content": prompt}])
    except TemplateRefusal as refusal:
        raise EyasError(f"the target's chat template does not take this prompt: {refusal}") from refusal
    room = min(max_tokens, context - len(prompt_ids))
    if room < 1:
        raise EyasError(
            f"the prompt has {len(prompt_ids)} tokens, target.max_model_len is {context}; no room for an answer"
        )
    screen, count = Screen(template, out), Count()
    try:
        async with client_of(server.root, server.timeout_s, 0) as client:
            async for token_ids in stream_steps(client, server, prompt_ids, room):
                count.add(token_ids)
                screen.step(token_ids)
    finally:
        screen.end()  # an error begins a line of its own
    return count
