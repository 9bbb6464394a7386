"""Which prompts are served: the profile's own held-out ones and a few of each benchmark set.

Takes the rows of ``conversations.parquet`` and ``prompts.parquet``; gives prompts as token ids. They are picked in
the order of a hash of set and id: asking for more adds prompts and exchanges none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.console import console
from eyas.errors import EyasError
from eyas.files import value_hash
from eyas.params import BenchmarkParams, TargetParams
from eyas.tables import CONVERSATIONS, PROMPTS, read_table
from eyas.templates.chat import ChatTemplate, Message

HELDOUT = "heldout"


@dataclass(frozen=True)
class Prompt:
    """One prompt of one set, ready to be served; a held-out prompt's category is its source."""

    set: str
    prompt_id: str
    token_ids: list[int]
    category: str = ""


def choose(
    set_name: str,
    candidates: Mapping[str, Sequence[Message]],
    wanted: int,
    encode: Callable[[Sequence[Message]], list[int]],
    longest: int,
    categories: Mapping[str, str] | None = None,
) -> list[Prompt]:
    """Pick prompts of one set.

    Args:
        set_name: the set.
        candidates: messages by prompt id; each ends with a user turn.
        wanted: so many at most.
        encode: gives a prompt's token ids.
        longest: prompts of more tokens have no room for the answer and are passed over.
        categories: by prompt id, where prompts have one.
    """
    chosen: list[Prompt] = []
    too_long = 0
    for prompt_id in sorted(candidates, key=lambda i: value_hash([set_name, i])):
        if len(chosen) == wanted:
            break
        token_ids = encode(candidates[prompt_id])
        if len(token_ids) > longest:
            too_long += 1
        else:
            chosen.append(Prompt(set_name, prompt_id, token_ids, (categories or {}).get(prompt_id, "")))
    if too_long or len(chosen) < wanted:
        passed_over = f", {too_long} longer than {longest} tokens passed over" if too_long else ""
        console.print(f"{set_name}: {len(chosen)} of {wanted} prompts{passed_over}")
    return chosen


def first_turn(messages: Sequence[Message]) -> list[Message]:
    """The messages up to and with the first user turn: a system message, where there is one, and that turn."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            return [{"role": m["role"], "content": m["content"]} for m in messages[: index + 1]]
    return []


def _by_set(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[Message]]]:
    sets: dict[str, dict[str, list[Message]]] = {}
    for row in rows:
        sets.setdefault(row["set"], {})[row["prompt_id"]] = [{"role": "user", "content": row["turns"][0]}]
    return sets


def choose_prompts(
    conversations: Iterable[Mapping[str, Any]],
    benchmark_rows: Iterable[Mapping[str, Any]],
    *,
    heldout: int,
    per_set: int,
    encode: Callable[[Sequence[Message]], list[int]],
    longest: int,
) -> list[Prompt]:
    """All prompts: the held-out ones first, then each set in the order of its name.

    Raises:
        EyasError: a set has the name of the held-out prompts, or no held-out prompt is there or fits.
    """
    conversations, benchmark_rows = list(conversations), list(benchmark_rows)
    sets = _by_set(benchmark_rows)
    if HELDOUT in sets:
        raise EyasError(f"a benchmark set is named `{HELDOUT}`, which stands for the profile's own prompts; rename it")
    validation = {
        row["conversation_id"]: messages
        for row in conversations
        if row["split"] == "validation" and (messages := first_turn(json.loads(row["messages"])))
    }
    sources = {row["conversation_id"]: row.get("source", "") for row in conversations}
    prompts = choose(HELDOUT, validation, heldout, encode, longest, sources)
    if not prompts:
        raise EyasError(
            f"none of {len(validation)} validation conversations has a first turn of at most {longest} tokens; "
            "raise dataset.validation_share or target.max_model_len, or lower benchmark.max_tokens"
        )
    for name in sorted(sets):
        categories = {row["prompt_id"]: row.get("category", "") for row in benchmark_rows if row["set"] == name}
        prompts += choose(name, sets[name], per_set, encode, longest, categories)
    return prompts


def profile_prompts(data: Path, directory: Path, target: TargetParams, params: BenchmarkParams) -> list[Prompt]:
    """The prompts of a profile, from what `prepare` left in ``data``; ``directory`` is the target's.

    Raises:
        EyasError: a table is missing, or as `choose_prompts`.
    """
    template = ChatTemplate(
        directory, trust_remote_code=target.trust_remote_code, variables=target.chat_template_kwargs
    )
    conversations = data / "conversations"
    return choose_prompts(
        read_table(conversations / "conversations.parquet", CONVERSATIONS),
        read_table(conversations / "prompts.parquet", PROMPTS),
        heldout=params.heldout_prompts,
        per_set=params.prompts_per_set,
        encode=template.prompt_ids,
        longest=target.max_model_len - params.max_tokens,
    )
