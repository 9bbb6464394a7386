"""What the user sees: one console, and a progress bar that also reads well in a log file.

Engines pour hundreds of lines over standard output; `quiet_engines` sends file descriptors 1 and 2 to a log
file and keeps the user's terminal for our own console.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_LOG_LINE_SECONDS = 15.0
console = Console(stderr=True, highlight=False)


def quiet_engines(log: Path) -> None:
    """Send everything that is printed from now on to ``log``, except what goes through `console`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    console.file = os.fdopen(os.dup(2), "w", buffering=1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class Progress:
    """A progress bar on a terminal; elsewhere a line every 15 seconds. Use it as a context manager."""

    def __init__(self, description: str, total: int, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = 0
        self._started = self._last = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        if console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self.unit),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._bar.start()
            self._bar.add_task(self.description, total=self.total)
        return self

    def advance(self, count: int = 1) -> None:
        """Report ``count`` more units as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done)
            return
        now = time.monotonic()
        if now - self._last >= _LOG_LINE_SECONDS:
            self._last = now
            self._line(now)

    def _line(self, now: float) -> None:
        rate = self.done / max(now - self._started, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        console.print(
            f"{escape(self.description)}: {self.done}/{self.total} {self.unit}, {rate:,.1f}/s, {left:.0f} s left"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and time.monotonic() - self._started >= 1.0:
            self._line(time.monotonic())
