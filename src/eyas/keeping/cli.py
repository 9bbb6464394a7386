"""`eyas cache …`: look after DVC's cache, its lock, and what of a run goes into Git."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from eyas.console import console
from eyas.errors import EyasError
from eyas.keeping import adopt, commit, fsck, gc, merge
from eyas.keeping.cache import Cache, open_cache
from eyas.keeping.settings import set_up_clone

app = typer.Typer(
    no_args_is_help=True, help="Look after DVC's cache and lock: damage, space, crashes, merges, commits."
)
_File = Annotated[Path, typer.Argument(show_default=False)]
_Profile = Annotated[str, typer.Argument(metavar="PROFILE", help="a name under `profiles` in params.yaml")]
_EXAMPLES = 10
_GIB, _MIB = 2**30, 2**20


@app.command("fsck")
def fsck_command(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only; move and fetch nothing.")] = False,
) -> None:
    """Read every object of the cache and compare it with its name; check listings, metrics and stores too.

    Damaged objects go to `quarantine` in the cache folder and are fetched again where a remote is set. Exit status 1 if there is
    any damage, mended or not.
    """
    cache = open_cache()
    found = fsck.examine(cache)
    _say(f"{found.objects} objects, {found.bytes / _GIB:,.1f} GiB: {len(found.damaged) or 'no'} damaged")
    for damaged in found.damaged:
        _say(f"damaged: {damaged.name}: {damaged.reason}")
        for link in damaged.links:
            _say(f"  the same file: {link}")
    for listing, lacking in found.incomplete.items():
        _say(f"incomplete: listing {listing}: {len(lacking)} of its objects are not here, {lacking[0]} for one")
    for profile, paths in found.absent.items():
        _say(
            f"not here (no damage): {', '.join(paths)}; `make pull PROFILE={profile}`, or `make repro PROFILE={profile}`"
        )
    for fault in found.faults:
        _say(f"fault: {fault}")
    if not dry_run:
        _mend(cache, found)
    elif found.damaged or found.incomplete:
        _say("`make fsck` moves what is damaged to quarantine and fetches it and what is missing from the remote")
    if found.damaged or found.incomplete or found.faults:
        raise typer.Exit(1)


def _mend(cache: Cache, found: fsck.Examined) -> None:
    for damaged in found.damaged:
        _say(f"moved to {fsck.quarantine(cache, damaged.name)}")
    wanted = {damaged.name for damaged in found.damaged}.union(*found.incomplete.values())
    if not wanted:
        return
    sound, reasons = fsck.fetch_again(cache, wanted)
    for damaged in found.damaged:
        if damaged.name in sound:
            fsck.relink(cache.path(damaged.name), damaged.links)
    _say(f"fetched again: {len(sound)} of {len(wanted)}")
    if len(sound) < len(wanted):
        for reason in reasons[:_EXAMPLES]:
            _say(f"not fetched: {reason}")
        _say("`make repro PROFILE=…` makes outputs again that the cache lacks; for shards of hidden states")
        _say(
            "`eyas store repair data/PROFILE/hidden_states` extracts just what is damaged. The damaged bytes stay in quarantine"
        )


@app.command("gc")
def gc_command(
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is shown.")] = False,
    only_head: Annotated[
        bool,
        typer.Option("--only-head", help="Keep only what dvc.lock names now and in HEAD, not what older commits name."),
    ] = False,
) -> None:
    """Show the objects that no commit, profile or recorded run needs; with --yes, remove them."""
    cache = open_cache()
    with gc.dvc_locked():
        plan = gc.plan(cache, only_head)
        _show(cache, plan, only_head)
        if yes and plan.all:
            gc.remove(plan)
            _say("removed")
        elif plan.all:
            _say(f"nothing was removed; `make gc YES=1{' ONLY_HEAD=1' if only_head else ''}` removes them")


def _show(cache: Cache, plan: gc.Plan, only_head: bool) -> None:
    scope = "dvc.lock, now and in HEAD" if only_head else "all commits and recorded runs"
    _say(f"kept: {plan.kept} objects that {scope} need, and {plan.linked} others that are linked elsewhere")
    if not cache.root.is_relative_to(Path.cwd()):
        _say(f"careful: {cache.root} is outside this checkout; what only other checkouts of it name would go too")
    total = sum(rubbish.bytes for rubbish in plan.all)
    counts = (
        f"{len(plan.objects)} objects, {len(plan.records)} records of runs, {len(plan.leftovers)} cut-off transfers"
    )
    _say(f"to go: {counts}: {total / _MIB:,.1f} MiB")
    for rubbish in plan.objects[:_EXAMPLES]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(rubbish.modified))
        _say(f"  {rubbish.path.relative_to(cache.root)}  {rubbish.bytes / _MIB:,.1f} MiB  {when}")
    if len(plan.objects) > _EXAMPLES:
        _say(f"  and {len(plan.objects) - _EXAMPLES} smaller ones")


@app.command("adopt")
def adopt_command(profile: _Profile) -> None:
    """Record stages that finished while DVC was killed before it had hashed their outputs; refuse what is not proved."""
    verdicts = adopt.adopt(profile)
    if not verdicts:
        _say(f"{profile}: nothing to adopt, every stage is recorded")
    for verdict in verdicts:
        _say(f"{verdict.stage}: {'adopted' if not verdict.against else 'not adopted: ' + '; '.join(verdict.against)}")
    if any(verdict.against for verdict in verdicts):
        raise EyasError(f"not everything was adopted; `make repro PROFILE={profile}` runs the rest")


@app.command("commit")
def commit_command(
    profile: _Profile,
    message: Annotated[str, typer.Option("-m", "--message", help="What the run is.", show_default=False)],
) -> None:
    """Commit a profile's lock entries, metrics and parameters together, if they are up to date and sound."""
    _say(f"{profile}: committed as {commit.commit(profile, message)}")


@app.command("merge-lock")
def merge_command(base: _File, ours: _File, theirs: _File) -> None:
    """Merge two dvc.lock files stage by stage into OURS; Git calls this. Exit status 1 if both sides changed a stage."""
    conflicts = merge.merge_files(base, ours, theirs)
    if conflicts:
        raise EyasError(
            f"dvc.lock: both sides built {', '.join(conflicts)}; keep one of the two texts between the markers, then "
            "`git add dvc.lock`; `make status` says whether it fits the code"
        )


@app.command("setup")
def setup_command() -> None:
    """Set up this clone: the merge driver for dvc.lock, hashing threads, a lasting state database. `make setup` runs it."""
    for line in set_up_clone():
        _say(line)


def _say(text: str) -> None:
    console.print(escape(text), soft_wrap=True)
