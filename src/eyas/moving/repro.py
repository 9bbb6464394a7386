"""`make repro`: what the remote has is brought instead of computed, the rest is computed, and nothing at all is quick.

DVC's ``repro --pull`` copies every record of every run from the remote each time, so it is asked only once something is to run.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo, lock_repo
from dvc.repo.reproduce import get_active_graph, plan_repro
from dvc.stage import Stage
from dvc.utils.serialize import LOADERS

from eyas.console import console
from eyas.errors import EyasError
from eyas.moving.fetching import fetch
from eyas.moving.objects import LAST_STAGE, Object, listed, open_repo, profile_outputs, stage_named
from eyas.moving.remote import remote_url
from eyas.moving.transfer import Transfer
from eyas.process import die_with_parent
from eyas.published import STAGE, store_path
from eyas.stage import hold_lock


def repro(profiles: list[str]) -> None:
    """Bring ``report@<profile>`` of each profile up to date.

    One at a time in a checkout: DVC lets go of its lock while a stage runs, and a stage that has ended fails if another DVC has it.

    Raises:
        EyasError: another one is at work here; a stage failed; DVC cannot read the pipeline; a remote is set, is needed and does
            not answer.
    """
    lock = hold_lock(Path(".work/repro.lock"), "`make repro` of this checkout")
    try:
        _repro(profiles)
    finally:
        os.close(lock)


def _repro(profiles: list[str]) -> None:
    repo = open_repo()
    remote = remote_url(repo) is not None
    with _planning(repo):
        locked = [thing for profile in profiles for thing in _locked(repo, profile)]
        absent = [thing for thing in locked if not (Path(repo.root_dir) / thing.path).exists()]
        # outputs that are in no cache stay away as long as nothing needs them; those that are come back by a link
        lean = remote and any(not _is_cached(repo, thing) for thing in absent)
        due = _first_due(repo, [f"{LAST_STAGE}@{profile}" for profile in profiles], lean)
    if due is None:
        console.print("nothing to run: all is as dvc.lock says")
        if absent:
            console.print(f"outputs that are not here: {len(absent)}; `make pull PROFILE=<name>` brings them")
        return
    if remote:
        _check_remote(repo, profiles)
    options = [*(["--pull"] if remote else []), *(["--allow-missing"] if lean else [])]
    if lean:
        for profile in profiles:
            _bring_store(repo, profile, options)
    repo.close()
    _run_dvc(["repro", *options, *(f"{LAST_STAGE}@{profile}" for profile in profiles)])


def _locked(repo: Repo, profile: str) -> list[Object]:
    try:
        return profile_outputs(repo, profile)
    except EyasError:
        return []  # nothing is locked yet; what is wrong beyond that, DVC will say


def _is_cached(repo: Repo, thing: Object) -> bool:
    cache = repo.cache.local
    path = Path(cache.oid_to_path(thing.oid))
    if not path.is_file():
        return False
    return not thing.is_list or all(Path(cache.oid_to_path(f.oid)).is_file() for f in listed(path.read_bytes(), thing))


def _check_remote(repo: Repo, profiles: list[str]) -> None:
    """Fail before anything runs, and not in the middle of it, if the remote does not answer."""
    try:
        Transfer(repo)
    except EyasError as error:
        targets = " ".join(f"{LAST_STAGE}@{profile}" for profile in profiles)
        raise EyasError(f"{error}\nOr compute without it whatever is not here: `dvc repro {targets}`") from error


@contextmanager
def _planning(repo: Repo) -> Iterator[None]:
    """Hold DVC's lock, so that the pipeline is read once and nobody changes it meanwhile."""
    try:
        with lock_repo(repo), _parameters_read_once():
            yield
    except (DvcException, LockError) as error:
        raise EyasError(f"DVC cannot plan the run: {error}") from error


@contextmanager
def _parameters_read_once() -> Iterator[None]:
    """Have DVC parse a file of parameters once in place of once for each stage; it still reads and compares every one."""
    parse, parsed = LOADERS[".yaml"], dict[str, Any]()

    def load(path: str, fs: Any = None, **options: Any) -> Any:
        content = fs.open(path, "rb").read() if fs else Path(path).read_bytes()
        key = f"{path} {options} {hashlib.md5(content, usedforsecurity=False).hexdigest()}"
        if key not in parsed:
            parsed[key] = parse(path, fs=fs, **options)
        return deepcopy(parsed[key])

    LOADERS[".yaml"] = load
    try:
        yield
    finally:
        LOADERS[".yaml"] = parse


def _first_due(repo: Repo, targets: list[str], lean: bool) -> Stage | None:
    """The first stage that DVC would run or restore; those after it depend on what comes of it."""
    graph = get_active_graph(repo.index.graph)
    steps = plan_repro(graph, _named(repo, targets))
    return next((stage for stage in steps if stage.changed(lean, list(graph.successors(stage)))), None)


def _named(repo: Repo, targets: list[str]) -> list[Stage]:
    stages = [stage_named(repo, target) for target in targets]
    if None in stages:
        raise EyasError(
            f"dvc.yaml: no stage {targets[stages.index(None)]}; `active` in params.yaml says which profiles there are"
        )
    return [stage for stage in stages if stage]


def _bring_store(repo: Repo, profile: str, options: list[str]) -> None:
    """Fetch the shards of the last extraction if another one is due, so that only new rows are extracted."""
    extract = f"{STAGE}@{profile}"
    with _planning(repo):
        stores = [thing for thing in _locked(repo, profile) if thing.path == store_path(profile)]
        if not stores or _is_cached(repo, stores[0]) or _first_due(repo, [extract], True) is None:
            return
        graph = get_active_graph(repo.index.graph)
        before = [s.addressing for stage in _named(repo, [extract]) for s in graph.successors(stage)]
        unsure = bool(before) and _first_due(repo, before, True) is not None  # its inputs say whether it is due
    if unsure:
        _run_dvc(["repro", *options, *before])
    with _planning(repo):
        due = _first_due(repo, [extract], True) is not None
    if due:
        fetch(Transfer(repo), profile, only=store_path(profile))


def _run_dvc(arguments: list[str]) -> None:
    """Run DVC as a child that dies with this process; an interrupt is DVC's to handle."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent(parent)

    parent = os.getpid()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen([sys.executable, "-m", "dvc", *arguments], preexec_fn=prepare)
        status = child.wait()
    finally:
        signal.signal(signal.SIGINT, handler)
    if status:
        raise EyasError(f"`dvc {' '.join(arguments)}` failed with status {status}; what went wrong is above")
