"""What can be wrong with a row, what is mended, and what is merely left out: every rule has a name and a sentence.

The names are what the metrics count and what ``rejected.jsonl`` says.
"""

from __future__ import annotations

REJECTED = {
    "malformed_json": "the row, or a list of turns that it holds as text, is not JSON",
    "not_utf8": "the row is not UTF-8",
    "line_too_long": "the row is longer than 16 MiB",
    "duplicate_key": "an object names the same key twice, so that its meaning depends on the reader",
    "not_an_object": "the row is JSON, but not an object",
    "bad_csv_row": "a CSV row that has more or fewer cells than there are columns",
    "second_list": "a row of a second list in a JSON file: which of the lists is meant?",
    "unreadable_rest": "the file is damaged here, and nothing after this can be read",
    "unknown_shape": "none of the known keys (messages, conversations, turns, instruction, question, prompt)",
    "empty_conversation": "no turns",
    "bad_turn": "a turn is not an object with one role and one content",
    "unknown_role": "a role that is neither system, user, assistant nor tool",
    "null_content": "a turn without content",
    "not_text": "content that is not text (an image, a number)",
    "empty_turn": "a turn of white space only",
    "turn_too_long": "a turn longer than 4 MiB",
    "invalid_text": "text with lone surrogates, which no tokenizer accepts",
    "misplaced_system": "a system message after the first turn",
    "two_user_turns": "two user turns in a row: an answer is missing",
    "two_assistant_turns": "two assistant turns in a row: a question is missing",
    "missing_answer": "a user turn right after a tool's result: an answer is missing",
    "no_user_turn": "no user turn",
    "unclosed_think": "an answer that opens with <think> and never closes it",
    "unopened_think": "an answer whose first </think> ends a line and has no <think> before it",
    "two_reasonings": "an answer whose reasoning is given twice, and differently",
    "misplaced_reasoning": "reasoning on a turn that is not the assistant's",
    "bad_tools": "tool definitions that are not a list of functions with names",
    "bad_tool_call": "a tool call without a function's name, or on a turn that is not the assistant's",
    "bad_tool_arguments": "arguments of a tool call that are not a JSON object",
    "orphan_tool_result": "a tool's result without a call before it",
    "mismatched_tool_result": "a tool's result that names another call than those before it",
    "unanswered_tool_call": "a tool call that is not the last turn and has no result",
}
REPAIRED = {
    "leading_assistant_dropped": "assistant turns before the first user turn are dropped",
    "nul_removed": "NUL characters are removed",
    "nan_as_missing": "NaN, which pandas writes where a value is missing, is read as missing",
    "developer_as_system": "the role developer is OpenAI's newer name for system",
    "empty_system_dropped": "an empty system message is dropped",
    "empty_last_answer_dropped": "an empty last answer is dropped; the target answers anyway",
    "inline_think_split": "<think>…</think> at the start of an answer becomes its reasoning",
    "function_call_as_tool_call": "OpenAI's older function_call, and turns that are one, become a tool call",
    "bare_tools_wrapped": "tool definitions that lack the level `function` get it",
}
LEFT_OUT = {
    "too_long": "a user or system turn longer than dataset.max_prompt_chars",
    "duplicate": "the same conversation was kept already",
    "near_duplicate": "its user turns are nearly those of a conversation that was kept",
    "benchmark_prompt": "a user turn equals a benchmark prompt, or nearly so",
    "over_cap": "beyond the source's cap",
    "sampled_out": "beyond the cap on the whole data set",
}


class BadRow(Exception):
    """A row that cannot be used; ``reason`` is a key of `REJECTED`, ``detail`` says what and where."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REJECTED, reason
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"
