"""Keeps benchmark prompts out of the training data: equal prompts, and near duplicates.

Takes the benchmark sets' user turns; says of a text whether it is among them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set

from eyas.conversations.shingles import shingles, words

_NEAR = 0.7
_CONTAINED_SHINGLES = 6


class BenchmarkIndex:
    """Benchmark prompts, indexed by shingle: a look-up touches only prompts that share one."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._exact: set[tuple[str, ...]] = set()
        self._sizes: list[int] = []
        self._by_shingle: dict[str, list[int]] = defaultdict(list)
        for prompt in prompts:
            found = words(prompt)
            # symbols only (`+-*/`) leave no words; an empty key would match every other such text
            if found:
                self._exact.add(tuple(found))
            grams = shingles(found)
            for gram in grams:
                self._by_shingle[gram].append(len(self._sizes))
            self._sizes.append(len(grams))
        self._known = frozenset(self._by_shingle)

    def contains(self, text: str) -> bool:
        """Whether the text is a benchmark prompt, or nearly so.

        Near: Jaccard similarity of the word shingles of at least 0.7; or, from eight words on, 0.7 of the shorter
        text's shingles in the longer one (a prompt wrapped into instructions, or a piece of one).
        """
        found = words(text)
        return self.is_in([found], shingles(found))

    def is_in(self, turns: Sequence[list[str]], grams: Set[str]) -> bool:
        """Whether one of a conversation's user turns is a benchmark prompt, or one is spread over them.

        Args:
            turns: the words of each user turn.
            grams: the shingles of all turns as one text.
        """
        if any(tuple(turn) in self._exact for turn in turns):
            return True
        # what all turns together share with no prompt no turn does, and hardly any conversation gets beyond this
        shared = self._shared(grams)
        if not any(count >= _NEAR * min(self._sizes[i], _CONTAINED_SHINGLES) for i, count in shared.items()):
            return False
        return self._is_near(grams, shared) or any(
            self._is_near(own, self._shared(own)) for own in map(shingles, turns)
        )

    def _shared(self, grams: Set[str]) -> Counter[int]:
        """How many shingles each prompt shares with these, where there are any."""
        return Counter(index for gram in self._known & grams for index in self._by_shingle[gram])

    def _is_near(self, grams: Set[str], shared: Counter[int]) -> bool:
        for index, count in shared.items():
            smaller = min(len(grams), self._sizes[index])
            union = len(grams) + self._sizes[index] - count
            if count >= _NEAR * union or (smaller >= _CONTAINED_SHINGLES and count >= _NEAR * smaller):
                return True
        return False
