"""From sources to the data set: read, validate, decontaminate, deduplicate, cap, split, write.

Takes `DatasetParams`; gives a `Dataset`, which writes conversations.parquet, prompts.parquet and rejected.jsonl
(docs/data.md has their columns) and says what became of every row. The same parameters and inputs give the same bytes.
"""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.console import Progress
from eyas.conversations import bundled
from eyas.conversations.contamination import BenchmarkIndex
from eyas.conversations.faults import BadRow
from eyas.conversations.identity import conversation_id, split_of
from eyas.conversations.reading import read_lines
from eyas.conversations.rules import Conversation, validate
from eyas.errors import EyasError
from eyas.files import value_hash
from eyas.params import DatasetParams, SourceParams

INPUT_FOLDER = Path("data/input")
HELDOUT = "heldout"  # the benchmark's name for the profile's own validation prompts


@dataclass(frozen=True)
class Kept:
    """A conversation in the data set."""

    conversation_id: str
    split: str
    source: str
    conversation: Conversation


@dataclass(frozen=True)
class Prompt:
    """One prompt of a benchmark set: its user turns."""

    set: str
    prompt_id: str
    category: str
    turns: tuple[str, ...]


@dataclass
class Dataset:
    """The data set, and what became of every row."""

    kept: list[Kept] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0
    repaired: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def write(self, folder: Path) -> None:
        """Write the three files into an existing folder."""
        conversations = [
            {
                "conversation_id": k.conversation_id,
                "split": k.split,
                "source": k.source,
                "messages": json.dumps([{"role": m.role, "content": m.content} for m in k.conversation.messages]),
            }
            for k in sorted(self.kept, key=lambda k: k.conversation_id)
        ]
        text = pa.string()
        names = ("conversation_id", "split", "source", "messages")
        pq.write_table(
            pa.Table.from_pylist(conversations, pa.schema([(name, text) for name in names])),
            folder / "conversations.parquet",
            compression="zstd",
        )
        prompts = [
            {"set": p.set, "prompt_id": p.prompt_id, "category": p.category, "turns": list(p.turns)}
            for p in self.prompts
        ]
        schema = pa.schema([("set", text), ("prompt_id", text), ("category", text), ("turns", pa.list_(text))])
        pq.write_table(pa.Table.from_pylist(prompts, schema), folder / "prompts.parquet", compression="zstd")
        with (folder / "rejected.jsonl").open("w", encoding="ascii") as stream:
            stream.writelines(json.dumps(row, sort_keys=True) + "\n" for row in self.rejected)

    def metrics(self) -> dict[str, Any]:
        """Counts; rows = kept + rejected + left_out."""
        splits = Counter(k.split for k in self.kept)
        turns = [len(k.conversation.user_turns) for k in self.kept]
        return {
            "rows": self.rows,
            "kept": len(self.kept),
            "rejected": len(self.rejected),
            "repaired": self.repaired,
            "left_out": self.rows - len(self.kept) - len(self.rejected),
            "train": splits["train"],
            "validation": splits["validation"],
            "multi_turn": sum(count > 1 for count in turns),
            "user_turns": sum(turns),
            "reasons": dict(self.reasons),
            "sources": dict(Counter(k.source for k in self.kept)),
            "benchmark_prompts": dict(Counter(p.set for p in self.prompts)),
        }


def _file(source: str, parameter: str) -> Path:
    """A source's path, which must be in the folder that DVC watches.

    The check is by name, so that a link in the folder may point anywhere.
    """
    path = Path(os.path.normpath(source))
    inside = Path(os.path.relpath(path)) if path.is_absolute() else path
    if not inside.is_relative_to(INPUT_FOLDER):
        raise EyasError(
            f"{parameter}: {source} is not under {INPUT_FOLDER}/, the folder whose changes DVC notices; copy or link it there, "
            f"and name it `{INPUT_FOLDER / path.name}`"
        )
    if not path.is_file():
        raise EyasError(f"{parameter}: {source}: no such file")
    if path.suffix != ".jsonl":
        raise EyasError(f"{parameter}: {source}: expected a .jsonl file (one JSON object a line)")
    return path


