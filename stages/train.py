"""Stage `train`: the draft head, trained on the stored states; the best epoch by held-out acceptance becomes the checkpoint."""

from __future__ import annotations

import shutil
from functools import partial

from eyas.drafting.data import token_rows
from eyas.drafting.heads import export, make_head
from eyas.drafting.records import epochs_csv, steps_csv, train_metrics
from eyas.drafting.training import TrainingData, fit
from eyas.files import atomic_directory, write_text_atomic
from eyas.stage import Stage, stage_main
from eyas.store.format import row_key
from eyas.store.reader import StoreReader
from eyas.tables import TOKENS, read_table
from eyas.targets.head import load_head
from eyas.targets.resolve import open_target
from eyas.vocabulary import load_vocabulary


def run(stage: Stage) -> None:
    """Read token rows, store and vocabulary; write the checkpoint, metrics and series."""
    directory, target = open_target(stage.params.target, stage.data / "target.json")
    table = read_table(stage.data / "tokens" / "tokens.parquet", TOKENS)
    with StoreReader(stage.data / "hidden_states") as reader:
        train_rows, heldout_rows = (
            token_rows(table, split, partial(row_key, reader.spec.fingerprint)) for split in ("train", "validation")
        )
        model = make_head(
            stage.params.draft,
            directory,
            target["source"],
            load_vocabulary(stage.data / "vocab" / "vocab.safetensors"),
            reader.spec.layers,
            ttt_steps=stage.params.train.ttt_steps,
            seed=stage.params.train.seed,
        )
        head = load_head(directory)
        data = TrainingData(reader, train_rows, heldout_rows, stage.machine.shard_processes)
        training = fit(model, data, stage.params.train, head, stage.params.responses.temperature, stage.work)
    with atomic_directory(stage.data / "draft_head") as folder:
        export(model, folder)
    stage.provenance["tokens"] = sum(row.slots for row in train_rows)
    write_text_atomic(stage.metrics / "train_steps.csv", steps_csv(training))
    write_text_atomic(stage.metrics / "train_epochs.csv", epochs_csv(training.epochs))
    stage.write_metrics(train_metrics(training) | {"supervised_tokens": sum(row.supervised for row in train_rows)})
    shutil.rmtree(stage.work)  # everything is written; until here a kill costs no step


if __name__ == "__main__":
    stage_main("train", run)
