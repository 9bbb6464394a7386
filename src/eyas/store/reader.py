"""Reading a published store: rows by key, into fresh arrays or into the caller's buffers.

Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError
from eyas.store.format import LiveRow, Manifest, ShardRecord
from eyas.store.shards import DamageError, Hidden, Ids, ShardFile, StoredRow

_OPEN_SHARDS = 64


@dataclass(frozen=True)
class Row:
    """One row: ids int32 [T], bf16 bit patterns uint16 [T, L, H]."""

    input_ids: Ids
    hidden_TLH: Hidden


class OpenShards:
    """A store's shards, each opened when a row of it is first wanted.

    Can be sent to spawned processes; each opens the shards for itself, and needs no manifest.
    """

    def __init__(self, directory: Path, fingerprint: str, records: Sequence[ShardRecord]) -> None:
        self.directory, self.fingerprint, self.records = directory, fingerprint, records
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        return {"directory": self.directory, "fingerprint": self.fingerprint, "records": self.records}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def close(self) -> None:
        """Close the shards that are open."""
        while self._open:
            self._open.popitem()[1].close()

    def _shard(self, number: int) -> ShardFile:
        if number not in self._open:
            record = self.records[number]
            shard = ShardFile(self.directory / record.name, record)
            if shard.fingerprint != self.fingerprint:
                shard.close()
                raise DamageError(shard.path, None, "attributes", "the fingerprint is not the manifest's")
            self._open[number] = shard
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return self._open[number]

    def find(self, row: LiveRow) -> ShardFile:
        """The open shard that has a row.

        Raises:
            DamageError: the shard is damaged, or does not have the row where the manifest says.
        """
        shard = self._shard(row.shard)
        if row.row >= len(shard.keys) or shard.keys[row.row] != row.key or shard.length(row.row) != row.tokens:
            raise DamageError(shard.path, row.key, "row_keys", "the manifest's row is not where it says")
        return shard

    def read_into(self, row: LiveRow, out_hidden_TLH: Hidden, out_ids: Ids, verify: bool = True) -> int:
        """Read one row to the beginning of buffers that may be longer; gives the number of tokens.

        Args:
            row: the row.
            out_hidden_TLH: uint16 [at least T, L, H], C-contiguous.
            out_ids: int32 [at least T].
            verify: compare checksums.

        Raises:
            EyasError: a buffer that does not fit, a damaged row.
        """
        shard = self.find(row)
        tokens, wanted = row.tokens, (shard.layers, shard.hidden_size)
        if out_hidden_TLH.shape[1:] != wanted or min(len(out_hidden_TLH), len(out_ids)) < tokens:
            raise EyasError(
                f"row {row.key}: {tokens} tokens of {wanted} do not fit into buffers {out_hidden_TLH.shape} and {out_ids.shape}"
            )
        shard.read_into(row.row, out_hidden_TLH[:tokens], out_ids[:tokens], verify)
        return tokens


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
        self.shards = OpenShards(directory, self.spec.fingerprint, self.manifest.shards)
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
        self.shards.close()

    def row(self, key: str) -> LiveRow:
        """Where a row is.

        Raises:
            EyasError: no such row.
        """
        if key not in self._rows:
            raise EyasError(f"{self.directory}: no live row {key}")
        return self._rows[key]

    def length(self, key: str) -> int:
        """Tokens of one row."""
        return self.row(key).tokens

    def shard_of(self, key: str) -> str:
        """Name of the shard that has the row."""
        return self.manifest.shards[self.row(key).shard].name

    def read(self, key: str, verify: bool = True) -> Row:
        """One row.

        Raises:
            EyasError: no such row; a damaged one (``verify`` compares checksums).
        """
        row = self.row(key)
        return Row(*self.shards.find(row).read(row.row, verify))

    def stored(self, key: str) -> StoredRow:
        """One row as its shard holds it.

        Raises:
            EyasError: as `read`.
        """
        row = self.row(key)
        return self.shards.find(row).read_stored(row.row)

    def read_into(self, key: str, out_hidden_TLH: Hidden, out_ids: Ids, verify: bool = True) -> int:
        """Read one row into the caller's buffers, as `OpenShards.read_into`; gives the number of tokens.

        Raises:
            EyasError: a buffer that does not fit; as `read`.
        """
        return self.shards.read_into(self.row(key), out_hidden_TLH, out_ids, verify)