def _rows(
    params: SourceParams, catalogue: dict[str, Callable[[], Iterator[bundled.Row]]], parameter: str
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Number and object, or fault, of each row of a source."""
    if params.source.startswith(bundled.PREFIX):
        name = params.source.removeprefix(bundled.PREFIX)
        if name not in catalogue:
            near = difflib.get_close_matches(name, catalogue, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"there is {', '.join(sorted(catalogue))}"
            raise EyasError(f"{parameter}: no bundled package `{name}` here; {hint}")
        yield from enumerate(catalogue[name](), 1)
        return
    path = _file(params.source, parameter)
    with (
        path.open("rb") as stream,
        Progress(f"reading {path.name}", path.stat().st_size, "bytes") as progress,
    ):
        yield from read_lines(stream, progress.advance)


def read_benchmark_set(params: SourceParams, parameter: str) -> list[Prompt]:
    """A benchmark set, in hash order, so that its first n prompts are a fair sample.

    Raises:
        EyasError: a faulty row (a set with holes is not comparable), two prompts of one id, no prompt, no file.
    """
    name = params.source.removeprefix(bundled.PREFIX)
    if name == params.source:
        name = Path(name).stem
    if name == HELDOUT:
        raise EyasError(
            f"{parameter}: {params.source}: the name {HELDOUT} is taken by the profile's validation prompts"
        )
    prompts: dict[str, Prompt] = {}
    for number, row in _rows(params, bundled.BENCHMARKS, parameter):
        try:
            if isinstance(row, BadRow):
                raise row
            turns = tuple(validate(row)[0].user_turns)
        except BadRow as fault:
            raise EyasError(f"{parameter}: {params.source}, row {number}: {fault}; mend or remove it") from None
        identity = next((str(row[key]) for key in ("id", "prompt_id", "question_id") if key in row), str(number))
        if identity in prompts:
            raise EyasError(f"{parameter}: {params.source}, row {number}: a second prompt with the id {identity!r}")
        prompts[identity] = Prompt(name, identity, str(row.get("category") or ""), turns)
    if not prompts:
        raise EyasError(f"{parameter}: {params.source}: no prompts")
    return sorted(prompts.values(), key=lambda p: value_hash([p.set, p.prompt_id]))[: params.cap]


def _check_faults(params: DatasetParams, source: str, rows: int, faults: list[dict[str, Any]], parameter: str) -> None:
    if len(faults) <= params.max_rejected_share * rows:
        return
    common = ", ".join(f"{name} {count}" for name, count in Counter(f["reason"] for f in faults).most_common(3))
    raise EyasError(
        f"{parameter}: {source}: {len(faults)} of {rows} rows are faulty ({common}), more than "
        f"dataset.max_rejected_share = {params.max_rejected_share}; the first is row {faults[0]['row']}: "
        f"{faults[0]['reason']}, {faults[0]['detail']}"
    )


def _add_source(
    dataset: Dataset, params: DatasetParams, source: SourceParams, parameter: str, index: BenchmarkIndex
) -> None:
    """Read one source into the data set; its cap takes the first by hash, not the first of the file."""
    rows = 0
    faults: list[dict[str, Any]] = []
    seen = {k.conversation_id for k in dataset.kept}
    candidates: dict[str, Conversation] = {}
    for number, row in _rows(source, bundled.TRAINING, parameter):
        rows += 1
        try:
            if isinstance(row, BadRow):
                raise row
            conversation, repairs = validate(row)
        except BadRow as fault:
            faults.append({"source": source.source, "row": number, "reason": fault.reason, "detail": fault.detail})
            continue
        dataset.repaired += bool(repairs)
        dataset.reasons.update(repairs)
        conversation = conversation.cut(params.max_turns)
        identity = conversation_id(conversation)
        asked = [m.content for m in conversation.messages if m.role != "assistant"]
        if any(len(text) > params.max_prompt_chars for text in asked):
            dataset.reasons["too_long"] += 1
        elif identity in seen or identity in candidates:
            dataset.reasons["duplicate"] += 1
        elif any(index.contains(text) for text in conversation.user_turns):
            dataset.reasons["benchmark_prompt"] += 1
        else:
            candidates[identity] = conversation
    _check_faults(params, source.source, rows, faults, parameter)
    dataset.rows += rows
    dataset.rejected += faults
    dataset.reasons.update(fault["reason"] for fault in faults)
    chosen = sorted(candidates)[: source.cap]
    dataset.reasons.update(["over_cap"] * (len(candidates) - len(chosen)))
    for identity in chosen:
        split = split_of(candidates[identity], params.validation_share)
        dataset.kept.append(Kept(identity, split, source.source, candidates[identity]))


def prepare_dataset(params: DatasetParams, prefix: str = "dataset") -> Dataset:
    """Build the data set.

    Raises:
        EyasError: an unknown package, a missing or misplaced file, too many faulty rows, or an empty split.
    """
    dataset = Dataset()
    for number, benchmark_set in enumerate(params.benchmark_sets):
        prompts = read_benchmark_set(benchmark_set, f"{prefix}.benchmark_sets.{number}")
        if any(p.set == prompts[0].set for p in dataset.prompts):
            raise EyasError(f"{prefix}.benchmark_sets.{number}: a second set named {prompts[0].set!r}")
        dataset.prompts += prompts
    index = BenchmarkIndex(turn for prompt in dataset.prompts for turn in prompt.turns)
    for number, source in enumerate(params.sources):
        _add_source(dataset, params, source, f"{prefix}.sources.{number}", index)
    for split in ("train", "validation"):
        if not any(k.split == split for k in dataset.kept):
            raise EyasError(
                f"{prefix}: of {dataset.rows} rows {len(dataset.kept)} were kept, none of them for {split} "
                f"({', '.join(f'{name} {count}' for name, count in dataset.reasons.most_common(5)) or 'no rows'}); "
                f"add data, or change {prefix}.validation_share"
            )
    return dataset
