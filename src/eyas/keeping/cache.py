"""DVC's cache as files: which objects it holds, what a listing names, and what the commits of this checkout name.

An object is a file ``files/md5/<2 hex>/<30 hex>`` whose name is the MD5 of its bytes; one whose name ends in ``.dir`` is the
listing (JSON) of a directory. ``runs`` has one small YAML file for each finished run of a stage (DVC's run cache).
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from eyas.errors import EyasError

LOCK_FILE = Path("dvc.lock")
# read as text: a lock with conflict markers still counts, and digits alone stand in quotes
_NAMED = re.compile(r"""\bmd5:\s*['"]?([0-9a-f]{32}(?:\.dir)?)\b""")
_OBJECT = re.compile(r"[0-9a-f]{2}/[0-9a-f]{30}(\.dir)?")


@dataclass(frozen=True)
class Cache:
    """The cache folder of a checkout."""

    root: Path

    @property
    def files(self) -> Path:
        """Where the objects are."""
        return self.root / "files" / "md5"

    @property
    def runs(self) -> Path:
        """Where the records of finished runs are."""
        return self.root / "runs"

    @property
    def quarantine(self) -> Path:
        """Where damaged objects go; DVC does not look there."""
        return self.root / "quarantine"

    def path(self, name: str) -> Path:
        """The file of an object, there or not."""
        return self.files / name[:2] / name[2:]

    def objects(self) -> list[str]:
        """Names of all objects, sorted."""
        return sorted(name_of(path) for path in self.files.glob("??/*") if _is_object(path))

    def leftovers(self) -> list[Path]:
        """Files among the objects that are none: transfers that were cut short."""
        return sorted(path for path in self.files.glob("??/*") if path.is_file() and not _is_object(path))

    def listed(self, name: str) -> list[str]:
        """Objects that a listing names.

        Raises:
            ValueError: it is no listing.
        """
        content = json.loads(self.path(name).read_bytes())
        if not isinstance(content, list) or not all(
            isinstance(e, dict) and isinstance(e.get("md5"), str) for e in content
        ):
            raise ValueError("not a listing")
        return [entry["md5"] for entry in content]


def _is_object(path: Path) -> bool:
    return _OBJECT.fullmatch(f"{path.parent.name}/{path.name}") is not None


def name_of(path: Path) -> str:
    """An object's name from its file."""
    return path.parent.name + path.name


def file_md5(path: Path) -> str:
    """MD5 of a file's bytes, in hex: the name that DVC gives it.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def open_cache() -> Cache:
    """The cache of the checkout in the current directory.

    Raises:
        EyasError: DVC's configuration cannot be read, or this is no checkout.
    """
    from dvc.config import Config, ConfigError

    if not Path(".dvc").is_dir():
        raise EyasError("no .dvc here: run this from the root of a checkout")
    try:
        folder = Config.from_cwd()["cache"].get("dir")
    except ConfigError as error:
        raise EyasError(f".dvc/config: {error}") from error
    return Cache(Path(folder or ".dvc/cache").resolve())


def git(*arguments: str, given: str | None = None) -> str:
    """Standard output of a Git command.

    Raises:
        EyasError: it failed.
    """
    result = subprocess.run(
        ["git", *arguments], input=given, capture_output=True, text=True, errors="replace", check=False
    )
    if result.returncode != 0:
        raise EyasError(f"git {arguments[0]}: {result.stderr.strip() or f'exit status {result.returncode}'}")
    return result.stdout


def named_in(text: str) -> set[str]:
    """Objects that a lock, a ``.dvc`` file or a record of a run names."""
    return set(_NAMED.findall(text))


def named_by_head() -> set[str]:
    """Objects that the locks of HEAD and of the checkout name."""
    texts = [path.read_text(errors="replace") for path in (LOCK_FILE, *Path().glob("data/**/*.dvc")) if path.is_file()]
    if git("ls-tree", "HEAD", "--", str(LOCK_FILE)):
        texts.append(git("show", f"HEAD:{LOCK_FILE}"))
    return set[str]().union(*map(named_in, texts))


def named_by_history() -> set[str]:
    """Objects that any commit names which a branch, tag, stash or reflog leads to, or the index.

    Raises:
        EyasError: the clone has only a part of the history.
    """
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        raise EyasError(
            "this clone has only the newest commits, so nobody can say what the others name: `git fetch --unshallow` first"
        )
    listed = git(
        *("rev-list", "--objects", "--full-history", "--all", "--reflog", "--indexed-objects"),
        *("--", ":(glob)**/dvc.lock", ":(glob)**/?*.dvc"),
    )
    blobs = {line.split(" ", 1)[0] for line in listed.splitlines() if line.endswith(("dvc.lock", ".dvc"))}
    return (
        named_in(git("cat-file", "--batch", given="".join(f"{blob}\n" for blob in sorted(blobs)))) if blobs else set()
    )


def read_lock(text: str, where: str) -> dict[str, Any]:
    """The stages of a lock, by name.

    Raises:
        EyasError: it is no lock, for one because of conflict markers.
    """
    try:
        content = YAML(typ="safe").load(text) or {}
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise EyasError(
            f"{where}{line}: not a lock that DVC wrote; `git restore {LOCK_FILE}` gives back the committed one"
        ) from error
    stages = content.get("stages", {}) if isinstance(content, dict) else None
    if not isinstance(stages, dict) or not all(isinstance(entry, dict) for entry in stages.values()):
        raise EyasError(f"{where}: no `stages` in it; `git restore {LOCK_FILE}` gives back the committed one")
    return stages


def locked_outs(stages: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Stage, path and object of each output that a lock records."""
    for stage, entry in stages.items():
        for out in entry.get("outs", []):
            if "md5" in out:
                yield stage, out["path"], str(out["md5"])
