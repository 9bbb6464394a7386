"""Stage prepare: say what the target is; read, check and split the conversations.

Writes ``data/<p>/target.json``, ``data/<p>/conversations/`` and ``metrics/<p>/prepare.json``.
"""

from __future__ import annotations

import os

from eyas.console import console
from eyas.conversations.dataset import prepare_dataset
from eyas.files import atomic_directory, write_json_atomic
from eyas.stage import Stage, stage_main
from eyas.targets.resolve import describe_target, resolve_target


def run(stage: Stage) -> None:
    """Run the stage."""
    target = describe_target(stage.params.target, resolve_target(stage.params.target))
    workers = stage.machine.threads or len(os.sched_getaffinity(0))
    with atomic_directory(stage.data / "conversations") as folder:
        metrics = prepare_dataset(stage.params.dataset, folder, stage.work / "scratch", workers)
    write_json_atomic(stage.data / "target.json", target)
    stage.write_metrics(metrics)
    console.print(
        f"prepare: {metrics['kept']} of {metrics['rows']} conversations kept ({metrics['train']} train, "
        f"{metrics['validation']} validation, {metrics['multi_turn']} multi-turn), {metrics['rejected']} rejected, "
        f"{sum(metrics['benchmark_prompts'].values())} benchmark prompts"
    )


if __name__ == "__main__":
    stage_main("prepare", run)
