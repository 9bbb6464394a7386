"""Stores that DVC keeps in its cache: what earlier runs, other profiles and, after a pull, other machines published.

DVC removes a stage's outputs before it runs the stage, so what an earlier run published is looked up where it still is. The
layout is that of DVC 3: `files/md5/<two digits>/<the rest>`, a directory as a JSON list with the suffix `.dir`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.params import read_yaml

LOCK_FILE = Path("dvc.lock")
STAGE = "extract"


@dataclass(frozen=True)
class CachedStore:
    """One profile's store: where the cache has, or would have, each of its files."""

    profile: str
    files: dict[str, Path]

    @contextmanager
    def view(self, folder: Path) -> Iterator[Path]:
        """A directory under ``folder`` that shows the files that are there by their own names, for as long as it is needed."""
        with tempfile.TemporaryDirectory(prefix=f".{self.profile}-", dir=folder) as name:
            for file, source in self.files.items():
                if source.is_file():
                    (Path(name) / file).symlink_to(source)
            yield Path(name)


def store_path(profile: str) -> str:
    """The store of a profile, from the root of the checkout."""
    return f"data/{profile}/hidden_states"


def cached_stores() -> list[CachedStore]:
    """The stores that ``dvc.lock`` names and whose list of files is in the cache.

    Raises:
        EyasError: ``dvc.lock`` is not YAML (a merge that was not finished, for one), or DVC does not say where its cache is.
    """
    if not LOCK_FILE.exists():
        return []
    lock = read_yaml(LOCK_FILE)
    if not isinstance(lock, dict):
        raise EyasError(f"{LOCK_FILE}: not what DVC writes; a merge that was not finished? `git status` says")
    listed: dict[str, str] = {}
    for name, entry in (lock.get("stages") or {}).items():
        stage, _, profile = name.partition("@")
        for out in entry.get("outs", []) if stage == STAGE else ():
            if out.get("path") == store_path(profile) and str(out.get("md5", "")).endswith(".dir"):
                listed[profile] = out["md5"]
    if not listed:
        return []
    objects = _cache_folder() / "files" / "md5"
    stores = []
    for profile, md5 in listed.items():
        files = _listed_files(objects, md5)
        if files:
            stores.append(CachedStore(profile, files))
    return stores


def _listed_files(objects: Path, md5: str) -> dict[str, Path]:
    try:
        entries: Any = json.loads((objects / md5[:2] / md5[2:]).read_bytes())
        return {entry["relpath"]: objects / entry["md5"][:2] / entry["md5"][2:] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # not pulled, or damaged: then there is nothing to reuse, and DVC itself will say so


def _cache_folder() -> Path:
    result = subprocess.run([sys.executable, "-m", "dvc", "cache", "dir"], capture_output=True, text=True, check=False)
    if result.returncode:
        raise EyasError(f"`dvc cache dir` failed: {result.stderr.strip()}; run Eyas from the root of its checkout")
    return Path(result.stdout.strip())
