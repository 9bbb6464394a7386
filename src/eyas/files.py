"""Files that are whole or absent: write to a temporary name, fsync, rename; hashes of files and of values."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary name beside ``path``; on success fsync it and rename it to ``path``, on failure remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text so that ``path`` holds either its old content or all of the new."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ASCII JSON with sorted keys, refusing NaN and infinities, which DVC's readers cannot parse."""
    write_text_atomic(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=True) + "\n")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Give an empty temporary directory beside ``path``; on success it replaces ``path``, on failure it goes away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for entry in temporary.rglob("*"):
            if entry.is_file():
                fsync_path(entry)
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def value_hash(value: Any) -> str:
    """SHA-256 of a JSON-able value in canonical form (sorted keys, no spaces), in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
