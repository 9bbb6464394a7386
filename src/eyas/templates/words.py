"""Text encoded word by word, each word once: a tokenizer spends most of its time on words that it has seen before.

It takes a tokenizer that cuts text before every space between a printable ASCII character and an ASCII letter, as GPT-2's and
most later ones do; what it makes of one side then depends on nothing on the other.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable
from typing import Any

_BEFORE = "".join(chr(code) for code in range(0x21, 0x7F))
_CUT = re.compile(r"(?<=[!-~])(?= [A-Za-z])")
_MOST_WORDS = 1 << 18
_CHECKED = 64  # texts that are encoded whole as well, in each process


def cuts_words(backend: Any, added: Iterable[Any]) -> bool:
    """Whether a tokenizer surely cuts where `WordEncoder` does.

    Args:
        backend: a `tokenizers.Tokenizer`.
        added: its added tokens, which are looked for before any cut and may swallow spaces.
    """
    if any(token.lstrip or token.rstrip or token.single_word or " " in token.content for token in added):
        return False
    if backend.pre_tokenizer is None or type(backend.normalizer).__name__ not in ("NoneType", "NFC"):
        return False
    text = "".join(f"{before} {letter}" for before in _BEFORE for letter in string.ascii_letters)
    starts = {start for _, (start, _) in backend.pre_tokenizer.pre_tokenize_str(text)}
    return all(place in starts for place in range(1, len(text), 3))


class WordEncoder:
    """Encodes texts of a tokenizer for which `cuts_words` holds."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        """``encode`` gives the ids of any text."""
        self._encode = encode
        self._words: dict[str, list[int]] = {}
        self._checks = _CHECKED
        self._whole = False

    def __call__(self, text: str) -> list[int]:
        """Ids of a text."""
        if self._whole:
            return self._encode(text)
        ids: list[int] = []
        for word in _CUT.split(text):
            known = self._words.get(word)
            if known is None:
                if len(self._words) >= _MOST_WORDS:
                    self._words.clear()
                known = self._words[word] = self._encode(word)
            ids += known
        if self._checks:
            self._checks -= 1
            whole = self._encode(text)
            self._whole = whole != ids
            return whole
        return ids
