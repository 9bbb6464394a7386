"""What can be wrong with a row, what is mended, and what is merely left out: every rule has a name and a sentence.

The names are what the metrics count and what ``rejected.jsonl`` says.
"""

from __future__ import annotations

REJECTED = {
    "malformed_json": "the line is not JSON",
    "not_utf8": "the line is not UTF-8",
    "line_too_long": "the line is longer than 16 MiB",
    "duplicate_key": "an object names the same key twice, so that its meaning depends on the reader",
    "not_an_object": "the line is JSON, but not an object",
    "unknown_shape": "none of the known keys (messages, conversations, turns, instruction, question, prompt)",
    "empty_conversation": "no turns",
    "bad_turn": "a turn is not an object with a role and a content",
    "unknown_role": "a role that is neither system, user nor assistant",
    "tool_turn": "tool definitions, calls or results, which Eyas cannot replay yet",
    "null_content": "a turn without content",
    "not_text": "content that is not text (an image, a number)",
    "empty_turn": "a turn of white space only",
    "invalid_text": "text with lone surrogates, which no tokenizer accepts",
    "misplaced_system": "a system message after the first turn",
    "two_user_turns": "two user turns in a row: an answer is missing",
    "two_assistant_turns": "two assistant turns in a row: a question is missing",
    "no_user_turn": "no user turn",
}
REPAIRED = {
    "leading_assistant_dropped": "assistant turns before the first user turn are dropped",
    "nul_removed": "NUL characters are removed",
    "developer_as_system": "the role developer is OpenAI's newer name for system",
    "empty_system_dropped": "an empty system message is dropped",
    "empty_last_answer_dropped": "an empty last answer is dropped; the target answers anyway",
}
LEFT_OUT = {
    "too_long": "a user or system turn longer than dataset.max_prompt_chars",
    "duplicate": "the same conversation was kept already",
    "benchmark_prompt": "a user turn equals a benchmark prompt, or nearly so",
    "over_cap": "beyond the source's cap",
}


class BadRow(Exception):
    """A row that cannot be used; ``reason`` is a key of `REJECTED`, ``detail`` says what and where."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REJECTED, reason
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
