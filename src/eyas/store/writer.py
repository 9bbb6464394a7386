"""Rows of a spool into a published store, whose bytes follow from the rows, their order and the shards published before."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from eyas.console import Progress
from eyas.errors import EyasError
from eyas.files import atomic_directory
from eyas.process import process_pool
from eyas.store.format import LiveRow, Manifest, StoreSpec, shard_name
from eyas.store.shards import link_shard, write_shard
from eyas.store.spool import RowSpool

_POLL_SECONDS = 0.05
_LOST_WORKER = (
    "a process that writes shards was ended from outside (too little memory?); recorded rows are kept, run again to go on; "
    "`store_workers` in machine.yaml sets how many there are"
)


@dataclass(frozen=True)
class PlannedShard:
    """Rows that make one shard."""

    keys: tuple[str, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all its rows."""
        return sum(self.lengths)


def plan_shards(spool: RowSpool, spec: StoreSpec, lengths: Mapping[str, int]) -> list[PlannedShard]:
    """Shards for the rows that no published shard has.

    The plan depends on keys, lengths and published shards alone, so that a rerun after a kill plans the same shards.

    Args:
        spool: knows the published shards.
        spec: of the store; its codec and shard size count.
        lengths: tokens by row key, in the order of the store.
    """
    published = [spool.sealed()[name] for name in spool.published()]
    covered = {key for shard in published if shard.record.codec == spec.codec for key in shard.keys}
    limit = (spec.shard_mib << 20) // spec.row_bytes
    planned: list[PlannedShard] = []
    chosen: dict[str, int] = {}
    tokens = 0
    for key, length in lengths.items():
        if key in covered:
            continue
        if chosen and tokens + length > limit:
            planned.append(PlannedShard(tuple(chosen), tuple(chosen.values())))
            chosen, tokens = {}, 0
        chosen[key] = length
        tokens += length
    if chosen:
        planned.append(PlannedShard(tuple(chosen), tuple(chosen.values())))
    return planned


def _build(spool: RowSpool, spec: StoreSpec, planned: PlannedShard) -> int:
    """Write one planned shard unless it is there; then its loose rows are not needed any more. Gives its tokens."""
    path = spool.shards / shard_name(spec.codec, planned.keys)
    if not path.exists():
        write_shard(path, spec, planned.keys, planned.lengths, spool.stored)
    spool.forget(planned.keys)
    return planned.tokens


