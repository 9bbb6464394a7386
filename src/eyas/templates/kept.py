"""Boundaries of the answers that the data holds, in the ids of what the template writes before and after each.

What the target reads before an answer is the template's prompt; what it would have written is the rest of the finished
turn. Three things stand in the way. The prompt may end in a scaffold (an opened think block) that the finished turn
lacks. The template may drop an answer's reasoning as soon as the turn is finished. And it may write earlier turns
otherwise once an answer follows (system messages that move, reasoning around tool calls): then the answer is cut out of
the finished turn and set behind the prompt, which is the context that the target has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eyas.templates.answers import CLOSE, OPEN
from eyas.templates.boundaries import TemplateRefusal, answer_span
from eyas.templates.encoding import GeneratedTurn
from eyas.templates.quoting import Quoted

if TYPE_CHECKING:
    from eyas.templates.chat import ChatTemplate

_MARK = chr(0x10FFFE)  # a noncharacter; shows where an answer's own words begin


def answered_turn(template: ChatTemplate, quoted: Quoted, position: int) -> GeneratedTurn:
    """Context and answer of the assistant turn at a position; the log-probabilities are NaN, since nobody knows them.

    Raises:
        TemplateRefusal: the template does not take the conversation, or does not write the answer.
    """
    prompt_text = template.rendered(quoted.messages[:position], quoted.tools, True)
    prompt = template.tokens.encode(prompt_text, quoted)
    message = quoted.messages[position]
    text = template.rendered([*quoted.messages[:position], message], quoted.tools, False)
    thought = message.get("reasoning_content", "").strip()
    written = text.removeprefix(prompt_text)
    if thought and template.think_opened and thought not in written:
        answer = _thoughtful(template, quoted, position, prompt_text, thought)
        return _turn(template, prompt, _joined(template, quoted, prompt_text, prompt, answer))
    if text.startswith(prompt_text):
        _check_written(message, written, position)
        return _turn(template, prompt, _joined(template, quoted, prompt_text, prompt, written))

    full = template.tokens.encode(text, quoted)
    history = template.tokens.encode(template.rendered(quoted.messages[:position], quoted.tools, False), quoted)
    try:
        start, end = answer_span(prompt, history, full, template.end_ids)
    except TemplateRefusal:
        answer = _cut_out(template, quoted, position, _opening(template, quoted, position, prompt_text))
        return _turn(template, prompt, _joined(template, quoted, prompt_text, prompt, answer))
    _check_written(message, text, position)
    return GeneratedTurn(full[:start], full[start:end], [math.nan] * (end - start))


def _check_written(message: Mapping[str, Any], text: str, position: int) -> None:
    if message["content"].strip() not in text:
        raise TemplateRefusal(f"the template does not write the answer of turn {position + 1} as it is")


def _turn(template: ChatTemplate, prompt: list[int], full: list[int]) -> GeneratedTurn:
    start, end = answer_span(prompt, prompt, full, template.end_ids)
    return GeneratedTurn(prompt, full[start:end], [math.nan] * (end - start))


def _joined(template: ChatTemplate, quoted: Quoted, prompt_text: str, prompt: list[int], answer: str) -> list[int]:
    """Ids of prompt and answer, parted at the prompt's end as they are when the target goes on from the prompt's ids."""
    whole = template.tokens.encode(prompt_text + answer, quoted)
    if whole[: len(prompt)] == prompt:
        return whole
    parted = prompt + template.tokens.encode(answer, quoted)
    if template.tokens.decode(parted, special=True) != template.tokens.decode(whole, special=True):
        raise TemplateRefusal("the tokenizer writes an answer otherwise than the end of a text")
    return parted


def _opening(template: ChatTemplate, quoted: Quoted, position: int, prompt_text: str) -> str:
    """What the template writes to have the target begin."""
    history = template.rendered(quoted.messages[:position], quoted.tools, False)
    if not prompt_text.startswith(history):
        raise TemplateRefusal("the template writes earlier turns otherwise when it asks for an answer")
    return prompt_text[len(history) :]


def _cut_out(template: ChatTemplate, quoted: Quoted, position: int, opening: str) -> str:
    """The answer's part of its finished turn, from behind the opening, found by a mark before its first word."""
    before, message = quoted.messages[:position], quoted.messages[position]
    if not opening:  # nothing opens an answer, which begins where any other would
        start = template.rendered([*before, {"role": "assistant", "content": _MARK}], quoted.tools, False).find(_MARK)
        if start >= 0:
            return template.rendered([*before, message], quoted.tools, False)[start:]
    for marked in _marked(message) if opening else ():
        text = template.rendered([*before, marked], quoted.tools, False)
        mark = text.find(_MARK)
        start = text.rfind(opening, 0, mark) if mark >= 0 else -1
        if start >= 0:
            return text[start + len(opening) :].replace(_MARK, "")
    raise TemplateRefusal(f"the template writes earlier turns otherwise once the answer of turn {position + 1} follows")


def _marked(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The message with a mark before the first word of its reasoning, of its content, of its first call."""
    for name in ("reasoning_content", "content"):
        words = message.get(name, "")
        if words.strip():
            at = len(words) - len(words.lstrip())
            yield {**message, name: words[:at] + _MARK + words[at:]}
    for first, *others in [message["tool_calls"]] if "tool_calls" in message else []:
        function = {**first["function"], "name": _MARK + first["function"]["name"]}
        yield {**message, "tool_calls": [{**first, "function": function}, *others]}


def _thoughtful(template: ChatTemplate, quoted: Quoted, position: int, prompt_text: str, thought: str) -> str:
    """An answer behind an opened think block, with the reasoning that the template drops from a finished turn."""
    opening = _opening(template, quoted, position, prompt_text)
    stem = opening.rstrip().removesuffix(OPEN)
    space = opening[len(opening.rstrip()) :]
    silent = {name: value for name, value in quoted.messages[position].items() if name != "reasoning_content"}
    messages = [*quoted.messages[:position], silent, *quoted.messages[position + 1 :]]
    said = _cut_out(template, Quoted(messages, quoted.tools, quoted.literals), position, stem)
    if said.startswith(OPEN):
        said = said.partition(CLOSE)[2]
    return f"{thought}{space}{CLOSE}{space}{space}{said.lstrip(chr(10))}"
