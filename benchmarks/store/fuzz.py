"""Damages manifests and shards in thousands of ways: reading gives the original bits or a clear error, and nothing else.

    python benchmarks/store/fuzz.py --cases 5000 --seed 0 --workers 1

Six kinds of cases, each in a child process with a time limit and little memory, because damage may hang or crash the HDF5
library itself:

    bytes        changes of a shard's bytes, half of the time with HDF5's own checksums made right again, to get past them
    manifest     changes of the table of contents, mostly with its sha256 made right again
    rebuilt      one dataset or attribute of another type, shape, layout or place: every combination once, whatever ``--cases`` says
    room         a dataset that says it can grow
    chunk        a compressed chunk whose header leads astray
    file         something else where a file should be

Outcomes:

    clean        the original bits
    refused      a clear error that names the place
    greedy       refused, but only after trying to allocate more memory than any row needs
    leaked       clean or refused, but a file was left open
    followed     read from a file outside the store
    wrong, exception, crashed, hung

Prints every bad case, which ``--only KIND/CODEC/WHAT`` runs again, and counts. The exit status is 1 when there are any.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import random
import resource
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from eyas.console import console
from eyas.errors import EyasError
from eyas.files import value_hash
from eyas.process import die_with_parent
from eyas.store.format import CODECS, Manifest, StoreSpec
from eyas.store.fsck import Damage, check_shard, store_info, verify_store
from eyas.store.reader import StoreReader
from eyas.store.shards import ShardFile
from eyas.store.spool import RowSpool
from eyas.store.writer import publish

GOOD = ("clean", "refused")
LAYERS, HIDDEN = 3, 16
_ROWS = ((40, 7, 230), (11, 90))
_MEMORY = 1 << 30
_SECONDS = 10.0
_STRUCTURES = (
    b"\x89HDF\r\n\x1a\n",
    b"OHDR",
    b"OCHK",
    b"FRHP",
    b"FHDB",
    b"FHIB",
    b"BTHD",
    b"BTIN",
    b"BTLF",
    b"FAHD",
    b"FADB",
)
_INTERESTING = (
    0,
    1,
    2,
    127,
    128,
    255,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**48,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
_STRANGE: tuple[Any, ...] = (None, True, [], {}, "", "0" * 32, "lossless", "../x.h5", "\ud800", [[]], 10**30, -1, 0.5)

Truth = dict[str, tuple[Any, Any]]


class Wrong(Exception):
    """What was read is not what was written."""


# ---- a small store, and what is in it


@dataclass(frozen=True)
class Original:
    """A whole store of two small shards. ``shard`` is the one that is damaged."""

    manifest: dict[str, Any]
    shard: str
    content: bytes
    other: str
    other_content: bytes
    truth: Truth
    structures: tuple[tuple[int, int], ...]
    chunks: tuple[int, ...]

    @classmethod
    def make(cls, folder: Path, codec: str) -> Original:
        """Write the store to ``folder``, once for each codec."""
        spec = StoreSpec((1, 2, 5), HIDDEN, codec, {"engine": "fixed", "weights_hash": "w"}, 1)
        spool, keys = RowSpool(folder / "work" / "rows", spec), []
        for shard in _ROWS:  # each state of the store adds one shard
            for tokens in shard:
                source = np.random.default_rng(tokens)
                values = source.standard_normal((tokens, LAYERS, HIDDEN)).astype(np.float32)
                ids = source.integers(0, 50_000, tokens).astype(np.int32)
                keys.append(spool.write(ids, (values.view(np.uint32) >> 16).astype(np.uint16)))
            manifest = publish(spool, folder / "store", spec, keys)
        first, second = (folder / "store" / manifest.shards[manifest.rows[number].shard].name for number in (0, -1))
        with StoreReader(folder / "store") as reader:
            truth = {key: (reader.read(key).input_ids, reader.read(key).hidden_TLH) for key in reader.keys}
        with h5py.File(first) as file:
            states = file["hidden_states"].id
            count = states.get_num_chunks() if codec == "lossless" else 0
            chunks = tuple(states.get_chunk_info(index).byte_offset for index in range(count))
        content, other = first.read_bytes(), second.read_bytes()
        return cls(manifest.to_json(), first.name, content, second.name, other, truth, _structures(content), chunks)


# ---- damage to bytes


def lookup3(data: bytes) -> int:
    """Bob Jenkins' hash, which HDF5 puts behind its metadata structures."""
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF

    def turn(value: int, count: int) -> int:
        return ((value << count) | (value >> (32 - count))) & 0xFFFFFFFF

    blocks = max(0, (len(data) - 1) // 12)
    words: list[int] = np.frombuffer(data + bytes(12 * (blocks + 1) - len(data)), "<u4").tolist()
    for index in range(0, 3 * blocks, 3):
        a, b, c = ((x + y) & 0xFFFFFFFF for x, y in zip((a, b, c), words[index : index + 3], strict=True))
        a = (a - c) & 0xFFFFFFFF ^ turn(c, 4)
        c = (c + b) & 0xFFFFFFFF
        b = (b - a) & 0xFFFFFFFF ^ turn(a, 6)
        a = (a + c) & 0xFFFFFFFF
        c = (c - b) & 0xFFFFFFFF ^ turn(b, 8)
        b = (b + a) & 0xFFFFFFFF
        a = (a - c) & 0xFFFFFFFF ^ turn(c, 16)
        c = (c + b) & 0xFFFFFFFF
        b = (b - a) & 0xFFFFFFFF ^ turn(a, 19)
        a = (a + c) & 0xFFFFFFFF
        c = (c - b) & 0xFFFFFFFF ^ turn(b, 4)
        b = (b + a) & 0xFFFFFFFF
    if not data:
        return c
    a, b, c = ((x + y) & 0xFFFFFFFF for x, y in zip((a, b, c), words[3 * blocks :], strict=True))
    c = ((c ^ b) - turn(b, 14)) & 0xFFFFFFFF
    a = ((a ^ c) - turn(c, 11)) & 0xFFFFFFFF
    b = ((b ^ a) - turn(a, 25)) & 0xFFFFFFFF
    c = ((c ^ b) - turn(b, 16)) & 0xFFFFFFFF
    a = ((a ^ c) - turn(c, 4)) & 0xFFFFFFFF
    b = ((b ^ a) - turn(a, 14)) & 0xFFFFFFFF
    return ((c ^ b) - turn(b, 24)) & 0xFFFFFFFF


def _structures(content: bytes) -> tuple[tuple[int, int], ...]:
    """Beginning and end of HDF5's metadata structures, found by their signature and the checksum behind them."""
    found = []
    for signature in _STRUCTURES:
        start = content.find(signature)
        while start >= 0:
            for end in range(start + 8, min(start + 1200, len(content) - 4)):
                if lookup3(content[start:end]) == int.from_bytes(content[end : end + 4], "little"):
                    found.append((start, end))
                    break
            start = content.find(signature, start + 1)
    return tuple(found)


def damaged_bytes(original: Original, source: random.Random) -> bytes:
    """The shard with one to four changes of its bytes."""
    content = bytearray(original.content)
    resealed = source.random() < 0.5
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        _damage_once(content, original, source, resealed)
    if resealed:
        _seal_structures(content, original)
    return bytes(content)


def _seal_structures(content: bytearray, original: Original) -> None:
    for start, end in original.structures:
        if end + 4 <= len(content):
            content[end : end + 4] = lookup3(bytes(content[start:end])).to_bytes(4, "little")


def with_room(original: Original, axis: int, room: int) -> bytes:
    """The shard whose states are said to be extensible along one axis, which crashed HDF5 2.0.0."""
    tokens = sum(tokens for tokens in _ROWS[0])
    shape = struct.pack("<3Q", tokens, LAYERS, HIDDEN)
    content = bytearray(original.content)
    at = content.index(shape + shape) + len(shape) + 8 * axis
    content[at : at + 8] = room.to_bytes(8, "little")
    _seal_structures(content, original)
    return bytes(content)


def _damage_once(content: bytearray, original: Original, source: random.Random, resealed: bool) -> None:
    size = len(content)
    if not size:
        return

    def place() -> int:
        """Half of the places are in HDF5's structures or a compressed chunk's header, where most of the logic is."""
        where = source.random()
        if resealed or where < 0.4:
            start, end = source.choice(original.structures)
            return min(source.randrange(start, end), size - 1)
        if original.chunks and where < 0.6:
            return min(source.choice(original.chunks) + source.randrange(64), size - 1)
        return source.randrange(size)

    at = place()
    change = source.randrange(5 if resealed else 9)
    length = source.choice((1, 2, 4, 8))
    if change == 0:
        content[at] ^= 1 << source.randrange(8)
    elif change == 1:
        content[at] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))
    elif change == 2:
        value = source.choice((*_INTERESTING, size, source.randrange(size), source.getrandbits(64)))
        content[at : at + length] = (value % (1 << 8 * length)).to_bytes(length, "little")[: size - at]
    elif change == 3:
        near = int.from_bytes(content[at : at + length], "little") + source.choice((-8, -2, -1, 1, 2, 8))
        content[at : at + length] = (near % (1 << 8 * length)).to_bytes(length, "little")[: size - at]
    elif change == 4:
        length = source.choice((2, 4, 16, 64))
        content[at : at + length] = source.randbytes(min(length, size - at))
    elif change == 5:
        del content[source.choice((at, size - source.randrange(min(size, 64)) - 1)) :]
    elif change == 6:
        content += source.choice((bytes(1), bytes(4096), original.other_content, source.randbytes(100)))
    elif change == 7:
        length, to = source.choice((8, 64, 512, 4096)), place()
        first, second = min(at, to), max(at, to)
        length = min(length, second - first, size - second)
        content[first : first + length], content[second : second + length] = (
            content[second : second + length],
            content[first : first + length],
        )
    else:
        length = min(source.choice((64, 512, 4096)), size - at)
        begin = source.randrange(max(1, len(original.other_content) - length))
        content[at : at + length] = source.choice((bytes(length), original.other_content[begin : begin + length]))


