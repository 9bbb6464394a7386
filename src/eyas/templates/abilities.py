"""What a template makes of tools, found out by rendering a small conversation with marked words in it.

A template that knows no tools need not say so: many write a call as an empty answer, or a result under a role that the
target has never seen. Such conversations must be set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.templates.boundaries import TemplateRefusal

_NAME, _KEY, _VALUE, _RESULT = "eyas_probe", "eyas_key", "eyas_value", "eyas_result"
_CALL_ID = "eyasprobe"  # Mistral's templates want nine letters or digits
_USER = {"role": "user", "content": "eyas_question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "A key."}}},
    },
}
_ANSWERED = {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": _RESULT}
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True)
class Abilities:
    """What of tools a template writes out."""

    definitions: bool
    calls: bool
    results: bool
    arguments_as_text: bool  # it wants a call's arguments as JSON text, not as an object

    def check(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a conversation that the template would write only in part.

        Raises:
            TemplateRefusal: it has tool definitions, calls or results that the template does not write.
        """
        for has, takes, what in (
            (bool(tools), self.definitions, "tool definitions"),
            (any("tool_calls" in message for message in messages), self.calls, "tool calls"),
            (any(message["role"] == "tool" for message in messages), self.results, "tool results"),
        ):
            if has and not takes:
                raise TemplateRefusal(f"the template does not write {what}")


def _called(arguments: Any) -> dict[str, Any]:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def find_abilities(render: Render) -> Abilities:
    """Try a template out.

    Args:
        render: gives the text of messages with tools, ready for an answer; raises `TemplateRefusal`.
    """

    def written(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        try:
            return render(messages, tools)
        except TemplateRefusal:
            return ""

    as_object, as_text = {_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}'
    arguments: Any = as_object
    text = written([_USER, _called(as_object), _ANSWERED])
    if not text or str(as_object) in text:
        text_of_text = written([_USER, _called(as_text), _ANSWERED])
        if text_of_text:
            arguments, text = as_text, text_of_text
    return Abilities(
        definitions=_NAME in written([_USER], [_TOOL]),
        calls=_NAME in text and _VALUE in text,
        results=_RESULT in text,
        arguments_as_text=arguments is as_text,
    )
