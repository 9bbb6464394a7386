"""`eyas store …`: look after a published store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eyas.console import console
from eyas.store.fsck import compact, store_info, verify_store

app = typer.Typer(no_args_is_help=True, help="Check, describe and compact a store of hidden states.")
Directory = Annotated[Path, typer.Argument(help="The store: the directory with manifest.json.", show_default=False)]


@app.command()
def verify(
    directory: Directory,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Read so many rows, chosen at random.", show_default="all rows")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read.")] = 1,
) -> None:
    """Read rows back and compare their checksums; exit status 1 with a list of all damage, if there is any."""
    damages = verify_store(directory, sample, workers)
    for damage in damages:
        place = [f"row {damage.row}" if damage.row else "", f"dataset {damage.dataset}" if damage.dataset else ""]
        console.print(
            ", ".join([damage.shard, *filter(None, place)]) + f": {damage.reason}", markup=False, soft_wrap=True
        )
    if damages:
        console.print(
            f"{directory}: {len(damages)} {'fault' if len(damages) == 1 else 'faults'}", style="red", markup=False
        )
        raise typer.Exit(1)
    console.print(f"{directory}: no damage found", markup=False)


@app.command()
def info(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Print rows, tokens, bytes, ratio, layers and fingerprint."""
    values = store_info(directory)
    if as_json:
        typer.echo(json.dumps(values, indent=2, sort_keys=True))
        return
    for name, value in values.items():
        shown = f"{value:,}" if type(value) is int else f"{value:,.3f}" if type(value) is float else str(value)
        typer.echo(f"{name + ':':<17}{shown}")


@app.command("compact")
def compact_command(directory: Directory) -> None:
    """Write shards anew of which more than a third of the tokens are dead; the other shards stay as they are."""
    before = store_info(directory)
    compact(directory, directory)
    after = store_info(directory)
    freed = (before["bytes"] - after["bytes"]) / 2**20
    console.print(f"{directory}: {freed:,.1f} MiB freed, {after['dead_rows']} dead rows left", markup=False)