def with_lost_chunk(original: Original, source: random.Random) -> bytes:
    """The shard with a compressed chunk that says another size and another place of its data, which crashed c-blosc 1.21."""
    content = bytearray(original.content)
    at = source.choice(original.chunks) + 12
    content[at : at + 8] = source.randbytes(8)
    return bytes(content)


# ---- damage to the manifest


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _paths(inner, (*path, name))


def _at(value: Any, path: Sequence[Any]) -> Any:
    for name in path:
        value = value[name]
    return value


def _another_value(before: Any, whole: Any, source: random.Random) -> Any:
    """A value of another type, or of the same type and another meaning."""
    if source.random() < 0.4:
        return source.choice(_STRANGE)
    if source.random() < 0.2:
        return copy.deepcopy(_at(whole, source.choice(list(_paths(whole)))))
    if isinstance(before, bool) or before is None:
        return not before
    if isinstance(before, int):
        return source.choice((before + 1, before - 1, -before, float(before), str(before), *_INTERESTING))
    if isinstance(before, str):
        cut = source.randrange(len(before) + 1)
        return source.choice(
            (before[:cut] + "0" + before[cut + 1 :], before.upper(), before + "\n", before + before, cut)
        )
    if isinstance(before, list):
        return source.choice(
            (before[1:], before[:-1], before[::-1], before + before[:1], before * 2, dict(enumerate(before)))
        )
    if isinstance(before, dict):
        return list(before) if source.random() < 0.5 else before | {source.choice(("x", "rows", "sha256")): 1}
    return source.choice(_STRANGE)


