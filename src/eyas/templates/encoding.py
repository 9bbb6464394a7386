"""Training rows from generated turns: one row per conversation, the mask from generation boundaries.

A turn's row starts with exactly the ids that the target read. Consecutive turns share a row where the later prompt
starts with the earlier prompt and answer; where a template rewrites history they do not, and each such turn gets its
own row with its true context. Nothing is rendered or tokenised here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.errors import EyasError


@dataclass(frozen=True)
class GeneratedTurn:
    """What the target read and wrote."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class TokenRow:
    """One row to extract and to train on; the three lists have equal lengths."""

    input_ids: list[int]
    loss_mask: list[bool]  # true on the tokens that the target generated, its end-of-turn token included
    logprobs: list[float]  # the engine's, 0.0 where the mask is false
    turns: int


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
        if rows and prompt[: len(rows[-1].input_ids)] == rows[-1].input_ids:
            earlier = rows.pop()
        else:
            earlier = TokenRow([], [], [], 0)
        between = len(prompt) - len(earlier.input_ids)
        rows.append(
            TokenRow(
                input_ids=prompt + list(turn.token_ids),
                loss_mask=earlier.loss_mask + [False] * between + [True] * len(turn.token_ids),
                logprobs=earlier.logprobs + [0.0] * between + list(turn.logprobs),
                turns=earlier.turns + 1,
            )
        )
    return rows
