"""Stage `benchmark`: serve held-out prompts and benchmark sets with vLLM, plain, with n-grams, other drafters and the head."""

from __future__ import annotations

from eyas.benchmark.losslessness import difference_rows
from eyas.benchmark.methods import method_names, methods
from eyas.benchmark.payoff import advice
from eyas.benchmark.process import Setting
from eyas.benchmark.prompts import profile_prompts
from eyas.benchmark.results import (
    View,
    acceptance_csv,
    benchmark_metrics,
    output_rows,
    speed_verdicts,
    verdicts,
)
from eyas.benchmark.rounds import serve_all
from eyas.benchmark.summary import print_summary
from eyas.files import atomic_directory, write_text_atomic
from eyas.stage import Stage, stage_main
from eyas.tables import OUTPUTS, write_table
from eyas.targets.resolve import open_target


def run(stage: Stage) -> None:
    """Choose the prompts, serve them with each method, write outputs, metrics and the acceptance series."""
    target, params = stage.params.target, stage.params.benchmark
    engines = methods(params, stage.data / "draft_head")
    directory, _ = open_target(target, stage.data / "target.json")
    setting = Setting(
        directory=directory,
        target=target,
        machine=stage.machine,
        prompts=profile_prompts(stage.data, directory, target, params),
        max_tokens=params.max_tokens,
        concurrency=params.concurrency,
        work=stage.work,
        log=stage.log,
    )
    k = params.num_speculative_tokens[0]
    outcome = serve_all(engines, setting, params.repeats, k)
    view = View(outcome.runs, method_names(params), k, params.concurrency[0])
    metrics = benchmark_metrics(view, outcome.differences, target.dtype, interleaved=outcome.interleaved)
    differing = difference_rows(outcome.differences, target.dtype)
    words, speed_words, told = verdicts(view), speed_verdicts(view), advice(view, metrics)
    rows = output_rows(view)
    with atomic_directory(stage.data / "benchmark") as folder:
        write_table(folder / "outputs.parquet", rows, OUTPUTS)
    write_text_atomic(stage.metrics / "acceptance.csv", acceptance_csv(metrics, view))
    stage.provenance |= {
        "tokens": sum(len(row["token_ids"]) for row in rows),
        "verdicts": words,
        "speed_verdicts": speed_words,
        "advice": told,
        "differences": differing,
    }
    stage.write_metrics(metrics)
    print_summary(metrics, view.methods, words, speed_words, differing, told)


if __name__ == "__main__":
    stage_main("benchmark", run)
