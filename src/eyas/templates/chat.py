"""Conversations as token ids, by the target's own chat template.

Takes a target's directory; gives the ids that the target reads before each answer. Later turns go on from the ids
as they were generated (no answer is tokenised again) wherever the template allows it. Text that quotes a template token
stays text. Answers that the data holds get their boundaries from what the template writes before and after them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.targets.resolve import chat_template
from eyas.templates.abilities import Abilities, find_abilities
from eyas.templates.answers import CLOSE, OPEN, split_answer
from eyas.templates.boundaries import TemplateRefusal
from eyas.templates.encoding import GeneratedTurn, TokenRow, encode_turns
from eyas.templates.kept import answered_turn
from eyas.templates.plain import answer_starts, is_plain, texts_between
from eyas.templates.quoting import Quoted, quote
from eyas.templates.tokens import TemplateTokens

__all__ = ["ChatTemplate", "Message", "TemplateRefusal"]

Message = dict[str, Any]
_TODAY = datetime(2026, 1, 1)  # templates that write the date (Llama 3, gpt-oss) would give other tokens every day
_WORD = "eyas"


def _strftime(form: str) -> str:
    return _TODAY.strftime(form)


class ChatTemplate:
    """A target's tokenizer with its chat template."""

    def __init__(
        self, directory: Path, *, trust_remote_code: bool = False, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Load the tokenizer.

        Args:
            directory: of the target, in Hugging Face layout.
            trust_remote_code: run the tokenizer's own code, if it has any.
            variables: of the template, such as ``enable_thinking``.

        Raises:
            EyasError: the target has no chat template, or its tokenizer cannot be loaded.
        """
        self._template = chat_template(directory)
        self.tokens = TemplateTokens(directory, self._template, trust_remote_code=trust_remote_code)
        self._variables = {"strftime_now": _strftime, **(variables or {})}
        self._generation_config = directory / "generation_config.json"
        self._between: dict[tuple[str, ...], tuple[str, ...] | None] = {}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return len(self.tokens.tokenizer)

    @property
    def special_ids(self) -> list[int]:
        """Ids of all special tokens, the end-of-turn token among them."""
        return self.tokens.special_ids

    @cached_property
    def end_ids(self) -> list[int]:
        """Ids that end a turn: those of the generation config and of the tokenizer, and the one that the template writes."""
        ends = {self.tokens.tokenizer.eos_token_id}
        if self._generation_config.is_file():
            configured = json.loads(self._generation_config.read_text()).get("eos_token_id")
            ends |= set(configured) if isinstance(configured, list) else {configured}
        try:
            asked = [{"role": "user", "content": _WORD}]
            whole = self.render([*asked, {"role": "assistant", "content": _WORD}], generation_prompt=False)
        except TemplateRefusal:
            whole = ""
        after = self.encode(whole[whole.rfind(_WORD) + len(_WORD) :] if whole else "")
        ends.add(next((i for i in after if i in self.tokens.added), None))
        return sorted(i for i in ends if i is not None)

    @cached_property
    def _abilities(self) -> Abilities:
        return find_abilities(lambda messages, tools: self._write(messages, tools, True))

    @cached_property
    def _opening(self) -> str:
        return self.render([{"role": "user", "content": _WORD}], generation_prompt=True).rstrip()

    @property
    def think_opened(self) -> bool:
        """Whether the prompt ends in an opened think block."""
        return self._opening.endswith(OPEN)

    @property
    def _think_closed(self) -> bool:
        return self._opening.endswith(CLOSE)

    def _write(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        try:
            text: str = self.tokens.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except Exception as error:  # templates are foreign programs: a type, a key, an index, their own words
            raise TemplateRefusal(str(error) or type(error).__name__) from error
        return text

    def _form(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message in the form that the template takes."""
        if "tool_calls" in message and self._abilities.arguments_as_text:
            calls = [
                call
                | {
                    "function": call["function"]
                    | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
                }
                for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        if "reasoning_content" in message and "reasoning_content" not in self._template:
            message = {**message, "thinking": message["reasoning_content"]}  # gpt-oss
        return message

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), generation_prompt: bool
    ) -> str:
        """The conversation as the template writes it.

        Raises:
            TemplateRefusal: the template does not take such a conversation.
        """
        if tools or any("tool_calls" in message or message["role"] == "tool" for message in messages):
            self._abilities.check(messages, tools)
        return self._write([self._form(message) for message in messages], tools, generation_prompt)

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; its special tokens are recognised, none is added."""
        return self.tokens.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids without their special tokens."""
        return self.tokens.decode(ids, special=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id; a character that several tokens make up stands at the last of them."""
        texts: list[str] = []
        start = 0
        for position in range(len(ids)):
            context = ids[max(start - 1, 0) : start]  # some decoders drop the space before a first word
            before = self.tokens.decode(context, special=True)
            text = self.tokens.decode([*context, *ids[start : position + 1]], special=True)[len(before) :]
            if text.endswith("�") and position - start < 4 and position + 1 < len(ids):
                texts.append("")
                continue
            texts.append(text)
            start = position + 1
        return texts

    def parse_answer(self, ids: Sequence[int]) -> Message:
        """A generated answer as an assistant message; with ``reasoning_content`` if the target thought first."""
        thought, said = split_answer(self.tokens, ids, think_opened=self.think_opened)
        return {"role": "assistant", "content": said} | ({"reasoning_content": thought} if thought else {})

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a conversation that ends before an answer, ready for the target's.

        Raises:
            TemplateRefusal: the template does not take such a conversation.
        """
        quoted = quote(messages, tools, self.tokens.literals)
        return self.tokens.encode(self.rendered(quoted.messages, quoted.tools, True), quoted)

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], generation_prompt: bool
    ) -> str:
        """As `render`, for messages whose quoted template tokens are hidden."""
        return self.render([dict(m) for m in messages], tools=tools, generation_prompt=generation_prompt)

    def next_prompt_ids(
        self,
        messages: Sequence[Message],
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids for the answer after the next user turn, or after tool results.

        Where the template is prefix-stable (it renders earlier turns as it did when they were new) the result starts
        with ``prompt_ids + answer_ids`` as they are; otherwise the whole conversation is rendered afresh, as the
        target's server would do. So it is where the last assistant turn is not `parse_answer(answer_ids)`.

        Args:
            messages: the conversation up to the new turn.
            prompt_ids: what the target read before its last answer.
            answer_ids: what it generated, its end-of-turn token included if it came to one.
            tools: definitions of the conversation's tools.

        Raises:
            TemplateRefusal: the template does not take such a conversation.
        """
        generated = self.decode(answer_ids)
        quoted = quote(messages, tools, self.tokens.literals, generated)
        whole = self.rendered(quoted.messages, quoted.tools, True)
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        before = self.rendered(quoted.messages[:last], quoted.tools, True) + quoted.hide(generated)
        if messages[last] != self.parse_answer(answer_ids) or not whole.startswith(before):
            return self.tokens.encode(whole, quoted)
        rest = self.tokens.encode(whole[len(before) :], quoted)
        ended = bool(answer_ids) and bool(rest) and answer_ids[-1] == rest[0] and rest[0] in self.special_ids
        return [*prompt_ids, *answer_ids, *(rest[1:] if ended else rest)]

    def answered_turns(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[GeneratedTurn]:
        """The data's own answers, each in the context that the target would have; their log-probabilities are NaN.

        Reasoning is left out where the prompt closes the think block at once.

        Raises:
            TemplateRefusal: the template does not take such a conversation, or the answers have no clear boundaries.
        """
        if self._think_closed:
            messages = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
        quoted = quote(messages, tools, self.tokens.literals)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not tools and (plain := self._plain_turns(quoted)) is not None:
            return plain
        return [answered_turn(self, quoted, position) for position in answers]

    def _plain_turns(self, quoted: Quoted) -> list[GeneratedTurn] | None:
        """The answers of a conversation of texts alone, from one render; None where that is not enough."""
        messages = quoted.messages
        if not is_plain(messages):
            return None
        roles = tuple(message["role"] for message in messages)
        if roles not in self._between:
            self._between[roles] = texts_between(lambda some, prompt: self._write(some, (), prompt), roles)
        between = self._between[roles]
        if between is None:
            return None
        text, starts = answer_starts(between, messages)
        if text != self._write(messages, (), False):
            return None
        whole: list[int] = []
        prompts: list[int] = []  # so many ids of the whole each answer follows
        begin = 0
        for end, ids in self.tokens.stretches(text, quoted):
            while len(prompts) < len(starts) and starts[len(prompts)] <= end:
                before = self.tokens.encode(text[begin : starts[len(prompts)]], quoted)
                if ids[: len(before)] != before:
                    return None
                prompts.append(len(whole) + len(before))
            whole += ids
            begin = end
        turns: list[GeneratedTurn] = []
        for prompt, following in zip(prompts, [*prompts, len(whole)][1:], strict=True):
            stop = next((i + 1 for i in range(prompt, following) if whole[i] in self.end_ids), None)
            if stop is None:
                return None
            turns.append(GeneratedTurn(whole[:prompt], whole[prompt:stop], [math.nan] * (stop - prompt)))
        return turns

    def answered_rows(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> list[TokenRow]:
        """Training rows of the data's own answers, the fewest that give each its true context.

        Turns that need more than ``max_tokens`` are left out.

        Raises:
            TemplateRefusal: as `answered_turns`.
        """
        return encode_turns([turn for turn in self.answered_turns(messages, tools) if turn.length <= max_tokens])
