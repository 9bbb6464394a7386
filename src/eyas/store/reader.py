"""Reading a published store: rows by key, into fresh arrays or into the caller's buffers.

Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError
from eyas.store.format import LiveRow, Manifest
from eyas.store.shards import DamageError, Hidden, Ids, ShardFile, StoredRow

_OPEN_SHARDS = 64


@dataclass(frozen=True)
class Row:
    """One row: ids int32 [T], bf16 bit patterns uint16 [T, L, H]."""

    input_ids: Ids
    hidden_TLH: Hidden


class StoreReader:
    """A published store, open for reading. Can be sent to spawned processes; each opens the shards for itself."""

    def __init__(self, directory: Path) -> None:
        """Read the manifest and see that all shards are there with the right size.

        Raises:
            EyasError: no manifest, one that is damaged or of a newer format, a shard missing or of another size.
        """
        self.directory = directory
        self.manifest = Manifest.read(directory)
        self.spec = self.manifest.spec
        self.keys: list[str] = [row.key for row in self.manifest.rows]
        self.lengths: list[int] = [row.tokens for row in self.manifest.rows]
        self._rows: dict[str, LiveRow] = {row.key: row for row in self.manifest.rows}
        self._open: OrderedDict[int, ShardFile] = OrderedDict()
        for record in self.manifest.shards:
            path = directory / record.name
            if not path.is_file():
                raise DamageError(path, None, None, "the shard is missing")
            if path.stat().st_size != record.bytes:
                raise DamageError(
                    path, None, None, f"has {path.stat().st_size} bytes, the manifest says {record.bytes}"
                )

    def __getstate__(self) -> dict[str, Path]:
        return {"directory": self.directory}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self.keys)

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards that are open."""
        while self._open:
            self._open.popitem()[1].close()

    def _row(self, key: str) -> LiveRow:
        if key not in self._rows:
            raise EyasError(f"{self.directory}: no live row {key}")
        return self._rows[key]

    def length(self, key: str) -> int:
        """Tokens of one row."""
        return self._row(key).tokens

    def shard_of(self, key: str) -> str:
        """Name of the shard that has the row."""
        return self.manifest.shards[self._row(key).shard].name

    def _shard(self, number: int) -> ShardFile:
        if number not in self._open:
            record = self.manifest.shards[number]
            shard = ShardFile(self.directory / record.name, record)
            if shard.fingerprint != self.spec.fingerprint:
                shard.close()
                raise DamageError(shard.path, None, "attributes", "the fingerprint is not the manifest's")
            self._open[number] = shard
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return self._open[number]

    def _find(self, key: str) -> tuple[ShardFile, LiveRow]:
        row = self._row(key)
        shard = self._shard(row.shard)
        if row.row >= len(shard.keys) or shard.keys[row.row] != key or shard.length(row.row) != row.tokens:
            raise DamageError(shard.path, key, "row_keys", "the manifest's row is not where it says")
        return shard, row

    def read(self, key: str, verify: bool = True) -> Row:
        """One row.

        Raises:
            EyasError: no such row; a damaged one (``verify`` compares checksums).
        """
        shard, row = self._find(key)
        return Row(*shard.read(row.row, verify))

    def stored(self, key: str) -> StoredRow:
        """One row as its shard holds it.

        Raises:
            EyasError: as `read`.
        """
        shard, row = self._find(key)
        return shard.read_stored(row.row)

    def read_into(self, key: str, out_hidden_TLH: Hidden, out_ids: Ids, verify: bool = True) -> int:
        """Read one row to the beginning of buffers that may be longer; gives the number of tokens.

        Args:
            key: the row.
            out_hidden_TLH: uint16 [at least T, L, H], C-contiguous.
            out_ids: int32 [at least T].
            verify: compare checksums.

        Raises:
            EyasError: a buffer that does not fit; as `read`.
        """
        shard, row = self._find(key)
        tokens, wanted = row.tokens, (len(self.spec.layers), self.spec.hidden_size)
        if out_hidden_TLH.shape[1:] != wanted or min(len(out_hidden_TLH), len(out_ids)) < tokens:
            raise EyasError(
                f"row {key}: {tokens} tokens of {wanted} do not fit into buffers {out_hidden_TLH.shape} and {out_ids.shape}"
            )
        shard.read_into(row.row, out_hidden_TLH[:tokens], out_ids[:tokens], verify)
        return tokens