def damaged_manifest(original: Original, source: random.Random) -> bytes:
    """The manifest's text with one to three changes of its structure or its characters."""
    value: Any = copy.deepcopy(original.manifest)
    for _ in range(source.choice((1, 1, 2, 3))):
        path = source.choice(list(_paths(value)))
        if not path:
            continue
        parent, name = _at(value, path[:-1]), path[-1]
        change = source.randrange(8)
        if change == 0:
            del parent[name]
        elif change == 1 and isinstance(parent, list):
            parent.insert(source.randrange(len(parent) + 1), copy.deepcopy(parent[name]))
        elif change == 2:
            other = source.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            parent[name], parent[other] = parent[other], parent[name]
        else:
            parent[name] = _another_value(parent[name], original.manifest, source)
    if isinstance(value, dict) and source.random() < 0.85:
        _reseal(value, refit=source.random() < 0.5)
    text = json.dumps(value, ensure_ascii=source.random() < 0.9, indent=source.choice((None, 2)))
    encoding = source.choice(("utf-8",) * 12 + ("utf-16", "utf-32", "utf-8-sig"))
    content = bytearray(text.encode(encoding, "surrogatepass"))
    if source.random() < 0.15:
        at = source.randrange(len(content))
        change = source.randrange(6)
        if change == 0:
            content[at] = source.randrange(256)
        elif change == 1:
            del content[at:]
        elif change == 2:
            content *= 2
        elif change == 3:
            content[at : at + 1] = source.choice(
                (b"NaN", b"1e999", b"-0", b"[" * 100_000, b"9" * 5000, b'{"a":' * 50_000)
            )
        elif change == 4:
            content[at:at] = source.choice((b"\0", b"\xff\xfe", b" " * 100_000, b'"rows": [], ', b"// x\n"))
        else:
            content = content.replace(b":", b":\n", source.randrange(20))
    return bytes(content)


def _reseal(value: dict[str, Any], refit: bool) -> None:
    """Make the sha256 right again, and with ``refit`` first what follows from the specification."""
    value.pop("sha256", None)
    try:
        if refit:
            spec = StoreSpec.from_json(value.get("spec"))
            value["fingerprint"], value["lossy"] = spec.fingerprint, spec.lossy
        value["sha256"] = value_hash(value)
    except (EyasError, ValueError, TypeError):
        value["sha256"] = "0" * 64


# ---- shards built anew with one thing of another kind

Change = Callable[[h5py.File, str, "Outside"], None]


