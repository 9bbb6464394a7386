"""From sources to the data set: read, examine, choose, write.

Takes `DatasetParams`; writes conversations.parquet, prompts.parquet and rejected.jsonl (docs/data.md has their columns)
and says what became of every row. The same parameters and inputs give the same bytes, with any number of workers and in
whatever order a source's rows come. Rows pass through a scratch folder; memory does not grow with their number.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from eyas.conversations import bundled
from eyas.conversations.benchmark_sets import read_benchmark_sets
from eyas.conversations.contamination import BenchmarkIndex
from eyas.conversations.examine import Chunk, Findings, Row, examine, examine_apart
from eyas.conversations.near_duplicates import SKETCH_BYTES, Sketcher
from eyas.conversations.selection import select
from eyas.conversations.sources import read_source
from eyas.conversations.spill import Spill
from eyas.conversations.tally import Tally, dataset_metrics
from eyas.conversations.writing import write_conversations
from eyas.errors import EyasError
from eyas.params import DatasetParams
from eyas.process import process_pool
from eyas.tables import PROMPTS, write_table

_CHUNK_ROWS = 500
_CHUNK_BYTES = 8 << 20
_FEW_ROWS = 2000  # fewer are examined here: processes take a second to start
_CHUNKS_AHEAD = 2  # for each worker


def _chunks(params: DatasetParams, prefix: str) -> Iterator[Chunk]:
    """All sources' rows, some at a time."""
    for number, source in enumerate(params.sources):
        rows: list[Row] = []
        read = 0

        def advance(count: int) -> None:
            nonlocal read
            read += count

        for row in read_source(source, bundled.TRAINING, f"{prefix}.sources.{number}", advance):
            rows.append(row)
            if len(rows) >= _CHUNK_ROWS or read >= _CHUNK_BYTES:
                yield Chunk(number, rows, read)
                rows, read = [], 0
        yield Chunk(number, rows, read)


def _examined(
    chunks: Iterator[Chunk], params: DatasetParams, prompts: Path, index: BenchmarkIndex, workers: int
) -> Iterator[Findings]:
    """What was found in each chunk, in order; few chunks are in memory at a time. ``prompts`` holds what ``index`` does."""
    head: list[Chunk] = []
    rows = read = 0
    while rows < _FEW_ROWS and read < _CHUNK_BYTES and (chunk := next(chunks, None)) is not None:
        head.append(chunk)
        rows, read = rows + len(chunk.rows), read + chunk.read
    everything = itertools.chain(head, chunks)
    if workers == 1 or (rows < _FEW_ROWS and read < _CHUNK_BYTES):
        for chunk in everything:
            yield examine(chunk, params, index)
        return
    with process_pool(workers, examine_apart) as pool:
        tasks = (pool.submit(examine_apart, chunk, params, prompts) for chunk in everything)
        try:
            ahead = deque(itertools.islice(tasks, workers * _CHUNKS_AHEAD))
            while ahead:
                yield ahead.popleft().result()
                ahead.extend(itertools.islice(tasks, 1))
        except BrokenProcessPool:
            raise EyasError(
                "a process that examines rows was killed, perhaps because memory ran out; set `threads` in machine.yaml to fewer"
            ) from None


def _read_all(
    params: DatasetParams, prefix: str, folder: Path, index: BenchmarkIndex, spill: Spill, workers: int
) -> list[Tally]:
    """Examine all rows: candidates go into the spill, faulty rows into rejected.jsonl."""
    tallies = [Tally() for _ in params.sources]
    findings = _examined(_chunks(params, prefix), params, folder / "prompts.parquet", index, workers)
    with (folder / "rejected.jsonl").open("w", encoding="ascii") as rejected:
        for number, group in itertools.groupby(findings, key=lambda found: found.source):
            source = params.sources[number].source
            for found in group:
                entries = tallies[number].add(found, source)
                rejected.writelines(json.dumps(entry, sort_keys=True) + "\n" for entry in entries)
                spill.add(found.candidates, found.texts, found.keys, found.sketches)
            tallies[number].check(params.max_rejected_share, f"{prefix}.sources.{number}: {source}")
    return tallies


def _check_splits(metrics: dict[str, Any], prefix: str) -> None:
    for split in ("train", "validation"):
        if not metrics[split]:
            common = ", ".join(f"{name} {count}" for name, count in Counter(metrics["reasons"]).most_common(5))
            raise EyasError(
                f"{prefix}: of {metrics['rows']} rows {metrics['kept']} were kept, none of them for {split} "
                f"({common or 'no rows'}); add data, or change {prefix}.validation_share"
            )


def prepare_dataset(
    params: DatasetParams, folder: Path, scratch: Path, workers: int, prefix: str = "dataset"
) -> dict[str, Any]:
    """Build the data set.

    Args:
        params: the sources and what to keep of them.
        folder: an existing folder for the three files.
        scratch: a folder of this call's own; removed before and after.
        workers: processes that examine rows, if there are many.
        prefix: the parameters' name in errors.

    Returns:
        The metrics.

    Raises:
        EyasError: an unknown package, a missing or misplaced file, too many faulty rows, or an empty split.
    """
    prompts = read_benchmark_sets(params.benchmark_sets, f"{prefix}.benchmark_sets")
    write_table(folder / "prompts.parquet", [vars(prompt) for prompt in prompts], PROMPTS)
    index = BenchmarkIndex(turn for prompt in prompts for turn in prompt.turns)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        bands = Sketcher(params.near_duplicate).bands if params.near_duplicate < 1 else 0
        spill = Spill(scratch, bands, SKETCH_BYTES)
        tallies = _read_all(params, prefix, folder, index, spill, workers)
        selection = select(spill, params)
        names = [source.source for source in params.sources]
        metrics = dataset_metrics(names, tallies, selection, (prompt.set for prompt in prompts))
        _check_splits(metrics, prefix)
        write_conversations(folder / "conversations.parquet", selection, spill, params)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return metrics
