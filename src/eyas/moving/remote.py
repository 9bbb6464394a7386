"""The DVC remote of this checkout: setting it, opening it, and saying clearly what is wrong with it."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from dvc.config import RemoteNotFoundError
from dvc.data_cloud import Remote
from dvc.exceptions import DvcException
from dvc.repo import Repo

from eyas.errors import EyasError

NAME = "store"
Kind = Literal["folder", "ssh", "s3"]
# Transfers at a time. Each one that is cut short is sent anew, so a few at a time lose less of files of gigabytes.
_JOBS: dict[Kind, int] = {"folder": 4, "ssh": 4, "s3": 8}
_GUIDE = "docs/moving-machines.md"
_UNREACHED = f"does the machine answer, and does it know you? ({_GUIDE} says where keys go)"


def remote_kind(url: str) -> Kind:
    """What kind of remote a URL names.

    Raises:
        EyasError: a kind that is not supported, or a URL that holds a password.
    """
    if "://" not in url:
        return "folder"
    parts = urlsplit(url)
    if parts.password is not None:
        raise EyasError(
            f"the URL holds a password, which would end in logs and process lists; {_GUIDE} says where it goes"
        )
    kinds: dict[str, Kind] = {"ssh": "ssh", "s3": "s3"}
    if parts.scheme not in kinds or not parts.netloc:
        raise EyasError(f"{url}: not a remote that Eyas knows; use /a/folder, ssh://host/path or s3://bucket/path")
    return kinds[parts.scheme]


def remote_url(repo: Repo) -> str | None:
    """The URL of the default remote, if one is set."""
    name = repo.config["core"].get("remote")
    url: str | None = repo.config["remote"].get(name, {}).get("url") if name else None
    return url


def jobs(repo: Repo) -> int:
    """How many transfers the remote takes at a time."""
    setting = repo.config["remote"][repo.config["core"]["remote"]].get("jobs")
    return int(setting or _JOBS[remote_kind(remote_url(repo) or "")])


def open_remote(repo: Repo) -> Remote:
    """The default remote; nothing is asked of it yet.

    Raises:
        EyasError: none is set, or its settings are wrong.
    """
    if remote_url(repo) is None:
        raise EyasError(f"no remote is set; `make remote URL=…` sets one ({_GUIDE})")
    try:
        return repo.cloud.get_remote()
    except (DvcException, RemoteNotFoundError) as error:
        raise EyasError(f"the remote's settings in .dvc/config.local are wrong: {error}") from error


@contextmanager
def reaching(url: str, advice: str = "what went over is kept: run again to go on") -> Iterator[None]:
    """Turn whatever a remote's library raises into one message that ends with ``advice``."""
    try:
        yield
    except EyasError:
        raise
    except Exception as error:  # each of the libraries has exceptions of its own
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = f"{type(cause).__name__}: {str(cause) or 'no further word'}"
        raise EyasError(f"{url}: the remote failed ({text}); {advice}") from error


def check_reachable(remote: Remote, kind: Kind, url: str) -> None:
    """Look at the top of the remote.

    Raises:
        EyasError: nobody answers, or the folder or bucket is not there.
    """
    top = remote.path if kind != "s3" else remote.path.split("/", 1)[0]
    with reaching(url, _UNREACHED):
        there = remote.fs.exists(top)
    if not there:
        what = "bucket" if kind == "s3" else "folder"
        raise EyasError(
            f"{url}: there is no such {what} (a disk that is not mounted?); `make remote URL={url}` makes it"
        )


def set_remote(repo: Repo, url: str, endpoint: str | None = None, transfers: int | None = None) -> str:
    """Make ``url`` the default remote in ``.dvc/config.local``, once it answers; the folder or bucket is made if need be.

    Other settings of the remote that the user made (a key file, say) stay as long as its kind stays.

    Args:
        repo: the checkout.
        url: a folder, ``ssh://[user@]host[:port]/path`` or ``s3://bucket[/path]``.
        endpoint: URL of an S3-compatible server; Amazon's without it.
        transfers: how many at a time; 4 for a folder and SSH, 8 for S3 without it.

    Raises:
        EyasError: a URL of no known kind, a remote that does not answer, a folder or bucket that cannot be made.
    """
    kind = remote_kind(url)
    if endpoint and kind != "s3":
        raise EyasError(f"{url}: ENDPOINT is for S3 only")
    if kind == "folder":
        url = str(_folder(repo, Path(url)))
    before = repo.config.load_one("local").get("remote", {}).get(NAME, {})
    kept = before if before.get("url") and remote_kind(before["url"]) == kind else {}
    settings: dict[str, Any] = {**kept, "url": url, "verify": True, "jobs": transfers or _JOBS[kind]}
    if kind == "s3":
        settings.pop("endpointurl", None)
        settings |= {"endpointurl": endpoint} if endpoint else {}
        settings |= {"connect_timeout": 10}
    repo.config["remote"][NAME] = settings
    repo.config["core"]["remote"] = NAME
    _make(open_remote(repo), kind, url)
    with repo.config.edit("local") as config:
        config.setdefault("remote", {})[NAME] = settings
        config.setdefault("core", {})["remote"] = NAME
    Path(repo.config.files["local"]).chmod(0o600)  # users may keep keys in it
    return url


def _folder(repo: Repo, path: Path) -> Path:
    path = path.expanduser().resolve()
    if path.is_relative_to(Path(repo.root_dir).resolve()):
        raise EyasError(f"{path}: inside the checkout, where it would go with it; choose another disk or machine")
    if not path.parent.is_dir():  # never fill the disk under a mount point
        raise EyasError(f"{path}: {path.parent} is not there (a disk that is not mounted?)")
    return path


def _make(remote: Remote, kind: Kind, url: str) -> None:
    with reaching(url, _UNREACHED):
        if kind == "s3":
            bucket = remote.path.split("/", 1)[0]
            if not remote.fs.exists(bucket):
                remote.fs.fs.mkdir(bucket)
                remote.fs.fs.invalidate_cache()
                if not remote.fs.exists(bucket):
                    raise EyasError(f"{url}: the server did not make the bucket `{bucket}`; make it with its own tools")
            return
        if kind == "ssh":
            parent = posixpath.dirname(remote.path.rstrip("/")) or "/"
            if not remote.fs.exists(parent):
                raise EyasError(f"{url}: {parent} is not there on that machine (a disk that is not mounted?)")
        remote.fs.makedirs(remote.path, exist_ok=True)
    if kind == "folder" and not os.access(remote.path, os.W_OK | os.X_OK):
        raise EyasError(f"{url}: this user may not write there")
