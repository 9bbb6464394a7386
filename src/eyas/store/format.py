"""What a store is, in words that fit into JSON: specification, row keys, manifest.

Takes and gives plain values and ``manifest.json``; opens no shard. `docs/store-format.md` is the written form.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from eyas.errors import EyasError
from eyas.files import value_hash, write_json_atomic

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
CODECS = ("none", "lossless", "fp8")
KEY_CHARACTERS = 32
_KEY = re.compile(r"[0-9a-f]{32}")
_SHARD_NAME = re.compile(r"shard-[0-9a-f]{12}\.h5")
_LARGEST = 2**62


class _Malformed(Exception):
    """A value of another form than the format says."""


def _integer(value: Any, what: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _LARGEST:
        raise _Malformed(f"{what}: expected a whole number of at least {least}, got {value!r:.80}")
    return value


def _text(value: Any, what: str, pattern: re.Pattern[str] | None = None) -> str:
    if type(value) is not str or (pattern is not None and pattern.fullmatch(value) is None):
        raise _Malformed(
            f"{what}: expected {'text' if pattern is None else 'text of the form ' + pattern.pattern}, got {value!r:.80}"
        )
    return value


def _members(value: Any, what: str, names: Sequence[str]) -> list[Any]:
    if type(value) is not dict or set(value) != set(names):
        raise _Malformed(f"{what}: expected an object with exactly {', '.join(names)}, got {value!r:.80}")
    return [value[name] for name in names]


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise _Malformed(f"{what}: expected a list, got {value!r:.80}")
    return value


@dataclass(frozen=True)
class StoreSpec:
    """What a store holds: which states of which target, and how they are kept."""

    layers: tuple[int, ...]
    hidden_size: int
    codec: str
    identity: dict[str, Any]
    shard_mib: int

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise EyasError(f"store codec {self.codec!r}: there is {', '.join(CODECS)}")
        if not self.layers or self.hidden_size <= 0 or self.shard_mib <= 0:
            raise EyasError("a store needs at least one layer, and a hidden size and a shard size above zero")

    @property
    def lossy(self) -> bool:
        """Whether what is read differs from what was written."""
        return self.codec == "fp8"

    @property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides the states' bits; ``none`` and ``lossless`` hold the same bits."""
        stored = "float8_e4m3fn" if self.lossy else "bfloat16"
        return value_hash([self.identity, list(self.layers), self.hidden_size, stored])

    @property
    def row_bytes(self) -> int:
        """Uncompressed bf16 bytes of one token."""
        return 2 * len(self.layers) * self.hidden_size

    def differences(self, other: StoreSpec) -> list[str]:
        """Why ``other``'s rows cannot be used here: one line for each value that the fingerprint holds and that differs."""
        pairs = [
            ("layers", list(other.layers), list(self.layers)),
            ("hidden_size", other.hidden_size, self.hidden_size),
        ]
        names = sorted(set(self.identity) | set(other.identity))
        pairs += [(name, other.identity.get(name), self.identity.get(name)) for name in names]
        if self.lossy != other.lossy:
            pairs.append(("codec", other.codec, self.codec))
        return [f"{name}: {before} → {now}" for name, before, now in pairs if before != now]

    def to_json(self) -> dict[str, Any]:
        """The specification as JSON values."""
        return {
            "layers": list(self.layers),
            "hidden_size": self.hidden_size,
            "codec": self.codec,
            "identity": self.identity,
            "shard_mib": self.shard_mib,
        }

    @classmethod
    def from_json(cls, value: Any) -> StoreSpec:
        """Read what `to_json` gives.

        Raises:
            EyasError: a value of another form.
        """
        try:
            layers, hidden_size, codec, identity, shard_mib = _members(
                value, "spec", ("layers", "hidden_size", "codec", "identity", "shard_mib")
            )
            if type(identity) is not dict:
                raise _Malformed(f"spec.identity: expected an object, got {identity!r:.80}")
            return cls(
                tuple(_integer(layer, "spec.layers") for layer in _list(layers, "spec.layers")),
                _integer(hidden_size, "spec.hidden_size", 1),
                _text(codec, "spec.codec"),
                identity,
                _integer(shard_mib, "spec.shard_mib", 1),
            )
        except _Malformed as error:
            raise EyasError(str(error)) from None


