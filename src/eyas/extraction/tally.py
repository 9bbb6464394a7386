"""What became of the conversations that the target was to answer, as figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

from eyas.extraction.dialogues import Dialogue
from eyas.tables import KEPT, PROBE


class Tally:
    """Counts over dialogues that are over, one at a time."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first_refusal: str | None = None

    @property
    def rows(self) -> int:
        """Dialogues with anything to train on, the greedy probes aside."""
        return self._counts["rows"]

    @property
    def tokens(self) -> int:
        """Tokens that the target wrote."""
        return self._counts["tokens"]

    def add(self, state: Dialogue) -> None:
        """Count one dialogue that is over."""
        probe, kept = state.kind == PROBE, state.kind == KEPT
        if self._first_refusal is None:
            self._first_refusal = state.refused
        self._counts.update(
            conversations=not probe,
            greedy_probes=probe,
            rows=not probe and bool(state.messages if kept else state.turns),
            kept_conversations=kept and bool(state.messages),
            without_answer=kept and not state.messages,
            turns=len(state.turns),
            tokens=sum(len(turn.token_ids) for turn in state.turns),
            finished=sum(turn.finish_reason == "stop" for turn in state.turns),
            answers=len(state.turns) + (state.dropped > 0),
            looped_turns=state.looped,
            dropped_turns=state.dropped,
            out_of_context=state.cut,
            without_room=not probe and state.cut and not state.turns,
            refused_by_template=state.refused is not None,
        )

    def metrics(self) -> dict[str, Any]:
        """Counts, and shares of all answers that were given (0 where none was).

        ``dropped_turns`` counts each answer that loops and ended its conversation, and the answers that would have come after it.
        """
        counts = self._counts
        names = (
            "conversations",
            "kept_conversations",
            "without_answer",
            "greedy_probes",
            "turns",
            "tokens",
            "looped_turns",
            "dropped_turns",
            "out_of_context",
            "refused_by_template",
        )
        return {name: counts[name] for name in names} | {
            "tokens_per_turn": counts["tokens"] / max(1, counts["turns"]),
            "finished_share": counts["finished"] / max(1, counts["turns"]),
            "looped_share": counts["looped_turns"] / max(1, counts["answers"]),
        }

    def why_none(self) -> str:
        """What became of the conversations, where none got an answer."""
        counts = self._counts
        if self._first_refusal is not None:
            return f"the template refused {counts['refused_by_template']}, the first with: {self._first_refusal}"
        return (
            f"{counts['without_room']} have no room for an answer in target.max_model_len, {counts['looped_turns']} "
            f"answers loop (responses.drop_looped), {counts['without_answer']} hold no answer to keep"
        )
