"""Pools whose processes are all there from the first task on, and a killed one that is noticed."""

from __future__ import annotations

import colorsys
import os
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children
from typing import Any

import pytest

from eyas.process import process_pool


def test_all_processes_start_with_the_first_task() -> None:
    before = set(active_children())
    with process_pool(3, os.getpid) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
        assert len(set(active_children()) - before) == 3


@pytest.mark.parametrize(("task", "imported"), [(colorsys.rgb_to_hsv, True), (os.getpid, False)])
def test_what_a_task_needs_is_imported_before_it_comes(task: Callable[..., Any], imported: bool) -> None:
    with process_pool(1, task) as pool:
        assert pool.submit(eval, "'colorsys' in __import__('sys').modules").result() is imported


def test_a_process_that_is_killed_before_it_had_a_task_breaks_the_pool() -> None:
    before = set(active_children())
    with process_pool(2, os.getpid) as pool:
        first = pool.submit(os.getpid).result()
        (idle,) = (child.pid for child in set(active_children()) - before if child.pid != first)
        assert idle is not None
        os.kill(idle, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            for _ in range(1000):
                pool.submit(os.getpid).result()
