"""Rows into a published store, so that a kill at any moment costs at most the rows in flight.

Takes rows in any order from any number of processes; gives a store whose bytes follow from the rows, their planned
order and the shards that were published before. Scratch, beside each other::

    rows/<row key>.row      loose rows, written by the engine: the raw bits with a checksum
    shards/shard-*.h5       complete shards: published ones as hard links, and new ones
    shards/published.json   which of them are published; the others are only taken up again under the same plan

Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eyas.console import Progress, console
from eyas.errors import EyasError
from eyas.files import atomic_directory, fsync_path, write_json_atomic
from eyas.store.format import LiveRow, Manifest, ShardRecord, StoreSpec, row_key, shard_name
from eyas.store.shards import (
    DamageError,
    Hidden,
    Ids,
    ShardFile,
    StoredRow,
    checksum,
    link_shard,
    stored_row,
    write_shard,
)

_MAGIC = b"EYASROW1"
_HEADER = struct.Struct("<8sIIIII")  # magic, T, L, H, CRC-32 of the ids, CRC-32 of the states
_SHARDS = "shards"
_PUBLISHED = "published.json"


@dataclass(frozen=True)
class _Sealed:
    """A complete shard of the scratch, by what its index says."""

    record: ShardRecord
    keys: tuple[str, ...]
    lengths: tuple[int, ...]


class RowSpool:
    """Scratch for the rows of one fingerprint: loose rows, and rows in shards that are complete already.

    Complete shards are in ``shards`` beside ``directory``, so two spools must not have the same parent.
    """

    def __init__(self, directory: Path, spec: StoreSpec) -> None:
        self.directory, self.spec = directory, spec
        self.shards = directory.parent / _SHARDS
        self._fingerprint = spec.fingerprint
        self._known: set[str] = set()
        self._sealed: dict[str, _Sealed] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._stamp: int | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.shards.mkdir(exist_ok=True)

    def __getstate__(self) -> dict[str, object]:
        return {"directory": self.directory, "spec": self.spec}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.row"

    def has(self, key: str) -> bool:
        """Whether the row is here, complete and with the right checksum."""
        if key in self._known and self._path(key).exists():
            return True
        if self._loose(key) is not None:
            self._known.add(key)
            return True
        return key in self._sealed_places()

    def write(self, input_ids: Ids, hidden_TLH: Hidden) -> str:
        """Keep one row: ids int32 [T], bf16 bit patterns uint16 [T, L, H]. Gives the row's key.

        Not flushed to the disk: a row that a power failure tears is noticed by its checksum and is absent.

        Raises:
            EyasError: shapes or types that do not fit the store.
        """
        shape = (len(input_ids), len(self.spec.layers), self.spec.hidden_size)
        if hidden_TLH.shape != shape or hidden_TLH.dtype != np.uint16 or not len(input_ids):
            raise EyasError(
                f"a row of {len(input_ids)} ids came with hidden states {hidden_TLH.dtype} {hidden_TLH.shape}; "
                f"expected uint16 {shape} with at least one token"
            )
        ids = np.ascontiguousarray(input_ids, dtype="<i4")
        states = np.ascontiguousarray(hidden_TLH, dtype="<u2")
        key = row_key(self._fingerprint, ids)
        temporary = self.directory / f".{key}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with temporary.open("wb", buffering=0) as stream:
                header = _HEADER.pack(_MAGIC, *shape, checksum(ids), checksum(states))
                _write_all(stream.fileno(), memoryview(header))
                _write_all(stream.fileno(), ids.data.cast("B"))
                _write_all(stream.fileno(), states.data.cast("B"))
            os.replace(temporary, self._path(key))
        finally:
            temporary.unlink(missing_ok=True)
        self._known.add(key)
        return key

    def read(self, key: str) -> tuple[Ids, Hidden]:
        """The row's ids int32 [T] and states uint16 [T, L, H].

        Raises:
            EyasError: no such row, or a damaged one.
        """
        loose = self._loose(key)
        if loose is not None:
            return loose
        name, row = self._place(key)
        with ShardFile(self.shards / name) as shard:
            return shard.read(row)

    def stored(self, key: str) -> StoredRow:
        """The row as a shard of this spool's codec holds it.

        Raises:
            EyasError: no such row, or a damaged one.
        """
        loose = self._loose(key)
        if loose is not None:
            return stored_row(self.spec.codec, *loose)
        name, row = self._place(key)
        with ShardFile(self.shards / name) as shard:
            return shard.read_stored(row)

    def _place(self, key: str) -> tuple[str, int]:
        place = self._sealed_places().get(key)
        if place is None:
            raise EyasError(f"row {key} is not in {self.directory}; run the extraction again")
        return place

    def keys(self) -> list[str]:
        """All rows that are here, loose ones checked, in the order of their keys."""
        loose = {path.name.removesuffix(".row") for path in self.directory.glob("*.row")}
        return sorted({key for key in loose if self.has(key)} | set(self._sealed_places()))

    def length(self, key: str) -> int | None:
        """Tokens of a row that is here, else None."""
        place = self._sealed_places().get(key)
        if place is not None:
            return self._sealed[place[0]].lengths[place[1]]
        try:
            with self._path(key).open("rb") as stream:
                return self._header(stream.read(_HEADER.size))[0]
        except (OSError, ValueError):
            return None

    def forget(self, keys: Sequence[str]) -> None:
        """Remove loose rows."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)
            self._known.discard(key)

    def _header(self, header: bytes) -> tuple[int, int, int]:
        if len(header) < _HEADER.size:
            raise ValueError("short header")
        magic, tokens, layers, hidden, ids_crc, states_crc = _HEADER.unpack(header[: _HEADER.size])
        if magic != _MAGIC or not tokens or (layers, hidden) != (len(self.spec.layers), self.spec.hidden_size):
            raise ValueError("a header of something else")
        return tokens, ids_crc, states_crc

    def _loose(self, key: str) -> tuple[Ids, Hidden] | None:
        """The loose row, or None where there is none or it is not whole."""
        try:
            content = self._path(key).read_bytes()
            tokens, ids_crc, states_crc = self._header(content[: _HEADER.size])
            start = _HEADER.size + 4 * tokens
            if len(content) != start + tokens * self.spec.row_bytes:
                return None
        except (FileNotFoundError, ValueError):
            return None
        ids: Ids = np.frombuffer(content, "<i4", tokens, _HEADER.size)
        states: NDArray[np.uint16] = np.frombuffer(content, "<u2", offset=start)
        if (checksum(ids), checksum(states)) != (ids_crc, states_crc) or row_key(self._fingerprint, ids) != key:
            return None
        return ids, states.reshape(tokens, len(self.spec.layers), self.spec.hidden_size)

    def _sealed_places(self) -> dict[str, tuple[str, int]]:
        """Where rows are in complete shards: key → shard, row number. Looked up again when the folder has changed."""
        stamp = self.shards.stat().st_mtime_ns
        if stamp != self._stamp:
            present = sorted(path.name for path in self.shards.glob("shard-*.h5"))
            self._sealed = {name: self._sealed.get(name) or self._seal_index(name) for name in present}
            self._places = {
                key: (name, row) for name in reversed(present) for row, key in enumerate(self._sealed[name].keys)
            }
            self._stamp = stamp
        return self._places

    def _seal_index(self, name: str) -> _Sealed:
        with ShardFile(self.shards / name) as shard:
            return _Sealed(shard.record(), tuple(shard.keys), tuple(np.diff(shard.offsets).tolist()))

    def refresh(self) -> None:
        """Look at the folder of shards again: a change within one tick of the file system's clock leaves no trace."""
        self._stamp = None

    def sealed(self) -> dict[str, _Sealed]:
        """Complete shards by name."""
        self._sealed_places()
        return self._sealed

    def published(self) -> list[str]:
        """Names of complete shards that are part of a published store."""
        path = self.shards / _PUBLISHED
        names = json.loads(path.read_text()) if path.exists() else []
        return sorted(set(names) & set(self.sealed()))

    def mark_published(self, names: Sequence[str]) -> None:
        """Note that these complete shards are published."""
        before = self.published()
        if set(names) - set(before):
            write_json_atomic(self.shards / _PUBLISHED, sorted(set(before) | set(names)))

    def adopt(self, store: Path) -> int:
        """Take over the shards of a published store (an earlier state, another profile's) by hard link.

        Gives the number of shards. A store of another fingerprint gives none, and the reason is printed.

        Raises:
            EyasError: the store's manifest is damaged. A damaged shard is named and left out.
        """
        manifest = Manifest.read(store)
        reasons = self.spec.differences(manifest.spec)
        if reasons:
            console.print(f"{store}: its hidden states are of no use here: {'; '.join(reasons)}")
            return 0
        published = self.published()
        taken = []
        for record in manifest.shards:
            target = self.shards / record.name
            try:
                ShardFile(store / record.name, record).close()
            except DamageError as error:
                console.print(f"not reused: {error}")
                continue
            if record.name not in published:
                target.unlink(missing_ok=True)
                link_shard(store / record.name, target)
            taken.append(record.name)
        fsync_path(self.shards)
        self.refresh()
        self.mark_published(taken)
        return len(taken)


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


