"""Records of a profile's earlier runs, here and on the remote, with which DVC restores outputs instead of computing them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from eyas.moving.objects import RUNS, Record, listed, records
from eyas.moving.remote import reaching
from eyas.moving.transfer import Transfer


def whole_records(transfer: Transfer, profile: str) -> Iterable[Record]:
    """The profile's records in the cache whose objects are all there too."""
    root = Path(transfer.repo.cache.legacy.path)
    paths = sorted(path for path in (root / RUNS).glob("*/*/*") if path.is_file() and not path.name.endswith(".tmp"))
    for record in records(((str(path.relative_to(root)), path.read_bytes()) for path in paths), profile):
        lists = [thing for thing in record.objects if thing.is_list and transfer.cached(thing.oid).is_file()]
        files = [file for thing in lists for file in listed(transfer.cached(thing.oid).read_bytes(), thing)]
        if all(transfer.cached(thing.oid).is_file() for thing in [*record.objects, *files]):
            yield record


def remote_records(transfer: Transfer, profile: str) -> Iterable[Record]:
    """The profile's records on the remote that the cache lacks."""
    fs, top = transfer.remote.fs, transfer.remote.path
    with reaching(transfer.url):
        paths = sorted(fs.find(fs.join(top, RUNS))) if fs.exists(fs.join(top, RUNS)) else []
    root = Path(transfer.repo.cache.legacy.path)
    relative = [str(fs.relpath(path, top)) for path in paths if not path.endswith(".tmp")]
    new = [path for path in relative if not (root / path).exists()]
    contents = transfer.each(lambda path: fs.cat_file(fs.join(top, path)), new)
    return records(zip(new, contents, strict=True), profile)


def send_record(transfer: Transfer, record: Record) -> None:
    """Send one record, unless it is there; its objects must be."""
    fs = transfer.remote.fs
    target = fs.join(transfer.remote.path, *Path(record.path).parts)
    with reaching(transfer.url):
        if not fs.exists(target):
            fs.makedirs(fs.parent(target), exist_ok=True)
            fs.put_file(str(Path(transfer.repo.cache.legacy.path) / record.path), target)
