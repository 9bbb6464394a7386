"""Stage `train`: the draft head, trained on the stored states; the best epoch by held-out acceptance becomes the checkpoint."""

from __future__ import annotations

import shutil
from functools import partial

from eyas.drafting.heads import export
from eyas.drafting.inputs import load_inputs
from eyas.drafting.launching import train
from eyas.drafting.records import epochs_csv, steps_csv, train_metrics
from eyas.files import atomic_directory, write_text_atomic
from eyas.stage import Stage, stage_main


def run(stage: Stage) -> None:
    """Read token rows, store and vocabulary; write the checkpoint, metrics and series."""
    make = partial(
        load_inputs,
        stage.data,
        stage.machine,
        stage.params.target,
        stage.params.draft,
        stage.params.train,
        stage.params.responses.temperature,
    )
    inputs, training = train(make, stage.params.train, stage.work, stage.machine)
    with inputs.data.reader, atomic_directory(stage.data / "draft_head") as folder:
        export(inputs.model, folder)
    rows = inputs.data.train
    if inputs.initial is not None:
        stage.provenance["initial_head"] = inputs.initial.record()
    stage.provenance["tokens"] = sum(row.slots for row in rows)
    write_text_atomic(stage.metrics / "train_steps.csv", steps_csv(training))
    write_text_atomic(stage.metrics / "train_epochs.csv", epochs_csv(training.epochs))
    stage.write_metrics(train_metrics(training) | {"supervised_tokens": sum(row.supervised for row in rows)})
    shutil.rmtree(stage.work)  # everything is written; until here a kill costs no step


if __name__ == "__main__":
    stage_main("train", run)
