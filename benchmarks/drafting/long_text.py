"""Text for a longer training: prompts, and what the target writes to them on a GPU.

Takes the outputs of the profile `smoke` and the bundled target; gives files of rows (`save_rows`): first of smoke's rows and of
prompts, then with answers sampled from the target.

Prompts are the bundled catalogue's, and ones that the target samples where the template opens a user's turn (Magpie,
https://arxiv.org/abs/2406.08464). What resembles a prompt of smoke's validation split or of its benchmark sets is left out of both.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.store.common import note
from eyas.conversations import bundled
from eyas.conversations.contamination import BenchmarkIndex
from eyas.conversations.faults import BadRow
from eyas.conversations.loops import is_looped
from eyas.conversations.rules import validate
from eyas.conversations.screen import is_crude, is_english
from eyas.conversations.shingles import words
from eyas.drafting.ranks import training_device
from eyas.errors import EyasError
from eyas.files import value_hash
from eyas.params import SourceParams, TargetParams
from eyas.targets.gguf import convert_gguf
from eyas.targets.resolve import describe_target, resolve_target
from eyas.templates.chat import ChatTemplate

SOURCE, TEMPERATURE = "bundled:smollm2-135m", 0.7
SMOKE, VALIDATION, LONG, EXTRA = range(4)  # groups of rows
_CATALOGUE = ("package:chitchat", "package:evals", "package:arena-hard")
_MOST_CHARS, _FEWEST_WORDS = 400, 4
_EXTRA_PROMPTS = 256
_MOST_TURN_TOKENS = 80


class Row(NamedTuple):
    """One row of tokens; a prompt without its answer has no mask."""

    group: int
    conversation: int
    ids: list[int]
    mask: list[bool]


def save_rows(path: Path, rows: Sequence[Row], more: dict[str, Any]) -> None:
    """Rows and a JSON-able value in one compressed file.

    Arrays: ``ids`` uint16 [all rows' tokens], ``mask`` bool [tokens of the rows that have one], ``table`` int32 [rows, 4] of group,
    conversation, ids, labels.

    Raises:
        EyasError: a token id is too large.
    """
    flat = list(itertools.chain.from_iterable(row.ids for row in rows))
    if flat and max(flat) > 0xFFFF:
        raise EyasError("the file of rows holds token ids below 65,536 only")
    temporary = path.with_suffix(".part.npz")
    np.savez_compressed(
        temporary,
        ids=np.array(flat, dtype=np.uint16),
        mask=np.fromiter(itertools.chain.from_iterable(row.mask for row in rows), bool),
        table=np.array([(row.group, row.conversation, len(row.ids), len(row.mask)) for row in rows], dtype=np.int32),
        more=np.array(json.dumps(more)),
    )
    os.replace(temporary, path)


def load_rows(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """What `save_rows` wrote."""
    with np.load(path) as file:
        ids, mask, more = file["ids"].tolist(), file["mask"].tolist(), json.loads(str(file["more"]))
        rows, start, masked = [], 0, 0
        for group, conversation, length, labels in file["table"].tolist():
            rows.append(Row(group, conversation, ids[start : start + length], mask[masked : masked + labels]))
            start, masked = start + length, masked + labels
    return rows, more


def write_prompts(data: Path, inputs: Path) -> None:
    """Smoke's rows as they are; prompts as ids; what generation needs to know of the template.

    Args:
        data: the outputs of the profile `smoke`.
        inputs: the file of rows to write; beside them ``kept_out`` (texts), ``opening``, ``rest``, ``ends``, ``special`` (token ids)
            and ``weights_hash`` of the target.
    """
    # what needs pyarrow is imported where it is used: the GPU's machine may lack it
    from eyas.tables import CONVERSATIONS, PROMPTS, read_table

    directory = resolve_target(TargetParams(source=SOURCE, max_model_len=1024))
    template = ChatTemplate(directory, trust_remote_code=False)
    own: dict[str, list[str]] = {"train": [], "validation": []}
    for conversation in read_table(data / "conversations" / "conversations.parquet", CONVERSATIONS):
        own[conversation["split"]] += [
            m["content"] for m in json.loads(conversation["messages"]) if m["role"] == "user"
        ]
    kept_out = own["validation"] + [
        turn for prompt in read_table(data / "conversations" / "prompts.parquet", PROMPTS) for turn in prompt["turns"]
    ]
    rows = _smoke_rows(data)
    texts = _catalogue_turns()
    seen = BenchmarkIndex(kept_out)
    clean = [text for text in sorted(texts, key=value_hash) if not seen.contains(text)]
    known = BenchmarkIndex(own["train"])
    extra = [text for text in clean if not known.contains(text)][:_EXTRA_PROMPTS]
    seen = BenchmarkIndex(extra)
    train = [text for text in clean if not seen.contains(text)]
    smoke_rows = len(rows)
    for group, chosen in ((EXTRA, extra), (LONG, train)):
        for text in chosen:
            rows.append(Row(group, len(rows), template.prompt_ids([{"role": "user", "content": text}]), []))
    word = "WORD"
    opening, rest = template.render([{"role": "user", "content": word}], generation_prompt=True).split(word)
    more = {
        "kept_out": kept_out + extra,
        "opening": template.encode(opening),
        "rest": template.encode(rest),
        "ends": template.end_ids,
        "special": template.special_ids,
        "weights_hash": describe_target(TargetParams(source=SOURCE, max_model_len=1024), directory)["weights_hash"],
    }
    save_rows(inputs, rows, more)
    note(
        f"{len(texts)} prompts in the catalogue, {len(train)} to train on, {len(extra)} held out besides smoke's; "
        f"{smoke_rows} rows of smoke; {inputs.stat().st_size >> 10} KiB"
    )


def _smoke_rows(data: Path) -> list[Row]:
    from eyas.tables import PROBE, TOKENS, read_table

    table = [row for row in read_table(data / "tokens" / "tokens.parquet", TOKENS) if row["kind"] != PROBE]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(row["conversation_id"] for row in table))}
    return [
        Row(
            SMOKE if row["split"] == "train" else VALIDATION,
            numbers[row["conversation_id"]],
            row["input_ids"],
            row["loss_mask"],
        )
        for row in table
    ]


def _catalogue_turns() -> list[str]:
    """The catalogue's user turns of a fitting length, each once."""
    from eyas.conversations.sources import read_source

    texts: dict[str, None] = {}
    for source in _CATALOGUE:
        for found in read_source(SourceParams(source=source), bundled.TRAINING, source):
            if isinstance(found.content, BadRow):
                raise found.content
            turns = validate(found.content)[0].user_turns
            # later turns of small talk are openings too where they are long enough
            texts |= dict.fromkeys(turn for turn in turns if _fits(turn))
    return list(texts)


def _fits(text: str) -> bool:
    return len(text) <= _MOST_CHARS and len(words(text)) >= _FEWEST_WORDS


def convert_target(gguf: Path, inputs: Path, target: Path) -> None:
    """Convert the target's file, and see that it became what smoke had.

    Args:
        gguf: the bundled target's file.
        inputs: what `write_prompts` wrote.
        target: the folder to make.

    Raises:
        EyasError: the weights are others.
    """
    target.mkdir(parents=True)
    convert_gguf(gguf, target)
    wanted = load_rows(inputs)[1]["weights_hash"]
    found = describe_target(TargetParams(source=str(target), max_model_len=1024), target)
    if found["weights_hash"] != wanted:
        raise EyasError(f"{target}: the weights are others than smoke's; is the file whole?")
    note(f"target in {target}")


def answers(
    model: Any, asked: Sequence[list[int]], more: dict[str, Any], temperature: float, most: int
) -> list[list[int]]:
    """Sampled continuations, each with the token that ended it, if one did.

    Args:
        model: transformers' target; draws from torch's global generator.
        asked: ids of each prompt.
        more: what `write_prompts` wrote beside the rows.
        temperature: of the samples.
        most: tokens of a continuation.
    """
    device, width, end = model.device, max(map(len, asked)), more["ends"][0]
    ids_BT = torch.tensor([[end] * (width - len(p)) + p for p in asked], device=device)
    mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in asked], device=device)
    with torch.inference_mode():
        out_BT = model.generate(
            ids_BT, attention_mask=mask_BT, max_new_tokens=most, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            eos_token_id=more["ends"], pad_token_id=end,
        )  # fmt: skip
    found = out_BT[:, width:].tolist()
    ends = set(more["ends"])
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in found]


