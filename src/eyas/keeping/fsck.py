"""`eyas cache fsck`: every object against its name, listings against what is there, metrics against the lock, stores against themselves.

Damage is never deleted. It goes to ``quarantine`` in the cache folder, an object that the remote has is fetched again, and links
in this checkout to the damaged file then get the good one.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.console import Progress
from eyas.errors import EyasError
from eyas.files import fsync_path
from eyas.keeping.cache import LOCK_FILE, Cache, file_md5, git, locked_outs, read_lock
from eyas.keeping.settings import hashing_jobs
from eyas.store.fsck import verify_store


@dataclass(frozen=True)
class Damaged:
    """An object whose bytes are not those of its name, and the files of this checkout that are the same inode."""

    name: str
    reason: str
    links: tuple[Path, ...]


@dataclass
class Examined:
    """What was found, before anything is changed."""

    objects: int = 0
    bytes: int = 0
    damaged: list[Damaged] = field(default_factory=list)
    incomplete: dict[str, list[str]] = field(
        default_factory=dict
    )  # listing: objects that it names and that are not here
    absent: dict[str, list[str]] = field(default_factory=dict)  # profile: outputs of the lock of which nothing is here
    faults: list[str] = field(default_factory=list)  # everything else, each with what to do


def examine(cache: Cache) -> Examined:
    """Read everything; change nothing."""
    found = Examined()
    bad = dict(_hash_all(cache, found))
    links = _links_to({cache.path(name) for name in bad})
    found.damaged = [
        Damaged(name, reason, tuple(links.get(cache.path(name), ()))) for name, reason in sorted(bad.items())
    ]
    here = set(cache.objects()) - bad.keys()
    stages: dict[str, Any] = {}
    try:
        stages = read_lock(LOCK_FILE.read_text(encoding="utf-8"), str(LOCK_FILE)) if LOCK_FILE.is_file() else {}
        found.faults += _lock_faults(cache, stages, here)
    except (EyasError, UnicodeDecodeError) as error:
        found.faults.append(str(error))
    # outputs only: DVC keeps the listings of directories that stages merely read, without their files
    for name in sorted({name for _, _, name in locked_outs(stages) if name.endswith(".dir")} & here):
        if lacking := [n for n in cache.listed(name) if n not in here and n not in bad]:
            found.incomplete[name] = lacking
    found.absent = _absent(stages, here | bad.keys())
    found.faults += _metrics_faults(stages)
    told = {link for damaged in found.damaged for link in damaged.links}
    for manifest in sorted(Path("data").glob("*/hidden_states/manifest.json")):
        found.faults += _store_faults(manifest.parent, told)
    return found


def _hash_all(cache: Cache, found: Examined) -> Iterator[tuple[str, str]]:
    names = cache.objects()
    sizes = {name: cache.path(name).stat().st_size for name in names}
    found.objects, found.bytes = len(names), sum(sizes.values())
    read = 0
    with Progress("hashing", found.bytes >> 20, "MiB") as progress, ThreadPoolExecutor(hashing_jobs()) as pool:
        # the largest first, so that no thread is left alone with one at the end
        futures = {pool.submit(check_object, cache, name): name for name in sorted(names, key=lambda n: -sizes[n])}
        for future in as_completed(futures):
            read += sizes[futures[future]]
            progress.advance((read >> 20) - progress.done)
            if reason := future.result():
                yield futures[future], reason


def check_object(cache: Cache, name: str) -> str | None:
    """Why an object is damaged; None if it is sound."""
    try:
        digest = file_md5(cache.path(name))
        if digest != name.removesuffix(".dir"):
            return f"its bytes have MD5 {digest}"
        if name.endswith(".dir"):
            cache.listed(name)
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    return None


def _links_to(objects: set[Path]) -> dict[Path, list[Path]]:
    """Files under data/ and .work/ that share an inode with one of these objects, or are symlinks to it."""
    inodes = {(s.st_dev, s.st_ino): path for path in objects if (s := path.stat())}
    links: dict[Path, list[Path]] = {}
    for root in (Path("data"), Path(".work")) if inodes else ():
        for file in sorted(root.rglob("*")):
            try:
                status = file.stat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) in inodes:
                links.setdefault(inodes[status.st_dev, status.st_ino], []).append(file)
    return links


def _absent(stages: dict[str, Any], here: set[str]) -> dict[str, list[str]]:
    absent: dict[str, list[str]] = {}
    for stage, path, name in locked_outs(stages):
        if not path.startswith("metrics/") and name not in here:
            absent.setdefault(stage.partition("@")[2], []).append(path)
    return absent


def _lock_faults(cache: Cache, stages: dict[str, Any], here: set[str]) -> Iterator[str]:
    """What DVC never does to the lock that Git gave it: take a stage out, or name another object that it did not put into the cache."""
    committed = git("show", f"HEAD:{LOCK_FILE}") if git("ls-tree", "HEAD", "--", str(LOCK_FILE)) else ""
    before = read_lock(committed, f"HEAD's {LOCK_FILE}")
    mend = f"`git diff {LOCK_FILE}`, then `git restore {LOCK_FILE}`"
    if gone := sorted(before.keys() - stages.keys()):
        yield f"{LOCK_FILE}: lacks stages that HEAD's has ({', '.join(gone)}): {mend}"
    outs = {(stage, path): name for stage, path, name in locked_outs(before)}
    for stage, path, name in locked_outs(stages):
        was = outs.get((stage, path), name)
        if was != name and was in here and name not in here and not list(cache.quarantine.glob(f"{name}*")):
            yield f"{LOCK_FILE}: names {name} for {path}, which was never here; HEAD's names {was}, which is: {mend}"


def _metrics_faults(stages: dict[str, Any]) -> Iterator[str]:
    """Metrics and plot series are Git's; the lock has their MD5."""
    for _, path, name in locked_outs(stages):
        file = Path(path)
        if not path.startswith("metrics/") or not file.is_file():
            continue
        if file_md5(file) != name:
            yield f"{path}: not what the stage wrote, says {LOCK_FILE}: `git diff {path}`, then `git restore {path}`"