@dataclass(frozen=True)
class Outside:
    """Files outside the store that a shard may point to."""

    folder: Path
    codec: str

    def copy_of(self, file: h5py.File, name: str) -> Path:
        """An HDF5 file whose dataset ``name`` is the very same."""
        path = self.folder / "outside.h5"
        with h5py.File(path, "w") as other:
            file.copy(name, other)
        return path

    def raw(self, values: Any) -> Path:
        """A file with just these values."""
        path = self.folder / "outside.bin"
        path.write_bytes(np.ascontiguousarray(values).tobytes())
        return path

    def pipe(self) -> Path:
        """A named pipe that nobody writes to: opening it never ends."""
        path = self.folder / "outside.pipe"
        if not path.exists():
            os.mkfifo(path)
        return path


def _put(file: h5py.File, name: str, **options: Any) -> Any:
    attributes = dict(file[name].attrs)
    del file[name]
    dataset = file.create_dataset(name, track_times=False, **options)
    dataset.attrs.update(attributes)
    return dataset


def _retyped(convert: Callable[[Any], Any], **options: Any) -> Change:
    def change(file: h5py.File, name: str, _: Outside) -> None:
        _put(file, name, data=convert(file[name][()]), **options)

    return change


def _sized(shape: Callable[[tuple[int, ...]], tuple[int, ...]], **options: Any) -> Change:
    def change(file: h5py.File, name: str, _: Outside) -> None:
        _put(file, name, shape=shape(file[name].shape), dtype=file[name].dtype, **options)

    return change


def _compound(values: Any) -> Any:
    result = np.zeros(values.shape, [("value", values.dtype), ("more", "<i4")])
    result["value"] = values
    return result


def _vlen(file: h5py.File, name: str, _: Outside) -> None:
    values = file[name][()]
    kind = h5py.string_dtype() if values.dtype.kind == "S" else h5py.vlen_dtype(values.dtype)
    dataset = _put(file, name, shape=values.shape[:1], dtype=kind)
    for index, value in enumerate(values):
        dataset[index] = value if values.dtype.kind == "S" else np.atleast_1d(value).ravel()


def _group(file: h5py.File, name: str, _: Outside) -> None:
    del file[name]
    file.create_group(name).create_dataset(name, data=1)


def _named_type(file: h5py.File, name: str, _: Outside) -> None:
    kind = file[name].dtype
    del file[name]
    file[name] = kind


def _gone(file: h5py.File, name: str, _: Outside) -> None:
    del file[name]


def _empty(file: h5py.File, name: str, _: Outside) -> None:
    _put(file, name, data=h5py.Empty(file[name].dtype))


def _references(file: h5py.File, name: str, _: Outside) -> None:
    dataset = _put(file, name, shape=file[name].shape, dtype=h5py.ref_dtype)
    dataset[(0,) * len(dataset.shape)] = file.ref


def _external_link(file: h5py.File, name: str, outside: Outside) -> None:
    path = outside.copy_of(file, name)
    del file[name]
    file[name] = h5py.ExternalLink(path, f"/{name}")


def _link_to_pipe(file: h5py.File, name: str, outside: Outside) -> None:
    del file[name]
    file[name] = h5py.ExternalLink(outside.pipe(), f"/{name}")


def _link_to_itself(file: h5py.File, name: str, _: Outside) -> None:
    del file[name]
    file[name] = h5py.ExternalLink(Path(file.filename).name, f"/{name}")


def _soft_link(file: h5py.File, name: str, _: Outside) -> None:
    file.move(name, "elsewhere")
    file[name] = h5py.SoftLink("/elsewhere")


def _soft_link_through_a_file(file: h5py.File, name: str, outside: Outside) -> None:
    path = outside.copy_of(file, name)
    del file[name]
    file["door"] = h5py.ExternalLink(path, "/")
    file[name] = h5py.SoftLink(f"/door/{name}")


def _dangling(file: h5py.File, name: str, _: Outside) -> None:
    del file[name]
    file[name] = h5py.SoftLink("/nowhere")


def _loop(file: h5py.File, name: str, _: Outside) -> None:
    del file[name]
    file[name] = h5py.SoftLink(f"/{name}")


def _virtual(file: h5py.File, name: str, outside: Outside) -> None:
    path = outside.copy_of(file, name)
    layout = h5py.VirtualLayout(file[name].shape, file[name].dtype)
    layout[...] = h5py.VirtualSource(path, name, file[name].shape, file[name].dtype)
    del file[name]
    file.create_virtual_dataset(name, layout)


def _virtual_pipe(file: h5py.File, name: str, outside: Outside) -> None:
    layout = h5py.VirtualLayout(file[name].shape, file[name].dtype)
    layout[...] = h5py.VirtualSource(outside.pipe(), name, file[name].shape, file[name].dtype)
    del file[name]
    file.create_virtual_dataset(name, layout)


