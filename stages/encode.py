"""Stage `encode`: token ids and loss masks, one row per conversation, from the boundaries of what was generated."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import chain

import pyarrow.parquet as pq

from eyas.console import Progress
from eyas.errors import EyasError
from eyas.files import atomic_directory
from eyas.stage import Stage, stage_main
from eyas.tables import RESPONSES, TOKENS, read_batches, table_writer
from eyas.targets.resolve import open_target
from eyas.templates.rows import Encoding, encode_batches

_BATCH_ROWS = 256
_ROWS_FOR_PROCESSES = 2000  # below that the start of processes takes longer than the work
_COUNTS = (
    "rows",
    "turns",
    "tokens",
    "supervised_tokens",
    "train_rows",
    "validation_rows",
    "cut_rows",
    "left_out_too_long",
    "refused_by_template",
    "tokens_if_one_row_per_turn",
)


def run(stage: Stage) -> None:
    """Read the responses, write the rows to extract and to train on."""
    source = stage.data / "responses" / "responses.parquet"
    batches = read_batches(source, RESPONSES, _BATCH_ROWS)
    first = next(batches, [])  # says so if the file is missing
    total = pq.read_metadata(source).num_rows
    workers = stage.machine.threads or len(os.sched_getaffinity(0))
    counts: Counter[str] = Counter()
    longest = 0
    with atomic_directory(stage.data / "tokens") as folder:
        with (
            Progress("encoding", total, "conversations") as progress,
            (folder / "rejected.jsonl").open("w", encoding="utf-8") as rejected,
            table_writer(folder / "tokens.parquet", TOKENS) as add,
        ):
            for encoded in encode_batches(
                chain([first], batches),
                _encoding(stage),
                workers if total >= _ROWS_FOR_PROCESSES else 1,
                progress.advance,
            ):
                add(encoded.table)
                rejected.writelines(json.dumps(row) + "\n" for row in encoded.rejected)
                counts.update(encoded.counts)
                longest = max(longest, encoded.longest)
        if not counts["rows"]:
            raise EyasError(f"{source}: no conversation has an answer that fits; {dict(counts)}")
    stage.provenance["tokens"] = counts["tokens"]
    stage.write_metrics(
        {name: counts[name] for name in _COUNTS}
        | {"supervised_share": counts["supervised_tokens"] / counts["tokens"], "longest_row": longest}
    )


def _encoding(stage: Stage) -> Encoding:
    target = stage.params.target
    if stage.params.responses.mode != "keep":
        return Encoding(target.max_model_len)
    directory, _ = open_target(target, stage.data / "target.json")
    variables = tuple(sorted(target.chat_template_kwargs.items()))
    return Encoding(target.max_model_len, directory, target.trust_remote_code, variables)


if __name__ == "__main__":
    stage_main("encode", run)
