"""Files that are whole or absent: write to a temporary name, fsync, rename; hashes of files and of values."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SYNC_FILE_RANGE_WRITE = 2
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_writeback(descriptor: int) -> None:
    """Have the kernel begin to write what a file has in the page cache, so that the fsync at its end finds little left to do."""
    ctypes.CDLL(None).sync_file_range(
        ctypes.c_int(descriptor), ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
    )


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
            _exchange(temporary, path)
        else:
            os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(first: Path, second: Path) -> None:
    """Swap two directories in one step, so that there is a whole one under either name at every moment."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return
    aside = first.with_name(f"{first.name}.old.tmp")  # a file system that cannot (NFS, for one)
    os.replace(second, aside)
    os.replace(first, second)
    os.replace(aside, first)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def value_hash(value: Any) -> str:
    """SHA-256 of a JSON-able value in canonical form (sorted keys, no spaces), in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