def _external_storage(file: h5py.File, name: str, outside: Outside) -> None:
    values = file[name][()]
    path = outside.raw(values)
    _put(file, name, shape=values.shape, dtype=values.dtype, external=[(path, 0, h5py.h5f.UNLIMITED)])
    outside.raw(values)


def _storage_in_pipe(file: h5py.File, name: str, outside: Outside) -> None:
    values = file[name][()]
    _put(file, name, shape=values.shape, dtype=values.dtype, external=[(outside.pipe(), 0, h5py.h5f.UNLIMITED)])


def _compact_layout(file: h5py.File, name: str, _: Outside) -> None:
    values = file[name][()]
    if values.nbytes > 60_000:
        values = values[:100]
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    del file[name]
    kind = h5py.h5t.py_create(values.dtype, logical=True)
    made = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(values.shape), dcpl=plist)
    h5py.Dataset(made)[...] = values


_DEFLATE = {"chunks": True, "compression": "gzip"}
DATASET_CHANGES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "gone": (_gone, ("refused",)),
    "group": (_group, ("refused",)),
    "named type": (_named_type, ("refused",)),
    "empty": (_empty, ("refused",)),
    "scalar": (_sized(lambda _: ()), ("refused",)),
    "no elements": (_sized(lambda shape: (0, *shape[1:])), ("refused",)),
    "shorter": (_retyped(lambda values: values[:-1]), ("refused",)),
    "longer": (_retyped(lambda values: np.concatenate([values, values[-1:]])), GOOD),
    "another dimension": (_retyped(lambda values: values[..., None]), GOOD),
    "flat": (_retyped(lambda values: values.reshape(1, -1)), ("refused",)),
    "last axes exchanged": (_retyped(lambda values: values.reshape(*values.shape[:-2], *values.shape[:-3:-1])), GOOD),
    "float64": (_retyped(lambda values: np.zeros(values.shape)), ("refused",)),
    "big-endian": (_retyped(lambda values: values.astype(values.dtype.newbyteorder(">"))), GOOD),
    "int8": (_retyped(lambda values: np.ones(values.shape, np.int8)), ("refused",)),
    "uint64": (_retyped(lambda values: np.full(values.shape, 2**63 + 1, np.uint64)), ("refused",)),
    "boolean": (_retyped(lambda values: np.ones(values.shape, np.bool_)), ("refused",)),
    "opaque": (_retyped(lambda values: np.zeros(values.shape, "V7")), ("refused",)),
    "complex": (_retyped(lambda values: np.zeros(values.shape, np.complex64)), ("refused",)),
    "compound": (_retyped(_compound), ("refused",)),
    "variable length": (_vlen, GOOD),
    "references": (_references, ("refused",)),
    "external link": (_external_link, ("refused",)),
    "external link to a pipe": (_link_to_pipe, ("refused",)),
    "external link to itself": (_link_to_itself, ("refused",)),
    "soft link": (_soft_link, GOOD),
    "soft link through a file": (_soft_link_through_a_file, ("refused",)),
    "dangling": (_dangling, ("refused",)),
    "loop": (_loop, ("refused",)),
    "virtual": (_virtual, ("refused",)),
    "virtual pipe": (_virtual_pipe, ("refused",)),
    "external storage": (_external_storage, ("refused",)),
    "storage in a pipe": (_storage_in_pipe, ("refused",)),
    "terabytes in chunks": (_sized(lambda shape: (2**41, *shape[1:]), chunks=True), ("refused",)),
    "terabytes at a stretch": (_sized(lambda shape: (2**41, *shape[1:])), ("refused",)),
    "gigabytes of nothing": (_sized(lambda shape: (2**30, *shape[1:]), fillvalue=None, **_DEFLATE), ("refused",)),
    "wide": (_sized(lambda shape: (*shape[:-1], 2**24), chunks=True), ("refused",)),
    "many layers": (_sized(lambda shape: (*shape[:1], 2**22, *shape[2:]), chunks=True), ("refused",)),
    "deflated": (_retyped(lambda values: values, **_DEFLATE), GOOD),
    "compact": (_compact_layout, GOOD),
}

ATTRIBUTE_VALUES: dict[str, Any] = {
    "zero": 0,
    "minus one": -1,
    "two": 2,
    "gigabytes": 2**33,
    "not a number": float("nan"),
    "text": "lossless",
    "long text": "x" * 60_000,
    "bytes": np.bytes_(b"\xff\xfe\x01"),
    "no bytes": np.bytes_(b""),
    "list": np.arange(5),
    "nothing": h5py.Empty("<i8"),
    "compound": np.zeros(2, [("a", "<i4"), ("b", "S3")]),
    "complex": 1j,
    "table": np.zeros((30, 30)),
}
ATTRIBUTES = ("format_version", "fingerprint", "codec", "lossy", "layers", "hidden_size", "final_layer", "identity")


