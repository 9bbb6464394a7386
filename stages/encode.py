"""Stage `encode`: token ids and loss masks, one row per conversation, from the boundaries of what was generated."""

from __future__ import annotations

from eyas.errors import EyasError
from eyas.files import atomic_directory
from eyas.stage import Stage, stage_main
from eyas.tables import RESPONSES, TOKENS, read_table, write_table
from eyas.templates.encoding import GeneratedTurn, encode_turns


def run(stage: Stage) -> None:
    """Read the responses, write the rows to extract and to train on."""
    rows = []
    turns = 0
    for response in read_table(stage.data / "responses" / "responses.parquet", RESPONSES):
        generated = [GeneratedTurn(t["prompt_ids"], t["token_ids"], t["logprobs"]) for t in response["turns"]]
        turns += len(generated)
        for row in encode_turns(generated):
            shared = {name: response[name] for name in ("conversation_id", "split", "kind")}
            rows.append(shared | vars(row))
    if not rows:
        raise EyasError(f"{stage.data / 'responses'}: no conversation has an answer")
    with atomic_directory(stage.data / "tokens") as folder:
        write_table(folder / "tokens.parquet", rows, TOKENS)
    tokens = sum(len(row["input_ids"]) for row in rows)
    supervised = sum(sum(row["loss_mask"]) for row in rows)
    longest = max(len(row["input_ids"]) for row in rows)
    stage.provenance["tokens"] = tokens
    stage.write_metrics(
        {
            "rows": len(rows),
            "turns": turns,
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / tokens,
            "longest_row": longest,
            "train_rows": sum(row["split"] == "train" and row["kind"] != "greedy_probe" for row in rows),
            "validation_rows": sum(row["split"] == "validation" and row["kind"] != "greedy_probe" for row in rows),
        }
    )


if __name__ == "__main__":
    stage_main("encode", run)