def _store_faults(directory: Path, told: set[Path]) -> Iterator[str]:
    """By the store's own checksums; shards that are damaged objects of the cache have been told of."""
    try:
        damages = verify_store(directory, None, hashing_jobs())
    except EyasError as error:
        yield f"{directory}: {error}"
        return
    for damage in (damage for damage in damages if directory / damage.shard not in told):
        row = f", row {damage.row}" if damage.row else ""
        yield f"{directory}/{damage.shard}{row}: {damage.reason}: `eyas store repair {directory}` extracts just that again"


def quarantine(cache: Cache, name: str) -> Path:
    """Take an object out of the cache and keep its bytes; gives where they are now."""
    cache.quarantine.mkdir(exist_ok=True)
    place = cache.quarantine / name
    if place.exists():
        place = place.with_name(f"{name}.{uuid.uuid4().hex[:8]}")
    cache.path(name).rename(place)
    fsync_path(cache.quarantine)
    return place


def fetch_again(cache: Cache, names: Iterable[str]) -> tuple[set[str], list[str]]:
    """Get objects that the cache lacks from the remote; gives those that are here now, and why the others are not."""
    from eyas.moving.fetching import fetch_objects
    from eyas.moving.objects import Object, open_repo
    from eyas.moving.transfer import Transfer

    wanted = [Object(name, os.path.relpath(cache.path(name))) for name in sorted(names)]
    try:
        faults = fetch_objects(Transfer(open_repo()), wanted, "again").faults
    except EyasError as error:
        faults = [str(error)]
    return {thing.oid for thing in wanted if cache.path(thing.oid).exists()}, faults


def relink(good: Path, links: Iterable[Path]) -> None:
    """Give the checkout's names of a damaged file the good object; its damaged bytes stay in quarantine."""
    for link in links:
        if link.is_symlink():
            continue  # leads to the object's name, which is good again
        temporary = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            os.link(good, temporary)
            os.replace(temporary, link)
        finally:
            temporary.unlink(missing_ok=True)
