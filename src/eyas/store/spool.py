"""Scratch for extraction: rows as the engine gives them, and the shards that are complete already.

Takes rows in any order from any number of processes; a kill at any moment costs at most the rows in flight. Beside each other::

    rows/<row key>.row      loose rows, written by the engine: the raw bits with a checksum
    shards/shard-*.h5       complete shards: published ones as hard links, and new ones
    shards/published.json   which of them are published; the others are only taken up again under the same plan

Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eyas.console import console
from eyas.errors import EyasError
from eyas.files import fsync_path, write_json_atomic
from eyas.store.format import Manifest, ShardRecord, StoreSpec, row_key
from eyas.store.shards import (
    DamageError,
    Hidden,
    Ids,
    ShardFile,
    StoredRow,
    checksum,
    link_shard,
    stored_row,
)

_MAGIC = b"EYASROW2"
_HEADER = struct.Struct("<8sIIIII")  # magic, T, L, H, CRC-32 of the ids, CRC-32 of the states; the ids follow
_PAGE_BYTES = 4096  # the states begin on a page: some processors copy large arrays to other places more slowly
_SHARDS = "shards"
_PUBLISHED = "published.json"
_CLOCK_TICK_NS = 100_000_000  # a folder that changed within the file system's last tick may change again unseen


@dataclass(frozen=True)
class Sealed:
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
        self._sealed: dict[str, Sealed] = {}
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

    def arrived(self, key: str) -> bool:
        """Whether the row is here, without reading it."""
        return self._path(key).exists() or key in self._sealed_places()

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The rows that are not here. A loose row that is not whole is removed, so that nobody takes it for one."""
        absent = [key for key in keys if not self.has(key)]
        self.forget(absent)
        return absent

    def loose(self) -> list[str]:
        """Keys of the loose rows, unchecked."""
        with os.scandir(self.directory) as entries:
            return [entry.name.removesuffix(".row") for entry in entries if entry.name.endswith(".row")]

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
                header = _HEADER.pack(_MAGIC, *shape, checksum(ids), checksum(states)) + ids.tobytes()
                _write_all(stream.fileno(), memoryview(header.ljust(_states_at(len(ids)), b"\0")))
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
            return loose[0], loose[1]
        name, row = self._place(key)
        with ShardFile(self.shards / name) as shard:
            return shard.read(row)

    def stored(self, key: str) -> StoredRow:
        """The row as a shard of this spool's codec holds it.

        Raises:
            EyasError: no such row, or a damaged one.
        """
        # a shard of bf16 bits takes over the checksum that was made when the row came, for the self-check to compare
        loose = self._loose(key, verify=self.spec.lossy)
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
        return sorted({key for key in self.loose() if self.has(key)} | set(self._sealed_places()))

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

    def _loose(self, key: str, verify: bool = True) -> tuple[Ids, Hidden, int] | None:
        """The loose row and its states' checksum, mapped from the file; None where there is none or it is not whole."""
        try:
            with self._path(key).open("rb") as stream:
                # mapped, because fresh memory costs more page faults than reading it is worth
                content = mmap.mmap(stream.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
            tokens, ids_crc, states_crc = self._header(content[: _HEADER.size])
            start = _states_at(tokens)
            if len(content) != start + tokens * self.spec.row_bytes:
                return None
        except (FileNotFoundError, ValueError):
            return None
        ids: Ids = np.frombuffer(content, "<i4", tokens, _HEADER.size)
        states: Hidden = np.frombuffer(content, "<u2", offset=start)
        if checksum(ids) != ids_crc or row_key(self._fingerprint, ids) != key:
            return None
        if verify and checksum(states) != states_crc:
            return None
        return ids, states.reshape(tokens, len(self.spec.layers), self.spec.hidden_size), states_crc

    def _sealed_places(self) -> dict[str, tuple[str, int]]:
        """Where rows are in complete shards: key → shard, row number. Looked up again when the folder has changed."""
        stamp = self.shards.stat().st_mtime_ns
        if stamp != self._stamp:
            present = sorted(path.name for path in self.shards.glob("shard-*.h5"))
            self._sealed = {name: self._sealed.get(name) or self._seal_index(name) for name in present}
            self._places = {
                key: (name, row) for name in reversed(present) for row, key in enumerate(self._sealed[name].keys)
            }
            self._stamp = stamp if time.time_ns() - stamp > _CLOCK_TICK_NS else None
        return self._places

    def _seal_index(self, name: str) -> Sealed:
        with ShardFile(self.shards / name) as shard:
            return Sealed(shard.record(), tuple(shard.keys), tuple(np.diff(shard.offsets).tolist()))

    def sealed(self) -> dict[str, Sealed]:
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

    def discard(self, names: Sequence[str]) -> None:
        """Remove complete shards, as damaged or as parts of a plan that holds no longer."""
        kept = [name for name in self.published() if name not in names]
        if len(kept) < len(self.published()):
            write_json_atomic(self.shards / _PUBLISHED, kept)
        for name in names:
            (self.shards / name).unlink(missing_ok=True)
        self._stamp = None

    def adopt(self, store: Path) -> list[str]:
        """Take over the shards of a published store (an earlier state, another profile's) by hard link.

        Gives why its rows are of no use here, or an empty list. A damaged or missing shard is named and left out.

        Raises:
            EyasError: the store's manifest is damaged.
        """
        manifest = Manifest.read(store)
        reasons = self.spec.differences(manifest.spec)
        if reasons:
            return reasons
        known = self.published()
        taken = []
        for record in manifest.shards:
            if record.name in known:
                continue
            try:
                ShardFile(store / record.name, record).close()
            except DamageError as error:
                console.print(f"{record.name} of an earlier store is not reused: {error.reason}", markup=False)
                continue
            (self.shards / record.name).unlink(missing_ok=True)
            link_shard(store / record.name, self.shards / record.name)
            taken.append(record.name)
        fsync_path(self.shards)
        self._stamp = None
        self.mark_published(taken)
        return []


def _states_at(tokens: int) -> int:
    return -(-(_HEADER.size + 4 * tokens) // _PAGE_BYTES) * _PAGE_BYTES


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]
