"""Where an answer begins and ends, told from token ids alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class TemplateRefusal(Exception):
    """The target's template does not take a conversation (no system role, say); that conversation is set aside."""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids are equal."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])


def answer_span(prompt: list[int], history: list[int], full: list[int], end_ids: Collection[int]) -> tuple[int, int]:
    """The ids of the last answer in ``full``: from the end of the prompt up to and with the first token that ends a turn.

    A prompt may end in a scaffold that the finished turn does not have (an opened think block). Then the answer begins
    where the two part, if the history without the scaffold is still there in full.

    Args:
        prompt: what the target reads before the answer.
        history: the same conversation without the opening of the answer's turn.
        full: the conversation with the answer.
        end_ids: tokens that end a turn.

    Returns:
        Start and end in ``full``.

    Raises:
        TemplateRefusal: the template writes the earlier turns otherwise once the answer is there.
    """
    start = common_prefix(prompt, full)
    if start < len(prompt) and (start < len(history) or full[: len(history)] != history):
        raise TemplateRefusal("the template writes earlier turns otherwise once an answer follows")
    end = next((i + 1 for i in range(start, len(full)) if full[i] in end_ids), len(full))
    return start, end
