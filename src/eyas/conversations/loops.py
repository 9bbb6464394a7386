"""Degenerate answers: a text whose tail repeats a few tokens. They flatter acceptance, so they are counted."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 16
REPEATS = 4
_SHORTEST_TAIL = 12


def is_looped(token_ids: Sequence[int]) -> bool:
    """Whether the last tokens are one n-gram (up to 16 tokens) at least 4 times over, and at least 12 tokens long."""
    tokens = list(token_ids)
    for period in range(1, LONGEST_PERIOD + 1):
        length = max(period * REPEATS, _SHORTEST_TAIL)
        if length > len(tokens):
            continue
        tail = tokens[-length:]
        if all(tail[i] == tail[i - period] for i in range(period, length)):
            return True
    return False
