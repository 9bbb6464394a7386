"""Rendered text as token ids, cut at the template's own tokens.

A tokenizer looks for its added tokens first and encodes the stretches between them one by one. The same is done here,
so that a stretch which many renders of a conversation share is encoded once, and a stretch that quotes a template token
is encoded by a tokenizer that does not know it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.templates.boundaries import TemplateRefusal
from eyas.templates.quoting import Quoted
from eyas.templates.words import WordEncoder, cuts_words

_MARK = chr(0x10FFFF)  # a noncharacter; stands before a stretch, so that it is not taken for the beginning of a text
_CACHED_CHARS = 4 << 20


def _token_pattern(token: Any) -> str:
    """What a tokenizer matches for an added token, the white space that it swallows included."""
    literal: str = re.escape(token.content)
    if token.single_word:
        literal = rf"(?<!\w){literal}(?!\w)"
    return (r"\s*" if token.lstrip else "") + literal + (r"\s*" if token.rstrip else "")


class TemplateTokens:
    """A target's tokenizer, which takes template tokens for such only where the template wrote them."""

    def __init__(self, directory: Path, template: str, *, trust_remote_code: bool) -> None:
        """Load the tokenizer.

        Raises:
            EyasError: it cannot be loaded.
        """
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise EyasError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
        self.added: dict[int, Any] = dict(self.tokenizer.added_tokens_decoder)
        own = [t for t in self.added.values() if t.special or t.content in template]
        own.sort(key=lambda token: len(token.content), reverse=True)  # the longest match wins, as in the tokenizer
        self.literals = re.compile("|".join(re.escape(t.content) for t in own)) if own else None
        self._cut = re.compile("|".join(map(_token_pattern, own))) if own else None
        self._own = {token.content for token in own}
        self._stretches: dict[str, list[int]] = {}
        self._cached_chars = 0

    @property
    def special_ids(self) -> list[int]:
        """Ids of all special tokens, the end-of-turn token among them."""
        return sorted({*self.tokenizer.all_special_ids, *(i for i, token in self.added.items() if token.special)})

    def id_of(self, literal: str) -> int | None:
        """The id of an added token, if there is such a token."""
        return next((i for i, token in self.added.items() if token.content == literal), None)

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Text of ids, with or without the special tokens among them."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def _encode(self) -> Callable[[str], list[int]]:
        """Encodes text and knows all added tokens."""
        tokenizer = self.tokenizer
        if tokenizer.is_fast:
            backend = tokenizer.backend_tokenizer

            def whole(text: str) -> list[int]:
                # this one leaves out the offsets, which take as long as the ids
                ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
                return ids

            return WordEncoder(whole) if cuts_words(backend, self.added.values()) else whole
        if "allow_special_tokens" in inspect.signature(tokenizer.encode).parameters:  # Kimi's, on tiktoken
            return lambda text: tokenizer.encode(text, allow_special_tokens=True)
        return lambda text: tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _encode_quoted(self) -> Callable[[str], list[int]]:
        """Encodes a stretch and takes the template's tokens in it for mere text."""
        tokenizer = self.tokenizer
        if not tokenizer.is_fast:
            if "allow_special_tokens" in inspect.signature(tokenizer.encode).parameters:
                return lambda text: tokenizer.encode(text, allow_special_tokens=False)
            return lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        from tokenizers import AddedToken, Tokenizer

        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in self._own]
        content["post_processor"] = content["truncation"] = content["padding"] = None
        plain = Tokenizer.from_str(json.dumps(content))
        plain.add_special_tokens([AddedToken(_MARK, special=True, normalized=False)])

        def encode(text: str) -> list[int]:
            if _MARK in text:
                raise TemplateRefusal("the text holds U+10FFFF, which stands for no character")
            ids: list[int] = plain.encode(_MARK + text, add_special_tokens=False).ids
            return ids[1:]

        return encode

    def _stretch(self, text: str) -> list[int]:
        ids = self._stretches.get(text)
        if ids is None:
            if self._cached_chars > _CACHED_CHARS:
                self._stretches.clear()
                self._cached_chars = 0
            ids = self._stretches[text] = self._encode(text)
            self._cached_chars += len(text)
        return ids

    def stretches(self, text: str, quoted: Quoted | None = None) -> Iterator[tuple[int, list[int]]]:
        """Rendered text from one template token to the next: where each stretch ends, and its ids.

        Args:
            text: as rendered, with private characters in place of what is quoted.
            quoted: says what they stand for.
        """
        cuts = [(m.start(), m.end()) for m in self._cut.finditer(text)] if self._cut else []
        starts = [0, *(start for start, _ in cuts if start)]
        ends = dict(cuts)
        for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
            stretch = text[start:stop]
            if quoted is None or not quoted.literals or quoted.restore(stretch) == stretch:
                yield stop, self._stretch(stretch)
                continue
            token_end = ends.get(start, start)
            ids = self._stretch(text[start:token_end]) if token_end > start else []
            yield stop, ids + self._encode_quoted(quoted.restore(text[token_end:stop]))

    def encode(self, text: str, quoted: Quoted | None = None) -> list[int]:
        """Ids of rendered text; its template tokens are recognised, those that the data quotes are not, none is added.

        Args:
            text: as rendered, with private characters in place of what is quoted.
            quoted: says what they stand for.
        """
        return [i for _, ids in self.stretches(text, quoted) for i in ids]
