"""Checkpoints of one training in its scratch folder: whole or absent, checked when read, the last few kept.

Takes tensors and a JSON-able value by name; gives the newest that is undamaged. Names sort as the training goes on. A
checkpoint is a folder of ``tensors.safetensors``, ``state.json`` and ``checksums.json``, the SHA-256 of the other two.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas.console import console
from eyas.errors import EyasError
from eyas.files import atomic_directory, file_sha256, write_json_atomic

_TENSORS, _STATE, _CHECKSUMS = "tensors.safetensors", "state.json", "checksums.json"
_WORK_BY_WRITING = 20.0  # the heads of wide targets take many seconds to write; training keeps 95 % of the time


class Checkpoints:
    """The checkpoints of one training. One process has them at a time (the stage's lock sees to that)."""

    def __init__(
        self, work: Path, identity: str, kept: int = 2, minutes: float = 5.0, steps: int | None = None
    ) -> None:
        """Open ``work/<identity>``, and remove what else is in ``work``: trainings that are no longer asked for.

        Args:
            work: scratch of the stage; owned by nobody else.
            identity: of the training, a hash.
            kept: the newest that are kept; one to fall back to where the newest is damaged.
            minutes: that a kill costs at most, as long as writing is quick.
            steps: that a kill costs at most, however long writing takes; None for no such limit.
        """
        self._kept, self._seconds, self._steps, self._taken = kept, 60.0 * minutes, steps, 0
        self.folder = work / identity
        others = [path for path in work.iterdir() if path != self.folder] if work.is_dir() else []
        if others:
            console.print(
                "parameters, data, versions or code have changed: checkpoints of another training are removed"
            )
        half_written = list(self.folder.glob(".*.tmp"))
        for path in others + half_written:
            shutil.rmtree(path)
        self._written, self._took = time.monotonic(), 0.0

    def due(self) -> bool:
        """Whether it is time for another one; ask once a step."""
        self._taken += 1
        if self._steps is not None and self._taken >= self._steps:
            return True
        return time.monotonic() - self._written >= max(self._seconds, _WORK_BY_WRITING * self._took)

    def save(self, name: str, tensors: dict[str, torch.Tensor], state: Any) -> None:
        """Write a checkpoint, then remove the oldest; nothing is done where one of that name is there.

        Raises:
            EyasError: the tensors cannot be written.
            OSError: the rest cannot be written, such as to a full disk.
        """
        if (self.folder / name).exists():
            return
        began = time.monotonic()
        with atomic_directory(self.folder / name) as folder:
            try:
                save_file(tensors, folder / _TENSORS)
            except SafetensorError as error:
                raise EyasError(
                    f"{self.folder}: no checkpoint could be written ({error}); make room and run again, "
                    "training goes on from the one before"
                ) from None
            (folder / _STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
            write_json_atomic(folder / _CHECKSUMS, {file: file_sha256(folder / file) for file in (_TENSORS, _STATE)})
        for path in self._all()[: -self._kept]:
            shutil.rmtree(path)
        self._written, self._taken = time.monotonic(), 0
        self._took = self._written - began

    def newest(self) -> Path | None:
        """The newest undamaged checkpoint, for `load_checkpoint`; None without any.

        A damaged one is named on the console and removed.
        """
        for path in reversed(self._all()):
            fault = _fault(path)
            if fault is None:
                return path
            console.print(f"{escape(str(path))}: a damaged checkpoint is passed over and removed: {escape(fault)}")
            shutil.rmtree(path)
        return None

    def _all(self) -> list[Path]:
        """From the oldest to the newest."""
        return sorted(path for path in self.folder.glob("[!.]*"))


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors (on the CPU, mapped from the file) and state of an undamaged checkpoint."""
    return load_file(path / _TENSORS), json.loads((path / _STATE).read_bytes())


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint."""
    try:
        checksums = json.loads((path / _CHECKSUMS).read_bytes())
        bad = [file for file in (_TENSORS, _STATE) if file_sha256(path / file) != checksums[file]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{', '.join(bad)}: other bytes than were written" if bad else None