class Sealer:
    """While rows still arrive: writes the shards whose rows are all here, in processes, and frees their loose rows.

    So loose rows seldom reach the disk, which then takes each state once, in the codec's size. Use it as a context manager;
    leaving it waits for the shards that are being written.
    """

    def __init__(self, spool: RowSpool, spec: StoreSpec, lengths: Mapping[str, int], workers: int) -> None:
        """Plan the shards.

        Args:
            spool: where rows arrive, from this process or others.
            spec: of the store.
            lengths: tokens by row key, in the order that `publish` will be given.
            workers: processes, and shards that are written at once.
        """
        self._spool, self._spec, self._lengths, self._workers = spool, spec, lengths, workers
        self._planned = plan_shards(spool, spec, lengths)
        self._stop = threading.Event()
        self._running: set[Future[int]] = set()
        self._error: BaseException | None = None
        # a thread of its own: the kernel ends the pool's processes when the thread that started them ends
        self._thread = threading.Thread(target=self._run, name="eyas-sealer", daemon=True)

    def __enter__(self) -> Sealer:
        if self._planned:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._planned:
            self._thread.join()
        if kind is None:
            self._raise()

    def wait_for_room(self) -> None:
        """Wait while more loose rows are here than the shards that are written at once can take.

        Raises:
            EyasError: a shard could not be written.
            OSError: likewise, as the disk is full.
        """
        limit = (self._workers + 1) * (self._spec.shard_mib << 20) // self._spec.row_bytes
        while self._running and sum(self._lengths.get(key, 0) for key in self._spool.loose()) > limit:
            wait(self._running.copy(), timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with process_pool(min(self._workers, len(self._planned)), _build) as pool:
                pool.submit(os.getpid)  # the processes start with the first task: let them start now
                for planned in self._planned:
                    if not self._arrived(planned):
                        break
                    while len(self._running) >= self._workers:
                        self._collect()
                    self._running.add(pool.submit(_build, self._spool, self._spec, planned))
                while self._running:
                    self._collect()
        except BrokenProcessPool:
            self._error = EyasError(_LOST_WORKER)
        except BaseException as error:
            self._error = error
        finally:
            self._running.clear()

    def _collect(self) -> None:
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        self._running -= done
        for future in done:
            future.result()

    def _arrived(self, planned: PlannedShard) -> bool:
        """Wait for a shard's rows; False when recording ends before they are all here."""
        for key in planned.keys:
            while not self._spool.arrived(key):
                if self._stop.is_set() and not self._spool.arrived(key):
                    return False
                self._stop.wait(_POLL_SECONDS)
                self._collect_finished()
        return True

    def _collect_finished(self) -> None:
        for future in [future for future in self._running if future.done()]:
            self._running.discard(future)
            future.result()


def publish(spool: RowSpool, out: Path, spec: StoreSpec, keys: Sequence[str], workers: int = 1) -> Manifest:
    """Put the store with the rows ``keys``, in this order, in place at ``out``.

    Shards published before keep their names and bytes (`RowSpool.adopt` takes over another store's); rows that they
    lack go into new shards. Rows not in ``keys`` stay in their shards and are not live. Safe to run again after a kill.

    Args:
        spool: the rows.
        out: the store's directory; replaced as a whole.
        spec: what the store holds; ``codec`` and ``shard_mib`` hold for new shards.
        keys: the live rows in order; a key given twice counts once.
        workers: processes that write shards.

    Raises:
        EyasError: a row that is nowhere, no rows at all.
    """
    if not keys:
        raise EyasError(f"{out}: no rows to publish")
    lengths: dict[str, int] = {}
    for key in keys:
        length = spool.length(key)
        if length is None:
            raise EyasError(f"row {key} is neither in {spool.directory} nor in a shard; run the extraction again")
        lengths[key] = length
    planned = plan_shards(spool, spec, lengths)
    names = [shard_name(spec.codec, shard.keys) for shard in planned]
    # most often a `Sealer` has written all of them, and no process need start
    left = [shard for name, shard in zip(names, planned, strict=True) if not (spool.shards / name).exists()]
    with Progress("writing shards", sum(shard.tokens for shard in left), "tokens") as progress:
        if len(left) < 2:
            for shard in left:
                progress.advance(_build(spool, spec, shard))
        else:
            try:
                with process_pool(min(workers, len(left)), _build) as pool:
                    for future in [pool.submit(_build, spool, spec, shard) for shard in left]:
                        progress.advance(future.result())
            except BrokenProcessPool:
                raise EyasError(_LOST_WORKER) from None
    manifest = _manifest(spool, spec, lengths, names)
    for leftover in out.parent.glob(f".{out.name}.*.tmp"):
        shutil.rmtree(leftover)
    with atomic_directory(out) as directory:
        for record in manifest.shards:
            link_shard(spool.shards / record.name, directory / record.name)
        manifest.write(directory)
    spool.mark_published([record.name for record in manifest.shards])
    spool.forget([row.key for row in manifest.rows])
    # what a kill left behind, and shards of a plan that an earlier, interrupted run had for other rows
    spool.discard(sorted(set(spool.sealed()) - set(spool.published())))
    for leftover in [*spool.directory.glob(".*.tmp"), *spool.shards.glob(".*.tmp")]:
        leftover.unlink()
    return manifest


def _manifest(spool: RowSpool, spec: StoreSpec, lengths: Mapping[str, int], new: Sequence[str]) -> Manifest:
    """Choose shards for the live rows, those with the largest live share first, and list both."""
    sealed = spool.sealed()

    def dead_share(name: str) -> float:
        shard = sealed[name]
        alive = sum(length for key, length in zip(shard.keys, shard.lengths, strict=True) if key in lengths)
        return 1 - alive / shard.record.tokens

    usable = [name for name in {*spool.published(), *new} if sealed[name].record.codec == spec.codec]
    places: dict[str, tuple[str, int, int]] = {}
    for name in sorted(usable, key=lambda name: (dead_share(name), name)):
        for row, (key, length) in enumerate(zip(sealed[name].keys, sealed[name].lengths, strict=True)):
            if key in lengths:
                places.setdefault(key, (name, row, length))
    names = sorted({name for name, _, _ in places.values()})
    number = {name: index for index, name in enumerate(names)}
    rows = []
    for key in lengths:
        name, row, length = places[key]
        rows.append(LiveRow(key, number[name], row, length))
    return Manifest(spec, tuple(sealed[name].record for name in names), tuple(rows))
