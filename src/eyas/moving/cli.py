"""`eyas remote …`: the DVC remote, and one profile's artefacts to and from it.

Each command imports what it needs itself: DVC takes half a second to import, which the other commands of `eyas` are spared.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.console import console

if TYPE_CHECKING:
    from eyas.moving.rclone import Rclone
    from eyas.moving.transfer import Moved

app = typer.Typer(no_args_is_help=True, help="Artefacts to and from other machines, through a DVC remote.")
_Profile = Annotated[str, typer.Argument(metavar="PROFILE", help="a name under `profiles` in params.yaml")]
_Runs = Annotated[
    bool, typer.Option("--runs", help="Earlier runs of the profile too: their records and their outputs.")
]
_Via = Annotated[str | None, typer.Option(help="`rclone`: it moves the files, many at a time.", show_default=False)]
_Limit = Annotated[str | None, typer.Option(help="Most bytes a second for rclone, as in 200M.", show_default=False)]


@app.command("set")
def set_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="/a/folder, ssh://host/path or s3://bucket/path")],
    endpoint: Annotated[str | None, typer.Option(help="URL of an S3-compatible server.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Transfers at a time.", show_default="4, for S3 8")] = None,
) -> None:
    """Make URL this checkout's remote, in .dvc/config.local; the folder or the bucket is made if it is not there.

    Keys and passwords never go on the command line: SSH uses its agent and ~/.ssh/config, S3 the environment or ~/.aws.
    """
    from eyas.moving.objects import open_repo
    from eyas.moving.remote import set_remote

    console.print(f"remote: {set_remote(open_repo(), url, endpoint, jobs)}", markup=False, soft_wrap=True)


@app.command("push")
def push_command(profile: _Profile, runs: _Runs = False, via: _Via = None, bwlimit: _Limit = None) -> None:
    """Send what the remote lacks of a profile, and check that all of it is there."""
    from eyas.moving.objects import open_repo
    from eyas.moving.pushing import push
    from eyas.moving.transfer import Transfer

    started = time.monotonic()
    transfer = Transfer(open_repo())
    _report("sent", push(transfer, profile, runs, _rclone(via, bwlimit)), started)


@app.command("fetch")
def fetch_command(profile: _Profile, runs: _Runs = False, via: _Via = None, bwlimit: _Limit = None) -> None:
    """Bring what DVC's cache lacks of a profile; the checkout stays as it is."""
    from eyas.moving.fetching import fetch
    from eyas.moving.objects import open_repo
    from eyas.moving.transfer import Transfer

    started = time.monotonic()
    _report("fetched", fetch(Transfer(open_repo()), profile, runs, via=_rclone(via, bwlimit)), started)


@app.command("pull")
def pull_command(profile: _Profile, runs: _Runs = False, via: _Via = None, bwlimit: _Limit = None) -> None:
    """Bring what DVC's cache lacks of a profile, and put its outputs into the checkout."""
    from dvc.exceptions import DvcException

    from eyas.errors import EyasError
    from eyas.moving.fetching import fetch
    from eyas.moving.objects import LAST_STAGE, open_repo
    from eyas.moving.transfer import Transfer

    started = time.monotonic()
    repo = open_repo()
    moved = fetch(Transfer(repo), profile, runs, via=_rclone(via, bwlimit))
    try:
        repo.checkout([f"{LAST_STAGE}@{profile}"], with_deps=True)
    except DvcException as error:
        raise EyasError(
            f"{profile}: fetched, but the checkout has other outputs that are in no cache: {error}; `make repro "
            f"PROFILE={profile}` brings both together, or move them away and pull again"
        ) from error
    _report("fetched", moved, started)


@app.command("check")
def check_command(
    profile: _Profile,
    content: Annotated[
        bool, typer.Option("--content", help="Read and hash every object, whatever that costs.")
    ] = False,
) -> None:
    """Check that the remote has every object that dvc.lock names for a profile; exit status 1 with a list if not."""
    from eyas.moving.objects import open_repo
    from eyas.moving.pushing import check
    from eyas.moving.transfer import Transfer

    console.print(f"{profile}: the remote has all {check(Transfer(open_repo()), profile, content)} objects")


def _rclone(via: str | None, limit: str | None) -> Rclone | None:
    from eyas.errors import EyasError
    from eyas.moving.rclone import Rclone

    if via not in (None, "rclone"):
        raise EyasError(f"VIA={via}: only `rclone` is known; without VIA, Eyas moves the files itself")
    if limit and via is None:
        raise EyasError("BWLIMIT: only rclone has a limit on its bandwidth; add VIA=rclone")
    return Rclone.found(limit) if via else None


def _report(verb: str, moved: Moved, started: float) -> None:
    console.print(
        f"{verb} {moved.objects} {'object' if moved.objects == 1 else 'objects'}, {moved.size / 2**20:,.1f} MiB, in "
        f"{time.monotonic() - started:.1f} s; {moved.there} were there already"
    )