def _huge_row(file: h5py.File, _: str, __: Outside) -> None:
    """All that is said of the row's length agrees, and the length is absurd."""
    offsets = file["row_offsets"][()]
    tokens = offsets[-1] = 2**38
    file["row_offsets"][...] = offsets
    for name in {"hidden_states", "input_ids", "scales"} & set(file):
        _put(file, name, shape=(tokens, *file[name].shape[1:]), dtype=file[name].dtype, chunks=True)


def _exchanged(file: h5py.File, _: str, __: Outside) -> None:
    """As many values in another shape, and attributes that agree with it."""
    states = file["hidden_states"]
    tokens, layers, hidden = states.shape
    chunks = None if states.chunks is None else (states.chunks[0], 1, layers)
    filters = {} if chunks is None else {"compression": 32001, "compression_opts": (0, 0, 0, 0, 1, 1, 5)}
    _put(file, "hidden_states", data=states[()].reshape(tokens, hidden, layers), chunks=chunks, **filters)
    file.attrs["layers"], file.attrs["hidden_size"] = np.arange(hidden), np.int64(layers)
    if "scales" in file:
        _put(file, "scales", data=np.resize(file["scales"][()], (tokens, hidden)))


def _narrow(file: h5py.File, name: str, _: Outside) -> None:
    """Sixteen bits to a word, of which twelve count, beginning at the third."""
    values = file["hidden_states"][()]
    kind = h5py.h5t.STD_U16LE.copy()
    kind.set_precision(12)
    kind.set_offset(3)
    del file["hidden_states"]
    space = h5py.h5s.create_simple(values.shape)
    h5py.Dataset(h5py.h5d.create(file.id, b"hidden_states", kind, space))[...] = values >> 4


def rebuilt_cases(codec: str) -> dict[str, tuple[Change, str, tuple[str, ...]]]:
    """What is done, to which dataset, and the outcomes that are right."""
    names = ["hidden_states", "input_ids", "row_offsets", "row_keys", "hidden_crc32"]
    names += ["scales", "scale_crc32"] if codec == "fp8" else []
    cases: dict[str, tuple[Change, str, tuple[str, ...]]] = {}
    for name, (what, (change, right)) in product(names, DATASET_CHANGES.items()):
        cases[f"{name}: {what}"] = (change, name, right)
    # with one dimension there are no axes to exchange
    places = [("/", name) for name in ATTRIBUTES] + [("hidden_states", "dtype"), ("hidden_states", "rotated_left")]
    for (where, attribute), (what, value) in product(places, ATTRIBUTE_VALUES.items()):

        def set_value(file: h5py.File, place: str, _: Outside, attribute: str = attribute, value: Any = value) -> None:
            file[place].attrs[attribute] = value

        cases[f"attribute {attribute}: {what}"] = (set_value, where, GOOD)
    for where, attribute in places:

        def drop(file: h5py.File, place: str, _: Outside, attribute: str = attribute) -> None:
            del file[place].attrs[attribute]

        cases[f"attribute {attribute}: gone"] = (drop, where, GOOD)
    cases["a huge row"] = (_huge_row, "", ("refused",))
    cases["layers and hidden size exchanged"] = (_exchanged, "", ("refused",))
    cases["words with unused bits"] = (_narrow, "", ("refused",))
    return cases