@dataclass(frozen=True)
class _Planned:
    keys: tuple[str, ...]
    lengths: tuple[int, ...]


def _plan(spool: RowSpool, spec: StoreSpec, keys: Sequence[str]) -> Iterator[tuple[_Planned, bool]]:
    """Shards for the rows that no published shard has, in order, and whether the shard is full.

    The plan depends on keys, lengths and published shards alone, so that a rerun after a kill plans the same shards.
    """
    published = [spool.sealed()[name] for name in spool.published()]
    covered = {key for shard in published if shard.record.codec == spec.codec for key in shard.keys}
    limit = spec.shard_mib << 20
    chosen: list[str] = []
    lengths: list[int] = []
    for key in dict.fromkeys(keys):
        if key in covered:
            continue
        length = spool.length(key)
        if length is None:
            raise EyasError(f"row {key} is neither in {spool.directory} nor in a shard; run the extraction again")
        if chosen and (sum(lengths) + length) * spec.row_bytes > limit:
            yield _Planned(tuple(chosen), tuple(lengths)), True
            chosen, lengths = [], []
        chosen.append(key)
        lengths.append(length)
    if chosen:
        yield _Planned(tuple(chosen), tuple(lengths)), False


def _build(spool: RowSpool, spec: StoreSpec, planned: _Planned) -> int:
    """Write one planned shard unless it is there; then its loose rows are not needed any more."""
    path = spool.shards / shard_name(spec.codec, planned.keys)
    if not path.exists():
        write_shard(path, spec, planned.keys, planned.lengths, spool.stored)
        spool.refresh()
    spool.forget(planned.keys)
    return sum(planned.lengths)


