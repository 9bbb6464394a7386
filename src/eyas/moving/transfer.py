"""One profile's objects to and from the remote: what is missing and nothing else, checked, resumable file by file.

A directory's list goes last, so that a list that is there has its files, whenever a transfer is cut short. Sizes on the remote
are looked up, never remembered: an object that somebody removed there is found.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dvc.data_cloud import Remote
from dvc.repo import Repo
from fsspec.callbacks import Callback  # type: ignore[import-untyped]

from eyas.console import Progress, console
from eyas.errors import EyasError
from eyas.moving.objects import Object, listed
from eyas.moving.remote import Kind, check_reachable, jobs, open_remote, reaching, remote_kind, remote_url

_T = TypeVar("_T")
_R = TypeVar("_R")
MIB = 2**20


@dataclass(frozen=True)
class Moved:
    """What a transfer came to: objects and bytes that went over, and how many were there already."""

    objects: int
    size: int
    there: int


class FileBytes(Callback):  # type: ignore[misc]  # fsspec has no types
    """Hands on the bytes of one file's transfer, as the file system's library counts them."""

    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__()
        self._report = report

    def branched(self, path_1: str, path_2: str, **_: Any) -> FileBytes:
        """The same, for a file in a batch of one."""
        return self

    def relative_update(self, inc: int = 1) -> None:
        """Count ``inc`` more bytes."""
        self._report(inc)


class Transfer:
    """The cache of a checkout and its remote."""

    def __init__(self, repo: Repo) -> None:
        self.repo = repo
        self.remote: Remote = open_remote(repo)
        self.url: str = remote_url(repo) or ""
        self.kind: Kind = remote_kind(self.url)
        self.jobs = jobs(repo)
        check_reachable(self.remote, self.kind, self.url)

    def cached(self, oid: str) -> Path:
        """Where the cache has an object, or would have it."""
        return Path(self.repo.cache.local.oid_to_path(oid))

    @property
    def incoming(self) -> Path:
        """Where files wait that another program brought and nobody has hashed yet; DVC does not look there."""
        return Path(self.repo.cache.legacy.path) / "incoming"

    def each(self, work: Callable[[_T], _R], things: Iterable[_T]) -> list[_R]:
        """Do a thing for each of many, a few at a time; the first fault ends it once those under way are done."""
        with reaching(self.url), ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(work, thing) for thing in things]
            try:
                return [future.result() for future in futures]
            except KeyboardInterrupt:  # at once, not after the gigabytes under way; only whole files have their names
                console.print("interrupted; what went over is kept: run again to go on")
                os._exit(130)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def sizes(self, objects: Iterable[Object]) -> dict[str, int]:
        """Bytes of each object that is on the remote."""
        odb, kind = self.remote.odb, self.kind
        if kind != "folder":
            self.remote.fs.fs.invalidate_cache()

        def size(oid: str) -> tuple[str, int | None]:
            try:
                path = odb.oid_to_path(oid)
                return oid, Path(path).stat().st_size if kind == "folder" else int(odb.fs.info(path)["size"])
            except FileNotFoundError:
                return oid, None

        found = self.each(size, sorted({thing.oid for thing in objects}))
        return {oid: count for oid, count in found if count is not None}

    def read_list(self, directory: Object) -> tuple[bytes, list[Object]] | None:
        """A directory's list with the files in it, from the cache, else from the remote; None if neither has it."""
        path = self.cached(directory.oid)
        if path.is_file():
            content = path.read_bytes()
            place = str(path)
        else:
            try:
                with reaching(self.url):
                    content = self.remote.fs.cat_file(self.remote.odb.oid_to_path(directory.oid))
            except EyasError as error:
                if _is_absent(error):
                    return None
                raise
            place = self.url
        if hashlib.md5(content, usedforsecurity=False).hexdigest() + ".dir" != directory.oid:
            raise EyasError(f"{directory.path}: its list of files ({directory.oid}) is damaged in {place}")
        return content, listed(content, directory)

    def expand(self, objects: Iterable[Object]) -> tuple[list[Object], dict[Object, bytes], list[Object]]:
        """All files, the lists of directories with their bytes, and the lists that are nowhere."""
        files: set[Object] = set()
        lists: dict[Object, bytes] = {}
        lost = []
        for thing in sorted(set(objects)):
            if not thing.is_list:
                files.add(thing)
            elif (found := self.read_list(thing)) is None:
                lost.append(thing)
            else:
                lists[thing] = found[0]
                files.update(found[1])
        return once(files), lists, lost


def once(objects: Iterable[Object]) -> list[Object]:
    """One of each object, although several paths may have the same content."""
    return sorted({thing.oid: thing for thing in sorted(objects)}.values())


def _is_absent(error: EyasError) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, FileNotFoundError):
            return True
        cause = cause.__cause__
    return False


def named(faults: list[str], head: str, tail: str) -> EyasError:
    """One error for several faults: the first ten of them and how many there are."""
    more = [f"  and {len(faults) - 10} more"] if len(faults) > 10 else []
    return EyasError("\n".join([head, *(f"  {fault}" for fault in faults[:10]), *more, tail]))


class Bar:
    """A progress bar in MiB that several threads may advance by bytes."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.bytes, self.lock = bar, 0, threading.Lock()

    def add(self, count: int) -> None:
        """Count ``count`` more bytes."""
        with self.lock:
            self.bytes += count
            self.bar.advance(self.bytes // MIB - self.bar.done)
