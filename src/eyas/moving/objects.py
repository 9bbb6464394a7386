"""What a profile consists of: the objects that ``dvc.lock`` names, and the records of its earlier runs with theirs.

An object is a file that is named by its MD5, in DVC's cache and on a remote alike: ``files/md5/<two digits>/<the rest>``. A
directory is a JSON list of its files, with the suffix ``.dir``. A record says what a stage made of which inputs: ``runs/…``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.stage import Stage
from networkx import descendants  # type: ignore[import-untyped]
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from eyas.errors import EyasError
from eyas.params import load_profile

LAST_STAGE = "report"
RUNS = "runs"


@dataclass(frozen=True, order=True)
class Object:
    """One object: its name in the cache, and the path of the output (or of the file in it) that it holds."""

    oid: str
    path: str

    @property
    def is_list(self) -> bool:
        """Whether it is a directory's list of files."""
        return self.oid.endswith(".dir")


@dataclass(frozen=True)
class Record:
    """One record of a run: its path below a cache or a remote, its bytes, and the objects that it names."""

    path: str
    content: bytes
    objects: tuple[Object, ...]


def open_repo() -> Repo:
    """The DVC repository of this checkout.

    Raises:
        EyasError: there is none here, or its files cannot be read.
    """
    try:
        return Repo()
    except DvcException as error:
        raise EyasError(f"DVC cannot open this checkout: {error}; run Eyas from its root") from error


def profile_outputs(repo: Repo, profile: str) -> list[Object]:
    """The outputs of a profile's stages, and of what they depend on, that ``dvc.lock`` or a ``.dvc`` file has a hash for.

    Raises:
        EyasError: no such profile, one that is not active, one that was never built, or pipeline files that DVC cannot read.
    """
    load_profile(profile)
    try:
        last = stage_named(repo, f"{LAST_STAGE}@{profile}")
        stages = [last, *descendants(repo.index.graph, last)] if last else []
    except DvcException as error:
        raise EyasError(f"DVC cannot read the pipeline: {error}") from error
    if not stages:
        raise EyasError(
            f"params.yaml: `{profile}` is not active, so DVC does not know its stages; `eyas activate {profile}`"
        )
    outs = [out for stage in stages for out in stage.outs if out.use_cache and out.hash_info]
    if not outs:
        raise EyasError(
            f"dvc.lock: nothing of `{profile}` was built yet; `make repro PROFILE={profile}` builds it here, `git pull` brings "
            "the lock of a machine that did"
        )
    return sorted({Object(out.hash_info.value, repo.fs.relpath(out.fs_path, repo.root_dir)) for out in outs})


def stage_named(repo: Repo, name: str) -> Stage | None:
    """A stage of the pipeline as DVC has read it already: its own search reads ``dvc.yaml`` and ``dvc.lock`` again each time."""
    return next((stage for stage in repo.index.stages if stage.addressing == name), None)


def listed(content: bytes, directory: Object) -> list[Object]:
    """The files that a directory's list names.

    Raises:
        EyasError: it is not such a list.
    """
    try:
        entries: Any = json.loads(content)
        return [Object(entry["md5"], f"{directory.path}/{entry['relpath']}") for entry in entries]
    except (ValueError, KeyError, TypeError):
        raise EyasError(f"{directory.path}: its list of files ({directory.oid}) is damaged") from None


def read_record(path: str, content: bytes, profile: str) -> Record | None:
    """The record at ``path``, if it is of this profile and whole."""
    try:
        outs = YAML(typ="safe").load(content)["outs"]
        objects = tuple(Object(out["md5"], out["path"]) for out in outs)
    except (YAMLError, KeyError, TypeError, UnicodeDecodeError):
        return None  # DVC throws such records away when it meets them
    own = all(len(parts := thing.path.split("/")) > 1 and parts[1] == profile for thing in objects)
    return Record(path, content, objects) if objects and own else None


def records(places: Iterable[tuple[str, bytes]], profile: str) -> Iterator[Record]:
    """The profile's records among ``(path, bytes)`` of all."""
    for path, content in places:
        if record := read_record(path, content, profile):
            yield record
