"""Stage `benchmark`: serve held-out prompts and benchmark sets with vLLM, plain, with n-grams and with the head."""

from __future__ import annotations

from eyas.benchmark.measures import acceptance_csv, benchmark_metrics, differences, output_rows, verdicts
from eyas.benchmark.methods import serve_methods
from eyas.benchmark.prompts import choose_prompts
from eyas.benchmark.summary import print_summary
from eyas.files import atomic_directory, write_text_atomic
from eyas.stage import Stage, stage_main
from eyas.tables import CONVERSATIONS, OUTPUTS, PROMPTS, read_table, write_table
from eyas.targets.resolve import open_target
from eyas.templates.chat import ChatTemplate


def run(stage: Stage) -> None:
    """Choose the prompts, serve them with each method, write outputs, metrics and the acceptance series."""
    target, params = stage.params.target, stage.params.benchmark
    directory, _ = open_target(target, stage.data / "target.json")
    template = ChatTemplate(
        directory, trust_remote_code=target.trust_remote_code, variables=target.chat_template_kwargs
    )
    conversations = stage.data / "conversations"
    prompts = choose_prompts(
        read_table(conversations / "conversations.parquet", CONVERSATIONS),
        read_table(conversations / "prompts.parquet", PROMPTS),
        heldout=params.heldout_prompts,
        per_set=params.prompts_per_set,
        encode=template.prompt_ids,
        longest=target.max_model_len - params.max_tokens,
    )
    runs = serve_methods(
        directory,
        stage.data / "draft_head",
        prompts,
        target=target,
        params=params,
        machine=stage.machine,
        work=stage.work,
        log=stage.log,
    )
    positions = params.num_speculative_tokens
    metrics, differing, words = benchmark_metrics(runs, positions), differences(runs), verdicts(runs)
    with atomic_directory(stage.data / "benchmark") as folder:
        write_table(folder / "outputs.parquet", output_rows(runs), OUTPUTS)
    write_text_atomic(stage.metrics / "acceptance.csv", acceptance_csv(metrics, positions))
    stage.provenance |= {
        "tokens": sum(len(row["token_ids"]) for row in output_rows(runs)),
        "verdicts": words,
        "differences": differing,
    }
    stage.write_metrics(metrics)
    print_summary(metrics, words, differing)


if __name__ == "__main__":
    stage_main("benchmark", run)
