"""Bringing one profile, or single objects, from the remote into DVC's cache."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eyas.console import Progress
from eyas.errors import EyasError
from eyas.files import atomic_file
from eyas.keeping.cache import file_md5
from eyas.moving.history import remote_records
from eyas.moving.objects import Object, listed, profile_outputs
from eyas.moving.rclone import Rclone
from eyas.moving.transfer import MIB, Bar, FileBytes, Moved, Transfer, named

_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Brought:
    """What came of objects that were asked for: bytes that went over, and a line for each that did not come."""

    size: int
    faults: list[str]


def fetch(transfer: Transfer, profile: str, runs: bool = False, only: str = "", via: Rclone | None = None) -> Moved:
    """Bring what the cache lacks of a profile; every object is hashed before it gets its name.

    Args:
        transfer: cache and remote.
        profile: its name.
        runs: also bring the records of the profile's runs, and the objects that they name.
        only: just the outputs at or below this path.
        via: what brings the files; they are hashed here all the same.

    Raises:
        EyasError: names what the remote does not have, or has damaged, once all the rest is here; or the disk is too small.
    """
    outputs = [thing for thing in profile_outputs(transfer.repo, profile) if thing.path.startswith(only)]
    history = list(remote_records(transfer, profile)) if runs else []
    files, lists, lost = transfer.expand([*outputs, *(thing for record in history for thing in record.objects)])
    todo = [thing for thing in files if not transfer.cached(thing.oid).is_file()]
    brought = fetch_objects(transfer, todo, profile, via)
    absent = {thing.oid for thing in todo if not transfer.cached(thing.oid).is_file()} | {thing.oid for thing in lost}
    new = [thing for thing in lists if not transfer.cached(thing.oid).is_file()]
    for thing in new:
        if not any(file.oid in absent for file in listed(lists[thing], thing)):
            _keep(transfer.cached(thing.oid), lists[thing])
    for record in history:
        if all(transfer.cached(thing.oid).is_file() for thing in record.objects):
            _keep(Path(transfer.repo.cache.legacy.path) / record.path, record.content)
    faults = brought.faults + _missing(lost)
    if faults:
        raise named(
            faults,
            f"{transfer.url}: does not have all of `{profile}`; the rest was fetched:",
            f"on the machine that has it: `make push PROFILE={profile}`; or `make repro PROFILE={profile}` computes it here",
        )
    return Moved(
        len(todo) + len(new),
        brought.size + sum(len(lists[thing]) for thing in new),
        len(files) + len(lists) - len(todo) - len(new),
    )


def fetch_objects(transfer: Transfer, objects: Iterable[Object], what: str, via: Rclone | None = None) -> Brought:
    """Bring objects that the cache lacks, as far as the remote has them; each is hashed before it gets its name.

    Args:
        transfer: cache and remote.
        objects: of which the cache has none.
        what: they are, for the progress bar.
        via: what brings the files; they are hashed here all the same.

    Raises:
        EyasError: the remote fails, or the disk is too small.
    """
    wanted = list(objects)
    there = transfer.sizes(wanted)
    todo = [thing for thing in wanted if thing.oid in there]
    total = sum(there[thing.oid] for thing in todo)
    _prepare_cache(transfer, total)
    incoming = via.bring(transfer, todo) if via and todo else None
    with Progress(f"fetching {what}", -(-total // MIB), "MiB") as bar:
        counted = Bar(bar)
        faults = [line for line in transfer.each(lambda t: _bring(transfer, t, counted, incoming), todo) if line]
    if incoming:
        shutil.rmtree(incoming)
    return Brought(total, faults + _missing(thing for thing in wanted if thing.oid not in there))


def _missing(objects: Iterable[Object]) -> list[str]:
    return [f"{thing.path} ({thing.oid}): missing on the remote" for thing in objects]


def _prepare_cache(transfer: Transfer, size: int) -> None:
    """Make room: remove what fetches that were killed left more than a day ago, and see that ``size`` bytes fit."""
    cache = Path(transfer.repo.cache.local.path)
    cache.mkdir(parents=True, exist_ok=True)
    for leftover in cache.glob("??/.*.tmp"):
        if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
            leftover.unlink(missing_ok=True)
    free = shutil.disk_usage(cache).free
    if free < size:
        raise EyasError(
            f"{cache}: {free / 2**30:,.1f} GiB free, {size / 2**30:,.1f} GiB to fetch; `make gc` may free some"
        )


def _bring(transfer: Transfer, thing: Object, bar: Bar, incoming: Path | None) -> str | None:
    """Fetch one object, or take it from where it waits; a line if its bytes are not those that its name says."""
    target = transfer.cached(thing.oid)
    try:
        with atomic_file(target) as temporary:
            if incoming:
                os.replace(incoming / thing.oid[:2] / thing.oid[2:], temporary)
                bar.add(temporary.stat().st_size)
            else:
                transfer.remote.fs.get_file(
                    transfer.remote.odb.oid_to_path(thing.oid), str(temporary), callback=FileBytes(bar.add)
                )
            if file_md5(temporary) != thing.oid.removesuffix(".dir"):
                raise _Damaged
            temporary.chmod(0o444)
    except _Damaged:
        return f"{thing.path} ({thing.oid}): damaged on the remote; remove it there"
    return None


class _Damaged(Exception):
    """Other bytes than the name says."""


def _keep(path: Path, content: bytes) -> None:
    if path.is_file():
        return
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)
        temporary.chmod(0o444)
