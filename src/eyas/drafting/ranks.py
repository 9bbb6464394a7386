"""The processes that train one head together, seen from one of them.

`Ranks()` is a process alone; `member` joins a group: NCCL between GPUs, gloo between CPUs and for everything small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from eyas.errors import EyasError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")
_LEAVING = timedelta(seconds=5)
_TIMEOUT = timedelta(minutes=30)  # a checkpoint of a wide head to a slow disk keeps the others waiting


def training_device() -> torch.device:
    """The current GPU if there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """This process among ``world`` of them."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process shows progress and writes."""
        return self.rank == 0

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; the same bits on each."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gathered(self, value: _T) -> list[_T]:
        """Every rank's value, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def of_first(self, value: _T) -> _T:
        """The first rank's value. Waits for all."""
        return self.gathered(value)[0]


@contextmanager
def member(rank: int, world: int, store: Store) -> Iterator[Ranks]:
    """Join the group, on the GPU of the rank's number where there is one; a process that leaves with an error is to end.

    Args:
        rank: this process.
        world: all of them.
        store: where the ranks meet.
    """
    if gpu := torch.cuda.is_available():
        torch.cuda.set_device(rank)
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink hangs in some containers
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on one machine, whose own name may lead nowhere
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=_TIMEOUT
    )
    try:
        yield Ranks(rank, world)
        dist.barrier()
    except EyasError:  # such as a stop, with which all leave
        _leave(rank, world, store)
        raise
    _leave(rank, world, store)
    dist.destroy_process_group()  # after an error NCCL would wait in it for ranks that wait for this one


def _leave(rank: int, world: int, store: Store) -> None:
    """Wait a while for all to be done: a rank that closes its connections cuts off one that still reads their last message."""
    store.set(f"left/{rank}", "")
    with suppress(dist.DistStoreError):
        store.wait([f"left/{other}" for other in range(world)], _LEAVING)
