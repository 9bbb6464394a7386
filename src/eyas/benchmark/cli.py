"""The command `eyas benchmark`: a running server, measured with a profile's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eyas.benchmark.methods import PLAIN
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import load_machine, load_profile
from eyas.stage import installed_versions, machine_description
from eyas.tables import OUTPUTS, read_table

_SHOWN = {
    "acceptance_length_drafted": ("tokens/drafted step", "{:.3f}"),
    "waste": ("waste", "{:.0%}"),
    "output_tokens_per_s": ("tokens/s", "{:,.1f}"),
    "tpot_ms_p50": ("TPOT, ms", "{:,.1f}"),
    "ttft_ms_p50": ("TTFT, ms", "{:,.1f}"),
    "identical_share": ("same as plain", "{:.0%}"),
    "looped_share": ("loops", "{:.0%}"),
}


def _plain_answers(file: Path) -> dict[str, dict[str, list[int]]]:
    """Plain decoding's answers by set and prompt id, where the stage has run."""
    answers: dict[str, dict[str, list[int]]] = {}
    for row in read_table(file, OUTPUTS) if file.is_file() else []:
        if row["method"] == PLAIN:
            answers.setdefault(row["set"], {})[row["prompt_id"]] = row["token_ids"]
    return answers


def _table(title: str, sets: dict[str, dict[str, Any]]) -> Table:
    table = Table("set", title=title, title_justify="left", box=None, pad_edge=False)
    for heading, _ in _SHOWN.values():
        table.add_column(heading, justify="right")
    for name, values in sets.items():
        table.add_row(name, *(form.format(values[key]) if key in values else "-" for key, (_, form) in _SHOWN.items()))
    return table


def benchmark_command(
    endpoint: Annotated[str, typer.Option(metavar="URL", help="A running vLLM server, as in http://127.0.0.1:8000.")],
    profile: Annotated[str, typer.Option(metavar="PROFILE", help="Whose prompts are served.")],
    name: Annotated[str, typer.Option(help="What this measurement is called, and its file.")] = "server",
    k: Annotated[
        int | None, typer.Option("--k", min=0, help="Refuse a server that drafts another number of tokens a step.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Prompts at a time; the profile's first if not given.")
    ] = None,
) -> None:
    """Measure a running vLLM server with a profile's prompts: acceptance from its Prometheus page, times from its stream.

    Needs what `prepare` makes. The server must serve the profile's target, and nothing else may use it meanwhile. Prints a
    table and writes .work/PROFILE/endpoint/NAME.json.
    """
    if not name or Path(name).name != name or name.startswith("."):
        raise EyasError(f"--name {name}: give a plain file name")
    from eyas.benchmark.endpoint import endpoint_metrics, serve_sets  # seconds of imports
    from eyas.benchmark.prompts import profile_prompts
    from eyas.serving.opening import opened
    from eyas.targets.resolve import open_target

    params, machine, data = load_profile(profile), load_machine(), Path("data") / profile
    directory, _ = open_target(params.target, data / "target.json")
    server = opened(endpoint, profile, machine, params.target, directory)
    prompts = profile_prompts(data, directory, params.target, params.benchmark)
    at_a_time = concurrency or params.benchmark.concurrency[0]
    served = serve_sets(server, prompts, max_tokens=params.benchmark.max_tokens, concurrency=at_a_time, k=k)
    plain = _plain_answers(data / "benchmark" / "outputs.parquet")
    sets = {key: endpoint_metrics(value, plain.get(key, {})) for key, value in served.items()}
    draft_tokens = next(iter(served.values())).counters.positions
    file = Path(".work") / profile / "endpoint" / f"{name}.json"
    write_json_atomic(
        file,
        {
            "name": name,
            "profile": profile,
            "k": draft_tokens,
            "concurrency": at_a_time,
            "max_tokens": params.benchmark.max_tokens,
            "server_version": server.version,
            "model": server.model,
            "versions": installed_versions(),
            "machine": machine_description(),
            "sets": sets,
        },
    )
    speculation = f"k = {draft_tokens}" if draft_tokens else "no drafter"
    Console(highlight=False).print(_table(f"{name}: {speculation}, {at_a_time} prompts at a time", sets))
    typer.echo(f"written to {file}")
