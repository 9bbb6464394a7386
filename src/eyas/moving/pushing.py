"""Sending one profile to the remote, and checking that it is whole there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from eyas.console import Progress
from eyas.errors import EyasError
from eyas.keeping.cache import file_md5
from eyas.moving.history import send_record, whole_records
from eyas.moving.objects import Object, Record, profile_outputs
from eyas.moving.rclone import Rclone
from eyas.moving.transfer import MIB, Bar, FileBytes, Moved, Transfer, named, once

_CHUNK = 4 * MIB


@dataclass(frozen=True)
class _Plan:
    """What a push is about: all objects, those to send, sizes here and there, and the records to send after them."""

    objects: list[Object]
    todo: list[Object]
    here: dict[str, int]
    before: dict[str, int]
    history: list[Record]


def _plan(transfer: Transfer, profile: str, runs: bool) -> _Plan:
    outputs = profile_outputs(transfer.repo, profile)
    history = list(whole_records(transfer, profile)) if runs else []
    files, lists, lost = transfer.expand([*outputs, *(thing for record in history for thing in record.objects)])
    objects = [*files, *once(lists)]
    before = transfer.sizes(objects)
    here = {t.oid: path.stat().st_size for t in objects if (path := transfer.cached(t.oid)).is_file()}
    lost += [t for t in objects if t.oid not in here and t.oid not in before]
    if lost:
        raise named(
            [f"{thing.path} ({thing.oid})" for thing in lost],
            f"{profile}: dvc.lock names files that are neither in DVC's cache nor on the remote:",
            f"`make repro PROFILE={profile}` makes them again; nothing was sent",
        )
    todo = [t for t in objects if t.oid in here and before.get(t.oid) != here[t.oid]]
    return _Plan(objects, todo, here, before, history)


def push(transfer: Transfer, profile: str, runs: bool = False, via: Rclone | None = None) -> Moved:
    """Send what the remote lacks of a profile, and check afterwards that all of it is there.

    Every object is hashed before it is sent, and after it on a remote that is a folder; of those that were there already, the
    size is compared. With ``runs``, also the records of the profile's earlier runs whose objects are all here, with them. With
    ``via``, rclone sends the files; lists of directories go after them all the same.

    Raises:
        EyasError: objects that are neither here nor there, that are damaged here, or that are not whole on the remote afterwards.
    """
    plan = _plan(transfer, profile, runs)
    total = sum(plan.here[thing.oid] for thing in plan.todo)
    files, lists = ([t for t in plan.todo if t.is_list == is_list] for is_list in (False, True))
    if via and files:
        transfer.each(lambda t: _prove(transfer, t, t.oid in plan.before), files)
        via.send(transfer, files)
        files = []
    with Progress(f"sending {profile}", -(-sum(plan.here[t.oid] for t in [*files, *lists]) // MIB), "MiB") as bar:
        counted = Bar(bar)
        for part in (files, lists):
            transfer.each(lambda t: _send(transfer, t, t.oid in plan.before, counted), part)
    _check_sent(transfer, profile, plan)
    for record in plan.history:
        send_record(transfer, record)
    return Moved(len(plan.todo), total, len(plan.objects) - len(plan.todo))


def _prove(transfer: Transfer, thing: Object, replace: bool) -> None:
    """See that an object is what its name says before it goes, and make room for it if the remote has one of another size."""
    source = transfer.cached(thing.oid)
    if file_md5(source) != thing.oid.removesuffix(".dir"):
        raise EyasError(
            f"{thing.path}: damaged in DVC's cache ({source}), so it was not sent; `make fsck` finds all such"
        )
    if replace:  # a size that is not its own
        transfer.remote.odb.delete(thing.oid)


def _send(transfer: Transfer, thing: Object, replace: bool, bar: Bar) -> None:
    _prove(transfer, thing, replace)
    source = str(transfer.cached(thing.oid))
    transfer.remote.odb.add(source, transfer.repo.cache.local.fs, thing.oid, callback=FileBytes(bar.add), verify=False)


def _check_sent(transfer: Transfer, profile: str, plan: _Plan) -> None:
    """Raise one error that names every object that is not whole on the remote."""
    after = transfer.sizes(plan.objects)
    faults = [f"{t.path} ({t.oid}): missing" for t in plan.objects if t.oid not in after]
    faults += [
        f"{t.path} ({t.oid}): {after[t.oid]} bytes there, {plan.here[t.oid]} here"
        for t in plan.objects
        if t.oid in after and after[t.oid] != plan.here.get(t.oid, after[t.oid])
    ]
    if transfer.kind == "folder":
        faults += damaged(transfer, [t for t in plan.todo if t.oid in after])
    if faults:
        raise named(
            faults, f"{transfer.url}: not whole after the push:", f"`make push PROFILE={profile}` sends them again"
        )


def damaged(transfer: Transfer, objects: list[Object]) -> list[str]:
    """A line for each object whose bytes on the remote are not those that its name says; reads all of them."""
    fs, odb = transfer.remote.fs, transfer.remote.odb

    def fault(thing: Object) -> str | None:
        digest = hashlib.md5(usedforsecurity=False)
        with fs.open(odb.oid_to_path(thing.oid), "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        good = digest.hexdigest() == thing.oid.removesuffix(".dir")
        return None if good else f"{thing.path} ({thing.oid}): other bytes than its name says"

    return [line for line in transfer.each(fault, objects) if line]


def check(transfer: Transfer, profile: str, content: bool = False) -> int:
    """Check that the remote has every object of a profile, by size where the cache knows it; the number of them.

    Args:
        transfer: cache and remote.
        profile: its name.
        content: read and hash every object too.

    Raises:
        EyasError: names every object that is missing or damaged.
    """
    files, lists, lost = transfer.expand(profile_outputs(transfer.repo, profile))
    objects = [*files, *once(lists)]
    there = transfer.sizes(objects)
    faults = [f"{thing.path} ({thing.oid}): missing" for thing in [*lost, *(t for t in objects if t.oid not in there)]]
    present = [thing for thing in objects if thing.oid in there]
    for thing in present:
        path = transfer.cached(thing.oid)
        if path.is_file() and path.stat().st_size != there[thing.oid]:
            faults.append(f"{thing.path} ({thing.oid}): {there[thing.oid]} bytes there, {path.stat().st_size} here")
    if content:
        faults += damaged(transfer, present)
    if faults:
        raise named(
            faults,
            f"{transfer.url}: not whole:",
            f"`make push PROFILE={profile}` sends what is missing or short; remove an object with other bytes there first",
        )
    return len(objects)