def row_key(fingerprint: str, input_ids: ArrayLike) -> str:
    """The row's name: the first 32 hex digits of SHA-256 over the fingerprint and the ids as little-endian int32."""
    digest = hashlib.sha256(fingerprint.encode())
    digest.update(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    return digest.hexdigest()[:KEY_CHARACTERS]


def shard_name(codec: str, keys: Sequence[str]) -> str:
    """The shard's name, which says what is in it; the row keys hold the fingerprint."""
    return f"shard-{value_hash([FORMAT_VERSION, codec, list(keys)])[:12]}.h5"


@dataclass(frozen=True)
class ShardRecord:
    """What the manifest says of one shard. ``index_sha256`` covers row keys, offsets and checksums."""

    name: str
    codec: str
    bytes: int
    rows: int
    tokens: int
    index_sha256: str


@dataclass(frozen=True)
class LiveRow:
    """One row that belongs to the store: row number ``row`` of shard number ``shard``."""

    key: str
    shard: int
    row: int
    tokens: int


@dataclass(frozen=True)
class Manifest:
    """A store's table of contents: its shards by name, its live rows in order."""

    spec: StoreSpec
    shards: tuple[ShardRecord, ...]
    rows: tuple[LiveRow, ...]

    @property
    def tokens(self) -> int:
        """Tokens in live rows."""
        return sum(row.tokens for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON values, its own hash included."""
        content = {
            "format_version": FORMAT_VERSION,
            "fingerprint": self.spec.fingerprint,
            "lossy": self.spec.lossy,
            "spec": self.spec.to_json(),
            "shards": [vars(shard) for shard in self.shards],
            "rows": [[row.key, row.shard, row.row, row.tokens] for row in self.rows],
        }
        return content | {"sha256": value_hash(content)}

    def write(self, directory: Path) -> None:
        """Write ``manifest.json``."""
        write_json_atomic(directory / MANIFEST_NAME, self.to_json())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read and check ``manifest.json``.

        Raises:
            EyasError: none there, one of a newer format, one that was damaged or edited.
        """
        path = directory / MANIFEST_NAME
        if path.exists() and not path.is_file():
            raise EyasError(f"{path}: is no file; restore it with `dvc checkout` or extract again")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise EyasError(
                f"{path}: cannot be read ({error.strerror}); is this a published store? (`dvc pull` fetches it)"
            ) from None
        try:
            return cls._parse(json.loads(text, parse_constant=_refuse_constant))
        except (_Malformed, EyasError, ValueError, RecursionError) as error:
            raise EyasError(f"{path}: {error}; restore it with `dvc checkout` or extract again") from None

    @classmethod
    def _parse(cls, value: Any) -> Manifest:
        if type(value) is not dict:
            raise _Malformed("expected a JSON object")
        version = _integer(value.get("format_version"), "format_version", 1)
        if version > FORMAT_VERSION:
            raise _Malformed(
                f"format version {version} is newer than {FORMAT_VERSION}, which this Eyas reads; upgrade it"
            )
        sha256 = value.pop("sha256", None)
        if sha256 != value_hash(value):
            raise _Malformed("the content does not match its own sha256: damaged or edited by hand")
        names = ("format_version", "fingerprint", "lossy", "spec", "shards", "rows")
        _, fingerprint, lossy, spec_value, shard_values, row_values = _members(value, "manifest", names)
        spec = StoreSpec.from_json(spec_value)
        if fingerprint != spec.fingerprint or lossy != spec.lossy:
            raise _Malformed("fingerprint or lossy do not follow from the spec")
        shards = tuple(_parse_shard(item) for item in _list(shard_values, "shards"))
        rows = tuple(_parse_row(item, shards) for item in _list(row_values, "rows"))
        if len({shard.name for shard in shards}) != len(shards) or len({row.key for row in rows}) != len(rows):
            raise _Malformed("a shard or a row is listed twice")
        return cls(spec, shards, rows)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_shard(value: Any) -> ShardRecord:
    names = ("name", "codec", "bytes", "rows", "tokens", "index_sha256")
    name, codec, size, rows, tokens, index_sha256 = _members(value, "shards[]", names)
    if codec not in CODECS:
        raise _Malformed(f"shards[].codec: {codec!r:.80} is none of {', '.join(CODECS)}")
    return ShardRecord(
        _text(name, "shards[].name", _SHARD_NAME),
        codec,
        _integer(size, "shards[].bytes", 1),
        _integer(rows, "shards[].rows", 1),
        _integer(tokens, "shards[].tokens", 1),
        _text(index_sha256, "shards[].index_sha256"),
    )


def _parse_row(value: Any, shards: Sequence[ShardRecord]) -> LiveRow:
    if type(value) is not list or len(value) != 4:
        raise _Malformed(f"rows[]: expected [key, shard, row, tokens], got {value!r:.80}")
    row = LiveRow(
        _text(value[0], "rows[].key", _KEY),
        _integer(value[1], "rows[].shard"),
        _integer(value[2], "rows[].row"),
        _integer(value[3], "rows[].tokens", 1),
    )
    if row.shard >= len(shards) or row.row >= shards[row.shard].rows:
        raise _Malformed(f"rows[]: {value!r:.80} names a row that no shard has")
    return row
