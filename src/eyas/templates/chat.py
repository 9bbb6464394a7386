"""Prompts as token ids, by the target's own chat template.

Takes a target's directory; gives the ids that the target reads before each answer. Later turns go on from the ids
as they were generated (no answer is tokenised again) wherever the template allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError

from eyas.errors import EyasError
from eyas.targets.resolve import chat_template

Message = dict[str, str]


class TemplateRefusal(Exception):
    """The target's template does not take a conversation (no system role, say); that conversation is set aside."""


class ChatTemplate:
    """A target's tokenizer with its chat template."""

    def __init__(self, directory: Path, *, trust_remote_code: bool = False):
        """Load the tokenizer.

        Raises:
            EyasError: the target has no chat template, or its tokenizer cannot be loaded.
        """
        self._template = chat_template(directory)
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise EyasError(f"{directory}: the tokenizer cannot be loaded: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return len(self._tokenizer)

    @property
    def special_ids(self) -> list[int]:
        """Ids of all special tokens, the end-of-turn token among them."""
        added = [i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special]
        return sorted({*self._tokenizer.all_special_ids, *added})

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The conversation as the template writes it.

        Raises:
            TemplateRefusal: the template does not take such a conversation.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._template, tokenize=False, add_generation_prompt=generation_prompt
            )
        except TemplateError as error:
            raise TemplateRefusal(str(error)) from error
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; its special tokens are recognised, none is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids without their special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation that ends with a user turn, ready for the target's answer."""
        return self.encode(self.render(messages, generation_prompt=True))

    def next_prompt_ids(
        self, messages: Sequence[Message], prompt_ids: Sequence[int], answer_ids: Sequence[int]
    ) -> list[int]:
        """Ids for the answer after the next user turn.

        Where the template is prefix-stable (it renders earlier turns as it did when they were new) the result starts
        with ``prompt_ids + answer_ids`` as they are; otherwise the whole conversation is rendered afresh, as the
        target's server would do.

        Args:
            messages: the conversation up to the new user turn, its last assistant turn being `decode(answer_ids)`.
            prompt_ids: what the target read before its last answer.
            answer_ids: what it generated, its end-of-turn token included if it came to one.
        """
        *history, answer, _user = messages
        before = self.render(history, generation_prompt=True) + answer["content"]
        whole = self.render(messages, generation_prompt=True)
        if not whole.startswith(before):
            return self.encode(whole)
        rest = self.encode(whole[len(before) :])
        ended = bool(answer_ids) and bool(rest) and answer_ids[-1] == rest[0] and rest[0] in self.special_ids
        return [*prompt_ids, *answer_ids, *(rest[1:] if ended else rest)]
