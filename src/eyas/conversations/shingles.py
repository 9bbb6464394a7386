"""What prompts are compared by: their words, without case, punctuation and spacing, in runs of three.

Takes text; gives words and shingles, for the look-up of benchmark prompts and for near duplicates alike.
"""

from __future__ import annotations

import re

SHINGLE_WORDS = 3
# Han and kana write no spaces: there each character counts as a word
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_ASCII_WORD = re.compile(r"\w+")  # the same in ASCII text, in half the time


def words(text: str) -> list[str]:
    """The words of a text; none in a text of symbols only."""
    found: list[str] = (_ASCII_WORD if text.isascii() else _WORD).findall(text.casefold())
    return found


def shingles(found: list[str]) -> set[str]:
    """Runs of three words; fewer words than that are one shingle, no words none."""
    if len(found) < SHINGLE_WORDS:
        return {" ".join(found)} if found else set()
    return set(map(" ".join, zip(found, found[1:], found[2:], strict=False)))
