"""`eyas cache gc`: which objects nobody can need any more, and removing them after they were shown.

Kept are the objects that any commit names (branches, tags, stashes, reflogs, the index), of every profile, those of the run cache,
and every object that is linked from elsewhere: removing it would free nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eyas.console import Progress
from eyas.errors import EyasError
from eyas.keeping.cache import Cache, named_by_head, named_by_history, named_in
from eyas.keeping.fsck import check_object

_LEFTOVER_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Rubbish:
    """A file that can go."""

    path: Path
    bytes: int
    modified: float


@dataclass(frozen=True)
class Plan:
    """What would go, the largest first, and what was looked at."""

    objects: tuple[Rubbish, ...]
    leftovers: tuple[Rubbish, ...]
    records: tuple[Rubbish, ...]
    kept: int
    linked: int

    @property
    def all(self) -> tuple[Rubbish, ...]:
        """Everything that would go; objects last, so that no record of a run outlives what it names."""
        return self.records + self.leftovers + self.objects


@contextmanager
def dvc_locked() -> Iterator[None]:
    """Hold DVC's own lock, so that no `dvc` writes to the cache meanwhile.

    Raises:
        EyasError: a `dvc` is at work.
    """
    from dvc.lock import LockError
    from dvc.repo import Repo

    with Repo(".") as repo:
        try:
            with repo.lock:
                yield
        except LockError as error:
            raise EyasError(f"DVC is at work in this checkout; wait for it ({error})") from error


def plan(cache: Cache, only_head: bool) -> Plan:
    """Find what can go; removes nothing.

    Args:
        cache: the cache folder.
        only_head: keep just what the locks of HEAD and of the checkout name, of all profiles; records of runs whose objects go, go too.

    Raises:
        EyasError: a listing that is needed is damaged or in quarantine, or the clone is shallow.
    """
    records = sorted(path for path in cache.runs.glob("??/*/*") if path.is_file())
    texts = {path: named_in(path.read_text(errors="replace")) for path in records}
    here = set(cache.objects())
    if only_head:
        kept = _with_listed(cache, named_by_head(), here)
        doomed = [path for path, names in texts.items() if not _with_listed(cache, names & here, here) <= kept]
    else:
        kept = _with_listed(cache, named_by_history() | named_by_head() | set[str]().union(*texts.values()), here)
        doomed = []
    loose, linked = [], 0
    for name in sorted(here - kept):
        if cache.path(name).stat().st_nlink > 1:
            linked += 1
        else:
            loose.append(cache.path(name))
    old = time.time() - _LEFTOVER_SECONDS
    leftovers = [path for path in cache.leftovers() if path.stat().st_mtime < old]
    return Plan(_rubbish(loose), _rubbish(leftovers), _rubbish(doomed), len(here & kept), linked)


def _rubbish(paths: Iterable[Path]) -> tuple[Rubbish, ...]:
    found = [Rubbish(path, (s := path.stat()).st_size, s.st_mtime) for path in paths]
    return tuple(sorted(found, key=lambda r: (-r.bytes, r.path)))


def _with_listed(cache: Cache, names: set[str], here: set[str]) -> set[str]:
    """These objects and those that their listings name.

    A listing that was never here is no danger: DVC puts it into a cache last, so what it names came never or is incomplete.
    """
    kept = set(names)
    for name in sorted(names):
        if not name.endswith(".dir"):
            continue
        if name not in here:
            if list(cache.quarantine.glob(f"{name}*")):
                raise EyasError(
                    f"listing {name} is in {cache.quarantine}, so nobody can say which objects it names; "
                    "get it back first: `make fsck` with a remote, or `dvc repro`"
                )
        elif reason := check_object(cache, name):
            raise EyasError(
                f"listing {name} is damaged ({reason}), so nobody can say which objects it names: `make fsck` first"
            )
        else:
            kept.update(cache.listed(name))
    return kept


def remove(chosen: Plan) -> None:
    """Remove what a plan shows; an object that got a link since is left."""
    with Progress("removing", len(chosen.all), "files") as progress:
        for rubbish in chosen.all:
            if rubbish.path.exists() and rubbish.path.stat().st_nlink == 1:
                rubbish.path.unlink()
            progress.advance()
