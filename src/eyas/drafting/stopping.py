"""A stop between two steps: what SIGTERM and an interrupt ask of a training.

Use `Stop` as a context manager around the loop, and ask it where the state is whole.
"""

from __future__ import annotations

import signal
from types import FrameType


class StopAsked(Exception):
    """Leaves the loop between two steps."""


class Stop:
    """While open, SIGTERM and an interrupt ask for a stop after the step; a second one ends the process as ever."""

    def __init__(self, again: bool = True) -> None:
        """Begin.

        Args:
            again: whether a second signal ends the process. A rank of several may get one from the terminal and one from its
                parent, and must not leave the others alone.
        """
        self.signal: str | None = None
        self._again = again

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        if self._again:
            self.__exit__()

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        # a rank holds the signal back until there is somebody to take it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