def invented(
    model: Any, tokenizer: Any, more: dict[str, Any], count: int, index: BenchmarkIndex
) -> Iterator[list[int]]:
    """Prompts with users' turns that the target makes up; those that do not end, are no English or are kept out are dropped.

    Args:
        model: as of `answers`.
        tokenizer: the target's.
        more: what `write_prompts` wrote beside the rows.
        count: turns to sample.
        index: the texts that are kept out.
    """
    for ids in answers(model, [more["opening"]] * count, more, 1.0, _MOST_TURN_TOKENS):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        fits = ids[-1] in more["ends"] and _fits(text)
        if fits and is_english(text) and not is_crude(text) and not index.contains(text):
            yield more["opening"] + ids[:-1] + more["rest"]


def generate(
    target: Path,
    inputs: Path,
    rows: Path,
    *,
    tokens: int,
    seconds: float,
    batch: int,
    samples: int,
    max_tokens: int,
    seed: int,
) -> None:
    """Smoke's rows, then answers to the catalogue's prompts, then to prompts of the target's own, until there are enough.

    Args:
        target: the target's folder.
        inputs: what `write_prompts` wrote.
        rows: the file of rows to write; beside them counts, and the seconds taken.
        tokens: of answers, to generate.
        seconds: no batch begins later.
        batch: rows at a time.
        samples: answers to each prompt of the catalogue.
        max_tokens: longest answer.
        seed: of samples and order.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    began, device = time.monotonic(), training_device()

    def late() -> bool:
        return time.monotonic() - began > seconds

    given, more = load_rows(inputs)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
    tokenizer, index = AutoTokenizer.from_pretrained(target), BenchmarkIndex(more["kept_out"])
    torch.manual_seed(seed)
    written = [row for row in given if row.mask]
    waiting = _catalogue_batches(given, batch, samples, seed)
    own: list[Row] = []
    total = looped = 0
    invented_ids: set[tuple[int, ...]] = set()
    while total < tokens and not late():
        started, before = time.monotonic(), total
        if waiting:
            asked = waiting.pop()
        else:
            while len(own) < batch and not late():
                found = map(tuple, invented(model, tokenizer, more, 2 * batch, index))
                fresh = [ids for ids in dict.fromkeys(found) if ids not in invented_ids]
                number = len(given) + len(invented_ids)
                invented_ids.update(fresh)
                own += [Row(LONG, number + i, list(ids), []) for i, ids in enumerate(fresh)]
                note(f"{len(fresh)} of {2 * batch} turns that the target made up are kept")
            own.sort(key=lambda row: len(row.ids))
            asked, own = own[:batch], own[batch:]
        if not asked:
            break
        made = answers(model, [row.ids for row in asked], more, TEMPERATURE, max_tokens)
        for row, answer in zip(asked, made, strict=True):
            if is_looped(answer):
                looped += 1
                continue
            mask = [False] * len(row.ids) + [True] * len(answer)
            written.append(Row(row.group, row.conversation, row.ids + answer, mask))
            total += len(answer)
        taken = time.monotonic() - started
        note(
            f"{total:,} of {tokens:,} tokens generated, {looped} looped answers dropped, {(total - before) / taken:,.0f} tokens/s"
        )
    figures = {
        "generated_tokens": total,
        "seconds": time.monotonic() - began,
        "looped": looped,
        "invented_prompts": len(invented_ids),
    }
    save_rows(rows, written, figures)
    note(f"{len(written)} rows, {sum(len(row.ids) for row in written):,} tokens, {json.dumps(figures)}")


def _catalogue_batches(given: Sequence[Row], batch: int, samples: int, seed: int) -> list[list[Row]]:
    """The catalogue's prompts in batches of about one length; the last one is the held-out prompts."""
    repeated = [row for row in given if row.group == LONG] * samples
    repeated.sort(key=lambda row: len(row.ids))
    waiting = [repeated[i : i + batch] for i in range(0, len(repeated), batch)]
    random.Random(seed).shuffle(waiting)
    # batches are taken from the end: a run that is cut short has its held-out rows
    waiting.append([row for row in given if row.group == EXTRA])
    return waiting
