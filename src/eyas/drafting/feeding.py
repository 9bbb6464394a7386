"""An epoch's batches on their device, each with its plan, read and copied and planned ahead of the one that is computed.

Takes a plan of the store's rows; gives an iterator over pairs of `Batch` and `Plan`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.drafting.data import Batch, TokenRow, to_batch
from eyas.drafting.planning import Plan, make_plan
from eyas.errors import EyasError
from eyas.store.batches import PackedBatches
from eyas.store.feed import BatchFeed

_DEVICE_BATCHES_AHEAD = 2
Planned = tuple[Batch, Plan]


class _Pinned:
    """Buffers that are registered with CUDA, so that copies from them run beside the CPU; a context manager."""

    def __init__(self) -> None:
        self._buffers: list[NDArray[np.uint8]] = []

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Pin a buffer.

        Raises:
            EyasError: CUDA refuses.
        """
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0))
        if code:
            raise EyasError(
                f"CUDA cannot pin {buffer.nbytes >> 20} MiB of main memory (error {code}): free some, "
                "or lower train.tokens_per_pack"
            )
        self._buffers.append(buffer)

    def __enter__(self) -> _Pinned:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        codes = [int(torch.cuda.cudart().cudaHostUnregister(buffer.ctypes.data)) for buffer in self._buffers]
        self._buffers.clear()
        if any(codes) and kind is None:
            raise EyasError(f"CUDA cannot release pinned memory (error {max(codes)}); look for an earlier CUDA error")


def _copied_ahead(
    feed: BatchFeed, rows_by_key: Mapping[str, Sequence[TokenRow]], device: torch.device, depths: int
) -> Generator[Planned, None, None]:
    """Batches on a GPU; a thread and a stream of their own copy and plan the next ones while the consumer computes."""
    copying = torch.cuda.Stream(device)

    def load() -> tuple[Planned, torch.cuda.Event] | None:
        fed = next(feed, None)
        if fed is None:
            return None
        with torch.cuda.stream(copying):
            batch = to_batch(fed, rows_by_key, device)
            planned = batch, make_plan(batch, depths)
            done = copying.record_event()
        done.synchronize()  # the next call lets the feed write over the buffer
        return planned, done

    # a new thread's device is the first GPU, where it would take memory for every rank
    pool = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))
    try:
        ahead = deque(pool.submit(load) for _ in range(_DEVICE_BATCHES_AHEAD))
        while (loaded := ahead.popleft().result()) is not None:
            ahead.append(pool.submit(load))
            (batch, plan), done = loaded
            computing = torch.cuda.current_stream(device)
            computing.wait_event(done)
            for tensor in (batch.input_ids_T, batch.aux_TA, batch.final_TH, batch.positions_T, plan.indices):
                tensor.record_stream(computing)  # else a freed batch is written over before it was computed with
            yield batch, plan
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def device_batches(
    batches: PackedBatches,
    rows_by_key: Mapping[str, Sequence[TokenRow]],
    device: torch.device,
    workers: int,
    depths: int,
) -> Iterator[Iterator[Planned]]:
    """Open an epoch: gives an iterator over its batches on the device and their plans, read and copied ahead.

    Args:
        batches: the plan.
        rows_by_key: of the token table, as `by_key` gives them; the plan's rows must be among them.
        device: a GPU, whose copies run beside the computation, or the CPU.
        workers: processes that read the store.
        depths: that batches are planned for.

    Raises:
        EyasError: from the iterator: a damaged row, a reading process that ended, and what `to_batch` raises.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            torch.set_num_threads(1)  # the little work beside a GPU would wait for cores that the readers have
            pinned = stack.enter_context(_Pinned())
            feed = stack.enter_context(BatchFeed(batches, 0, workers, on_buffer=pinned.register))
            yield stack.enter_context(closing(_copied_ahead(feed, rows_by_key, device, depths)))
        else:
            feed = stack.enter_context(BatchFeed(batches, 0, workers))
            on_cpu = (to_batch(fed, rows_by_key, device) for fed in feed)
            yield ((batch, make_plan(batch, depths)) for batch in on_cpu)