def _text_file(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\n")


def _nothing(path: Path) -> None:
    path.write_bytes(b"")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def _link_to_itself_as_file(path: Path) -> None:
    path.symlink_to(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


FILE_CHANGES: dict[str, Callable[[Path], None]] = {
    "gone": lambda _: None,
    "a directory": Path.mkdir,
    "empty": _nothing,
    "text": _text_file,
    "a pipe": _pipe,
    "a link to nowhere": _link_to_nowhere,
    "a link to itself": _link_to_itself_as_file,
    "a link to a device": _device,
}


# ---- one case


def _compare(truth: Truth, key: str, ids: Any, hidden: Any) -> None:
    if key not in truth:
        raise Wrong(f"row {key} was never written")
    if hidden.shape != truth[key][1].shape:
        raise Wrong(f"row {key} has the shape {hidden.shape}, written was {truth[key][1].shape}")
    if not (np.array_equal(ids, truth[key][0]) and np.array_equal(hidden, truth[key][1])):
        raise Wrong(f"row {key} has other bits")


def read_and_compare(folder: Path, truth: Truth) -> None:
    """Read all rows of a store.

    Raises:
        EyasError: as `StoreReader`.
        Wrong: other bits than were written.
    """
    with StoreReader(folder) as reader:
        for key in reader.keys:
            row = reader.read(key)
            _compare(truth, key, row.input_ids, row.hidden_TLH)
            ids, hidden = np.empty(len(row.input_ids), np.int32), np.empty_like(row.hidden_TLH)
            reader.read_into(key, hidden, ids)
            _compare(truth, key, ids, hidden)


def _attempt(read: Callable[[], object], folder: Path) -> str | None:
    """None, or the message of a clear error."""
    try:
        read()
    except EyasError as error:
        message = str(error)
        if str(folder) not in message:
            raise Wrong(f"an error that does not say where: {message}") from error
        return message
    return None


def exercise(folder: Path, shard: str, truth: Truth, another_manifest: bool) -> tuple[str, str]:
    """Read a store in all ways that there are; gives outcome and message.

    Raises:
        Wrong: other bits than were written, an error without its place, or a check that sees nothing where reading does.
    """

    def read_shard() -> None:
        with ShardFile(folder / shard) as file:
            for row, key in enumerate(file.keys):
                file.prefetch(row)
                _compare(truth, key, *file.read(row))

    def check_shards() -> None:
        manifest = Manifest.read(folder)
        for record in manifest.shards:
            found.extend(check_shard(folder / record.name, record, manifest.spec.fingerprint))

    def check_store() -> None:
        found.extend(verify_store(folder, None, 1))

    found: list[Damage] = []
    manifest_fault = _attempt(lambda: json.dumps(Manifest.read(folder).to_json()), folder)
    if _attempt(lambda: json.dumps(store_info(folder)), folder) != manifest_fault:
        raise Wrong("info and reading the manifest do not agree")
    shard_fault, store_fault = _attempt(read_shard, folder), _attempt(lambda: read_and_compare(folder, truth), folder)
    # a process pool takes a second: only where what `verify_store` itself does with the manifest may go wrong
    check_fault = _attempt(check_store if another_manifest and not manifest_fault else check_shards, folder)
    if (store_fault or shard_fault) and not (found or check_fault):
        raise Wrong(f"verify finds nothing, reading says: {store_fault or shard_fault}")
    faults = [fault for fault in (store_fault, shard_fault, check_fault, *(damage.reason for damage in found)) if fault]
    greedy = [fault for fault in faults if "Unable to allocate" in fault or "MemoryError" in fault]
    if greedy:
        return "greedy", greedy[0]
    return ("refused", faults[0]) if faults else ("clean", "")


def prepare(case: str, folder: Path, store: Path, original: Original) -> tuple[str, ...]:
    """Lay a damaged store down at ``store``, which does not exist; gives the outcomes that are right."""
    kind, codec, what = case.split("/", 2)
    store.mkdir()
    (store / original.other).write_bytes(original.other_content)
    content = original.content
    right: tuple[str, ...] = GOOD
    manifest = copy.deepcopy(original.manifest)
    source = random.Random(case)
    if kind == "bytes":
        content = damaged_bytes(original, source)
        resized = source.random() < 0.7
    elif kind == "chunk":
        content, resized, right = with_lost_chunk(original, source), False, ("refused",)
    elif kind == "room":
        axis, room = what.split(": ")
        content, resized = with_room(original, int(axis), int(room)), False
    else:
        resized = kind == "rebuilt"
    path = store / original.shard
    path.write_bytes(content)
    if kind == "rebuilt":
        change, name, right = rebuilt_cases(codec)[what]
        with h5py.File(path, "r+", libver=("v110", "v110")) as file:
            change(file, name, Outside(folder, codec))
    if resized and path.stat().st_size:
        entry = next(entry for entry in manifest["shards"] if entry["name"] == original.shard)
        entry["bytes"] = path.stat().st_size
        _reseal(manifest, refit=False)
    (store / "manifest.json").write_bytes(
        damaged_manifest(original, source) if kind == "manifest" else json.dumps(manifest).encode()
    )
    if kind == "file":
        where, what = what.split(": ")
        path = path if where == "shard" else store / "manifest.json"
        path.unlink()
        FILE_CHANGES[what](path)
        right = ("refused",)
    return right


def _opened() -> list[str]:
    """What this process has open, as far as it can still be told."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            names.append(str(entry.readlink()))
        except OSError:
            continue
    return names


def run_case(case: str, folder: Path, originals: dict[str, Original]) -> tuple[str, str]:
    """Outcome and message of one case, in this process."""
    original = originals[case.split("/")[1]]
    store = folder / "store"
    try:
        right = prepare(case, folder, store, original)
    except Exception as error:
        return "unmade", f"{type(error).__name__}: {error}"
    opened, peak = len(_opened()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        outcome, message = exercise(store, original.shard, original.truth, case.startswith("manifest/"))
    except Wrong as error:
        outcome, message = "wrong", str(error)
    except BaseException as error:
        outcome, message = "exception", f"{type(error).__name__}: {error}"
    if outcome in GOOD and outcome not in right:
        outcome, message = "followed", "not refused"
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    if taken > _MEMORY // 8 and outcome in GOOD:
        outcome, message = "greedy", f"took {taken >> 20} MiB: {message}"
    left = [name for name in _opened()[opened:] if str(folder) in name]
    if left and outcome in GOOD:
        outcome, message = "leaked", f"{outcome}, and left open: {left}"
    return outcome, message


# ---- many cases, in children


def _serve(connection: Connection, folder: Path, parent: int) -> None:
    """A child's work: take cases, give outcomes."""
    die_with_parent(parent)
    console.quiet = True
    warnings.simplefilter("ignore")
    faulthandler.enable(file=(folder / "fault.txt").open("w"))
    originals = {}
    for codec in CODECS:
        (folder / codec).mkdir(exist_ok=True)
        originals[codec] = Original.make(folder / codec, codec)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send("ready")
    while True:
        case = connection.recv()
        _clear(folder / "store")
        connection.send(run_case(case, folder, originals))


def _clear(store: Path) -> None:
    if store.is_dir():
        for path in store.iterdir():
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
        store.rmdir()


class _Child:
    """A process that runs cases, replaced by a fresh one when a case ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: Any = None

    def _start(self) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.folder, os.getpid()))
        self._process.start()
        theirs.close()
        if not self._connection.poll(120) or self._connection.recv() != "ready":
            raise EyasError(f"{self.folder}: no child process that runs the cases; see what it printed")

    def run(self, case: str) -> tuple[str, str]:
        """Outcome and message."""
        if self._process is None:
            self._start()
        self._connection.send(case)
        try:
            if self._connection.poll(_SECONDS):
                outcome: tuple[str, str] = self._connection.recv()
                return outcome
            outcome = ("hung", f"after {_SECONDS} s")
        except EOFError:
            self._process.join()
            trace = [line.strip() for line in (self.folder / "fault.txt").read_text().splitlines()]
            outcome = ("crashed", f"exit status {self._process.exitcode}: {' '.join(trace[:6])}")
        self.end()
        return outcome

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def run_cases(
    cases: Sequence[str],
    folder: Path,
    workers: int = 1,
    report: Callable[[str, str, str], None] = lambda case, outcome, message: None,
) -> dict[str, tuple[str, str]]:
    """Outcome and message of every case; ``report`` gets each as it comes."""

    def work(number: int) -> dict[str, tuple[str, str]]:
        place = folder / f"child-{number}"
        place.mkdir()
        child, outcomes = _Child(place), {}
        try:
            for case in cases[number::workers]:
                outcomes[case] = child.run(case)
                report(case, *outcomes[case])
        finally:
            child.end()
        return outcomes

    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(work, range(workers)))
    return {case: outcome for part in parts for case, outcome in part.items()}


# HDF5 loads an attribute whole before its size can be asked for: it is refused after that. `--only` runs them.
KNOWN = (" fingerprint: gigabytes", " codec: gigabytes", " identity: gigabytes")


def all_rebuilt() -> list[str]:
    """Every case of the kinds `rebuilt` (but `KNOWN`), `room` and `file`, and some of the kind `chunk`."""
    rebuilt = [f"rebuilt/{codec}/{what}" for codec in CODECS for what in rebuilt_cases(codec)]
    rebuilt = [case for case in rebuilt if not case.endswith(KNOWN)]
    rooms = (2**9, 2**24, 2**51, 2**63, 2**64 - 1)
    rebuilt += [f"room/{codec}/{axis}: {room}" for codec in CODECS for axis in range(3) for room in rooms]
    rebuilt += [f"chunk/lossless/{number}" for number in range(40)]
    return rebuilt + [f"file/none/{where}: {what}" for where in ("shard", "manifest") for what in FILE_CHANGES]


def random_cases(kind: str, count: int, seed: int) -> list[str]:
    """``count`` cases of the kind `bytes` or `manifest`, codecs in turn."""
    return [f"{kind}/{CODECS[number % len(CODECS)]}/{seed}-{number}" for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000, help="of the kinds bytes and manifest, two thirds bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="run these cases again and print what they say")
    arguments = parser.parse_args()
    cases = arguments.only or [
        *all_rebuilt(),
        *random_cases("manifest", arguments.cases // 3, arguments.seed),
        *random_cases("bytes", arguments.cases - arguments.cases // 3, arguments.seed),
    ]

    def report(case: str, outcome: str, message: str) -> None:
        if outcome not in GOOD or arguments.only:
            print(f"{outcome:<10}{case}: {message}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_cases(cases, Path(folder), arguments.workers, report)
    counts = Counter((case.split("/")[0], outcome) for case, (outcome, _) in outcomes.items())
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:<10}{outcome:<10}{count:>7,}")
    return 0 if all(outcome in GOOD for outcome, _ in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
