"""Training rows from turns: one row per conversation, the mask from generation boundaries.

A turn's row starts with exactly the ids that the target read. Turns share a row where the later prompt starts with the
earlier prompt and answer; where a template rewrites history they do not, and each such turn gets its own row with its
true context. Nothing is rendered or tokenised here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import EyasError


@dataclass(frozen=True)
class GeneratedTurn:
    """What the target read and wrote."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]

    @property
    def length(self) -> int:
        """Tokens of a row of its own."""
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True)
class TokenRow:
    """One row to extract and to train on; the three lists have equal lengths."""

    input_ids: list[int]
    loss_mask: list[bool]  # true on the tokens that the target generated, its end-of-turn token included
    logprobs: list[float]  # the engine's, NaN for answers that the data holds; 0.0 where the mask is false
    turns: int


def whole_turns(stored: Sequence[Mapping[str, Any]]) -> list[GeneratedTurn]:
    """Turns with their prompts in full.

    Args:
        stored: turns of a conversation as the responses table has them: ``shared`` leading ids of a prompt are those of
            the previous turn's prompt and answer, ``prompt_ids`` are the rest.

    Raises:
        EyasError: a turn shares more ids than there are before it.
    """
    turns: list[GeneratedTurn] = []
    context: list[int] = []
    for number, turn in enumerate(stored, 1):
        if not 0 <= turn["shared"] <= len(context):
            raise EyasError(f"turn {number} shares {turn['shared']} ids with the {len(context)} before it")
        prompt = context[: turn["shared"]] + list(turn["prompt_ids"])
        turns.append(GeneratedTurn(prompt, turn["token_ids"], turn["logprobs"]))
        context = prompt + list(turn["token_ids"])
    return turns


def encode_turns(turns: Sequence[GeneratedTurn]) -> list[TokenRow]:
    """The fewest rows that give every turn the context it had when it was generated.

    Raises:
        EyasError: a turn's token ids and log-probabilities have different lengths.
    """
    rows: list[TokenRow] = []
    for turn in turns:
        if len(turn.token_ids) != len(turn.logprobs):
            raise EyasError(f"a turn has {len(turn.token_ids)} token ids but {len(turn.logprobs)} log-probabilities")
        prompt = list(turn.prompt_ids)
        # the latest row that it goes on from: history may be rewritten for one turn and restored for the next
        at = next(
            (i for i in reversed(range(len(rows))) if prompt[: len(rows[i].input_ids)] == rows[i].input_ids), None
        )
        earlier = TokenRow([], [], [], 0) if at is None else rows.pop(at)
        between = len(prompt) - len(earlier.input_ids)
        row = TokenRow(
            input_ids=prompt + list(turn.token_ids),
            loss_mask=earlier.loss_mask + [False] * between + [True] * len(turn.token_ids),
            logprobs=earlier.logprobs + [0.0] * between + list(turn.logprobs),
            turns=earlier.turns + 1,
        )
        rows.insert(len(rows) if at is None else at, row)
    return rows
