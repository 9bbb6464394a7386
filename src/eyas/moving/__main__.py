"""``python -m eyas.moving``: what the Makefile runs; as `eyas remote`, without the imports of the other commands.

``repro`` is here alone, because a `make repro` that has nothing to do is to be over in a moment.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from eyas.activation import activate, active_profiles
from eyas.console import console
from eyas.errors import EyasError
from eyas.moving.cli import app
from eyas.moving.repro import repro
from eyas.summary import summary


@app.command("repro", hidden=True)
def repro_command(
    profile: Annotated[str | None, typer.Argument(help="A profile; all that are active without it.")] = None,
) -> None:
    """Build what is out of date, with what the remote has; then the summary."""
    if profile is not None:
        activate(profile)
    profiles = [profile] if profile else active_profiles()
    repro(profiles)
    for name in profiles:
        Console(highlight=False).print(summary(name))


if __name__ == "__main__":
    try:
        app()
    except EyasError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
