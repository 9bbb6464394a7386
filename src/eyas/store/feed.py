"""The batches of an epoch in order, read ahead by processes of their own into a few shared buffers.

Takes `PackedBatches`; gives a `FedBatch` for each position. No engine and no torch.

Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate, groupby
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.errors import EyasError
from eyas.process import LeanContext, die_with_parent
from eyas.store.batches import Batch, PackedBatches
from eyas.store.format import LiveRow
from eyas.store.reader import OpenShards
from eyas.store.shards import Hidden, Ids


@dataclass(frozen=True)
class FedBatch:
    """A batch's rows end to end; the arrays are valid until the feed is asked for the next batch."""

    batch: Batch
    hidden_TLH: Hidden
    input_ids: Ids
    lengths: list[int]


@dataclass(frozen=True)
class _Layout:
    """How a buffer holds the states of ``tokens`` tokens, and behind them the ids."""

    tokens: int
    layers: int
    hidden_size: int

    @property
    def states_bytes(self) -> int:
        return -(-2 * self.tokens * self.layers * self.hidden_size // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def bytes(self) -> int:
        return self.states_bytes + 4 * self.tokens

    def map(self, file: FileIO) -> _Buffer:
        # the arrays keep the mapping: whoever still holds one after the end reads old bytes, not freed memory
        memory = mmap.mmap(file.fileno(), self.bytes)
        hidden_TLH = np.frombuffer(memory, "<u2", self.tokens * self.layers * self.hidden_size)
        return _Buffer(
            np.frombuffer(memory, np.uint8),
            hidden_TLH.reshape(self.tokens, self.layers, self.hidden_size),
            np.frombuffer(memory, "<i4", self.tokens, self.states_bytes),
        )


@dataclass(frozen=True)
class _Buffer:
    whole: NDArray[np.uint8]
    hidden_TLH: Hidden
    input_ids: Ids


@dataclass(frozen=True)
class _Piece:
    """Neighbouring rows of one batch: which buffer they go to, and from which token on."""

    slot: int
    start: int
    rows: tuple[LiveRow, ...]

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


def _cut(slot: int, rows: Sequence[LiveRow], count: int) -> list[_Piece]:
    """At most ``count`` pieces of about as many tokens each: a row goes where its middle falls."""
    ends = list(accumulate(row.tokens for row in rows))
    placed = [
        (end - row.tokens, (2 * end - row.tokens) * count // (2 * ends[-1]), row)
        for end, row in zip(ends, rows, strict=True)
    ]
    groups = [list(group) for _, group in groupby(placed, key=lambda item: item[1])]
    return [_Piece(slot, group[0][0], tuple(row for _, _, row in group)) for group in groups]


def _read(shards: OpenShards, buffer: _Buffer, piece: _Piece) -> EyasError | None:
    start = piece.start
    for row in piece.rows:
        try:
            start += shards.read_into(row, buffer.hidden_TLH[start:], buffer.input_ids[start:])
        except EyasError as error:
            return error
        except Exception as error:
            path = shards.directory / shards.records[row.shard].name
            return EyasError(f"{path}, row {row.key}: cannot be read: {type(error).__name__}: {error}")
    return None


def _prefetch(shards: OpenShards, piece: _Piece) -> None:
    """Let the disk begin with a piece; what is wrong with it, `_read` says when its turn has come."""
    with suppress(EyasError, OSError):
        for row in piece.rows:
            shards.find(row).prefetch(row.row)


def _pieces(connection: Connection, shards: OpenShards) -> Iterator[_Piece]:
    """The pieces that the feed gives; before one is read, the disk has begun with all that wait behind it."""
    waiting: deque[_Piece] = deque()
    while True:
        while not waiting or connection.poll():
            waiting.append(connection.recv())
            _prefetch(shards, waiting[-1])
        yield waiting.popleft()


def _serve(connection: Connection, parent: int, shards: OpenShards, layout: _Layout, paths: Sequence[str]) -> None:
    """A reading process: piece after piece, until the feed closes the connection."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the consumer, which then closes the feed
    buffers = []
    for path in paths:
        with FileIO(path, "r+") as file:
            buffers.append(layout.map(file))
    with suppress(EOFError, ConnectionError):
        for piece in _pieces(connection, shards):
            connection.send(_read(shards, buffers[piece.slot], piece))


class _Reader:
    """A reading process, seen from the consumer."""

    def __init__(self, *arguments: Any) -> None:
        context = LeanContext()
        self.given = 0
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, os.getpid(), *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, piece: _Piece) -> None:
        self.given += piece.tokens
        with suppress(ConnectionError):  # `finish` says that the process has ended
            self._connection.send(piece)

    def finish(self) -> None:
        """Wait for the piece that was given first of those not yet finished."""
        try:
            error = self._connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(timeout=5)
            raise EyasError(
                f"a process that reads the store ended (exit status {self.process.exitcode}; -9 is a kill, often for "
                "lack of memory); free some, or lower `store_workers` in machine.yaml, and run again"
            ) from None
        if error is not None:
            raise error

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._connection.close()


class BatchFeed:
    """Iterator and context manager over an epoch's batches, read ahead in parallel.

    Memory is bounded by ``ahead`` + 1 buffers of `PackedBatches.capacity` tokens, whatever the number of processes; they
    belong to no file system, so that a kill leaves nothing behind. ``waited_s`` counts the seconds that the consumer waited.
    """

    def __init__(
        self,
        batches: PackedBatches,
        start: int = 0,
        workers: int = 1,
        ahead: int = 2,
        on_buffer: Callable[[NDArray[np.uint8]], None] | None = None,
    ) -> None:
        """Start the processes and let them read the first batches.

        Args:
            batches: the plan of the epoch.
            start: the position of the first batch that is given.
            workers: reading processes. They end with the thread that makes the feed.
            ahead: batches that are read while the consumer has one.
            on_buffer: called once for each whole buffer, uint8; to pin it, say.

        Raises:
            EyasError: ``start`` is no position, or a number below 1.
        """
        if min(workers, ahead) < 1 or not 0 <= start <= len(batches):
            raise EyasError(
                f"a feed of {len(batches)} batches from {start} on, with {workers} processes and {ahead} batches ahead: "
                "the position is out of range, or a number is below 1"
            )
        self.waited_s = 0.0
        self._batches, self._start, self._position = batches, start, start
        spec = batches.reader.spec
        layout = _Layout(batches.capacity, len(spec.layers), spec.hidden_size)
        self._files: list[FileIO] = []
        self._readers: list[_Reader] = []
        self._busy: list[list[_Reader]] = [[] for _ in range(ahead + 1)]
        try:
            for _ in range(ahead + 1):
                self._files.append(FileIO(os.memfd_create("eyas-batches"), "r+"))
                self._files[-1].truncate(layout.bytes)
            paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files]
            for _ in range(workers):
                self._readers.append(_Reader(batches.reader.shards, layout, paths))
            self._buffers = [layout.map(file) for file in self._files]
            for position in range(start, start + ahead + 1):
                self._give(position)
            if on_buffer is not None:
                for buffer in self._buffers:
                    on_buffer(buffer.whole)
        except BaseException:
            self.close()
            raise

    def _give(self, position: int) -> None:
        """Hand a batch out; the process that was given the fewest tokens so far gets the largest piece."""
        if position >= len(self._batches):
            return
        slot = position % len(self._busy)
        rows = [self._batches.reader.row(key) for key in self._batches[position].keys]
        pieces = sorted(_cut(slot, rows, len(self._readers)), key=lambda piece: -piece.tokens)
        self._busy[slot] = sorted(self._readers, key=lambda reader: reader.given)[: len(pieces)]
        for reader, piece in zip(self._busy[slot], pieces, strict=True):
            reader.give(piece)

    def __iter__(self) -> Iterator[FedBatch]:
        return self

    def __next__(self) -> FedBatch:
        """The next batch.

        Raises:
            DamageError: a row of it is damaged; shard, row and dataset are named.
            EyasError: a reading process has ended, the feed is closed.
        """
        if self._position == len(self._batches):
            raise StopIteration
        if not self._readers:
            raise EyasError("the feed is closed")
        began = time.monotonic()
        position, slot = self._position, self._position % len(self._busy)
        try:
            if position > self._start:
                self._give(position + len(self._busy) - 1)
            for reader in self._busy[slot]:
                reader.finish()
        except BaseException:
            self.close()
            raise
        finally:
            self.waited_s += time.monotonic() - began
        self._position += 1
        batch, buffer = self._batches[position], self._buffers[slot]
        lengths = [self._batches.reader.length(key) for key in batch.keys]
        return FedBatch(batch, buffer.hidden_TLH[: batch.tokens], buffer.input_ids[: batch.tokens], lengths)

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and let go of the buffers."""
        while self._readers:
            self._readers.pop().close()
        while self._files:
            self._files.pop().close()
        self._buffers = []
