"""Keeps benchmark prompts out of the training data: equal prompts, and near duplicates.

Takes the benchmark sets' user turns; says of a conversation whether one of its user turns is among them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from eyas.conversations.identity import words

_SHINGLE_WORDS = 3
_NEAR = 0.7
_CONTAINED_SHINGLES = 6


def _shingles(text: str) -> frozenset[str]:
    """Runs of three words; a text shorter than that is one shingle."""
    found = words(text)
    last = max(len(found) - _SHINGLE_WORDS, 0)
    return frozenset(" ".join(found[i : i + _SHINGLE_WORDS]) for i in range(last + 1)) - {""}


class BenchmarkIndex:
    """Benchmark prompts, indexed by shingle: a look-up touches only prompts that share one."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._exact: set[tuple[str, ...]] = set()
        self._sizes: list[int] = []
        self._by_shingle: dict[str, list[int]] = defaultdict(list)
        for prompt in prompts:
            # symbols only (`+-*/`) leave no words; an empty key would match every other such text
            if key := tuple(words(prompt)):
                self._exact.add(key)
            shingles = _shingles(prompt)
            for shingle in shingles:
                self._by_shingle[shingle].append(len(self._sizes))
            self._sizes.append(len(shingles))

    def contains(self, text: str) -> bool:
        """Whether the text is a benchmark prompt, or nearly so.

        Near: Jaccard similarity of the word shingles of at least 0.7; or, from eight words on, 0.7 of the shorter
        text's shingles in the longer one (a prompt wrapped into instructions, or a piece of one).
        """
        if tuple(words(text)) in self._exact:
            return True
        shingles = _shingles(text)
        shared = Counter(index for shingle in shingles for index in self._by_shingle.get(shingle, ()))
        for index, count in shared.items():
            smaller = min(len(shingles), self._sizes[index])
            union = len(shingles) + self._sizes[index] - count
            if count >= _NEAR * union or (smaller >= _CONTAINED_SHINGLES and count >= _NEAR * smaller):
                return True
        return False