def seal_full_shards(spool: RowSpool, spec: StoreSpec, keys: Sequence[str]) -> int:
    """While rows still arrive: write the shards that are full by now, and free their loose rows. Gives their number.

    ``keys`` is the whole plan; only a beginning of it for which all rows are there can be sealed.
    """
    ready = []
    for key in keys:
        if spool.length(key) is None:
            break
        ready.append(key)
    full = [planned for planned, is_full in _plan(spool, spec, ready) if is_full]
    for planned in full:
        _build(spool, spec, planned)
    return len(full)


def publish(
    spool: RowSpool,
    out: Path,
    spec: StoreSpec,
    keys: Sequence[str],
    earlier: Path | None,
    workers: int = 1,
) -> Manifest:
    """Put the store with the rows ``keys``, in this order, in place at ``out``.

    Shards published before keep their names and bytes (``earlier`` may name a store to take them from); rows that they
    lack go into new shards. Rows not in ``keys`` stay in their shards and are not live. Safe to run again after a kill.

    Args:
        spool: the rows.
        out: the store's directory; replaced as a whole.
        spec: what the store holds; ``codec`` and ``shard_mib`` hold for new shards.
        keys: the live rows in order; a key given twice counts once.
        earlier: a published store whose shards are reused, or None.
        workers: processes that write shards.

    Raises:
        EyasError: a row that is nowhere, no rows at all.
    """
    if not keys:
        raise EyasError(f"{out}: no rows to publish")
    if earlier is not None:
        spool.adopt(earlier)
    planned = [shard for shard, _ in _plan(spool, spec, keys)]
    with Progress("writing shards", sum(sum(shard.lengths) for shard in planned), "tokens") as progress:
        if workers == 1 or len(planned) < 2:
            for shard in planned:
                progress.advance(_build(spool, spec, shard))
        else:
            with ProcessPoolExecutor(min(workers, len(planned)), mp_context=get_context("spawn")) as pool:
                for future in [pool.submit(_build, spool, spec, shard) for shard in planned]:
                    progress.advance(future.result())
            spool.refresh()
    manifest = _manifest(spool, spec, keys, [shard_name(spec.codec, shard.keys) for shard in planned])
    for leftover in out.parent.glob(f".{out.name}.*.tmp"):
        shutil.rmtree(leftover)
    with atomic_directory(out) as directory:
        for record in manifest.shards:
            link_shard(spool.shards / record.name, directory / record.name)
        manifest.write(directory)
    spool.mark_published([record.name for record in manifest.shards])
    spool.forget([row.key for row in manifest.rows])
    # what a kill left behind, and shards of a plan that an earlier, interrupted run had for other rows
    superseded = [spool.shards / name for name in set(spool.sealed()) - set(spool.published())]
    for leftover in [*spool.directory.glob(".*.tmp"), *spool.shards.glob(".*.tmp"), *superseded]:
        leftover.unlink()
    spool.refresh()
    return manifest


def _manifest(spool: RowSpool, spec: StoreSpec, keys: Sequence[str], new: Sequence[str]) -> Manifest:
    """Choose shards for the live rows, those with the largest live share first, and list both."""
    live = set(keys)
    sealed = spool.sealed()

    def dead_share(name: str) -> float:
        shard = sealed[name]
        alive = sum(length for key, length in zip(shard.keys, shard.lengths, strict=True) if key in live)
        return 1 - alive / shard.record.tokens

    usable = [name for name in {*spool.published(), *new} if sealed[name].record.codec == spec.codec]
    places: dict[str, tuple[str, int, int]] = {}
    for name in sorted(usable, key=lambda name: (dead_share(name), name)):
        for row, (key, length) in enumerate(zip(sealed[name].keys, sealed[name].lengths, strict=True)):
            if key in live:
                places.setdefault(key, (name, row, length))
    names = sorted({name for name, _, _ in places.values()})
    number = {name: index for index, name in enumerate(names)}
    rows = []
    for key in dict.fromkeys(keys):
        name, row, length = places[key]
        rows.append(LiveRow(key, number[name], row, length))
    return Manifest(spec, tuple(sealed[name].record for name in names), tuple(rows))
