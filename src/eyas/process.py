"""Processes that share the work and end when the one that started them ends; neither DVC nor a killed stage ends its children."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when the thread that started it ends.

    Args:
        parent: the process that must still be there, for a child that may have lost it before this call.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


class _LeanProcess(SpawnProcess):
    """A spawned process that does not import the parent's main module again: a stage's imports take seconds."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


class LeanContext(SpawnContext):
    """multiprocessing's `spawn` with processes that start in half a second; their tasks must be importable by name."""

    Process = _LeanProcess


def _begin(parent: int, task: Callable[..., Any]) -> None:
    """Start a pool's process; to take over ``task`` it has imported the task's module."""
    die_with_parent(parent)


def process_pool(workers: int, task: Callable[..., Any]) -> ProcessPoolExecutor:
    """A pool of processes; the thread that submits first must live as long as the pool.

    All of them start with the first task, and import as they start what it needs, so that those that wait for work are ready for
    it. Left to itself the executor starts one a task, from the thread that submits, while another thread watches those that it
    knew of before: a process killed at that moment is not missed, and its task never ends.

    Args:
        workers: processes.
        task: the function that they are to call, of an importable module.
    """
    pool = ProcessPoolExecutor(workers, mp_context=LeanContext(), initializer=_begin, initargs=(os.getpid(), task))
    pool._safe_to_dynamically_spawn_children = False  # type: ignore[attr-defined]  # no public switch in Python 3.11 and 3.12
    return pool
