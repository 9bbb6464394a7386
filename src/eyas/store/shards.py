"""One shard: an HDF5 file with many rows laid end to end. Written once, byte for byte the same for the same rows.

Takes rows (input_ids int32 [T], hidden_TLH uint16 [T, L, H]); gives a file, and rows back out of it.

Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
from numpy.typing import NDArray

from eyas.errors import EyasError
from eyas.files import atomic_file
from eyas.store.chunks import Chunks, ChunkWriter
from eyas.store.codecs import chunk_tokens, decode_fp8, encode_fp8, unrotate_in_place
from eyas.store.format import (
    CODECS,
    FORMAT_VERSION,
    KEY_CHARACTERS,
    ShardRecord,
    StoreSpec,
    row_key,
)
from eyas.store.newfile import NewFile

try:
    from isal.isal_zlib import crc32  # the same numbers, in less time
except ImportError:
    from zlib import crc32

_LIBVER = ("v110", "v110")
_BLOSC_FILTER = 32001
_ATTRIBUTE_BYTES = 1 << 20
_WRITEBACK_BYTES = 32 << 20
_PAGE_BYTES = 4096
_LARGE_BYTES = 1 << 20  # data of this size begin on a page, for mapping and for fast copies; chunks are smaller
_REMEDY = "`eyas store verify` lists all damage; restore the file with `dvc checkout` or `dvc pull`, or extract again"

Hidden = NDArray[np.uint16]
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class StoredRow:
    """A row as its shard holds it: ids [T], bf16 bits uint16 or e4m3 codes uint8 [T, L, H], with codes the scales [T, L]."""

    input_ids: Ids
    states: NDArray[np.uint16] | NDArray[np.uint8]
    crc32: int  # of the states
    scale_TL: NDArray[np.float32] | None


def stored_row(codec: str, input_ids: Ids, hidden_TLH: Hidden, crc32: int) -> StoredRow:
    """Encode a row, whose states have this checksum, for a shard of this codec."""
    if codec == "fp8":
        code_TLH, scale_TL = encode_fp8(hidden_TLH)
        return StoredRow(input_ids, code_TLH, checksum(code_TLH), scale_TL)
    return StoredRow(input_ids, hidden_TLH, crc32, None)


RowSource = Callable[[str], StoredRow]


class DamageError(EyasError):
    """A shard, or one dataset of one row of it, that is not what was written."""

    def __init__(self, shard: Path, row: str | None, dataset: str | None, reason: str) -> None:
        place = "".join([f", row {row}" if row else "", f", dataset {dataset}" if dataset else ""])
        super().__init__(f"{shard}{place}: {reason}; {_REMEDY}")
        self.shard, self.row, self.dataset, self.reason = shard, row, dataset, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.shard, self.row, self.dataset, self.reason)


def checksum(array: NDArray[Any]) -> int:
    """CRC-32 of a C-contiguous array's bytes."""
    return crc32(array.data.cast("B")) if array.size else 0


def _index_hash(keys: NDArray[np.bytes_], offsets: NDArray[np.int64], *checksums: NDArray[np.uint32]) -> str:
    digest = hashlib.sha256()
    for array in (keys, offsets, *checksums):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _attributes(spec: StoreSpec) -> dict[str, Any]:
    return {
        "format_version": np.int64(FORMAT_VERSION),
        "fingerprint": np.bytes_(spec.fingerprint),
        "codec": np.bytes_(spec.codec),
        "lossy": np.int64(spec.lossy),
        "layers": np.asarray(spec.layers, dtype="<i8"),
        "hidden_size": np.int64(spec.hidden_size),
        "final_layer": np.bytes_("before the final norm"),
        "identity": np.bytes_(json.dumps(spec.identity, sort_keys=True, ensure_ascii=True, allow_nan=False)),
    }


def _create_datasets(file: h5py.File, spec: StoreSpec, tokens: int) -> None:
    layers, hidden = len(spec.layers), spec.hidden_size
    shape = (tokens, layers, hidden)
    options: dict[str, Any] = {"track_times": False, "fill_time": "never"}
    if spec.codec == "lossless":
        # one layer to a chunk: layers differ in scale, and an entropy coder wants one distribution at a time
        chunk = (min(tokens, chunk_tokens(hidden)), 1, hidden)
        blosc = hdf5plugin.Blosc(cname="zstd", clevel=1, shuffle=hdf5plugin.Blosc.SHUFFLE)
        file.create_dataset("hidden_states", shape, "<u2", chunks=chunk, **blosc, **options)
    else:
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # so that its place in the file is known before it is written
        file.create_dataset("hidden_states", shape, "u1" if spec.lossy else "<u2", dcpl=early, **options)
    if spec.lossy:
        file.create_dataset("scales", (tokens, layers), "<f4", **options)
    states = file["hidden_states"]
    states.attrs["dtype"] = np.bytes_("float8_e4m3fn" if spec.lossy else "bfloat16")
    states.attrs["rotated_left"] = np.int64(spec.codec == "lossless")


def write_shard(path: Path, spec: StoreSpec, keys: Sequence[str], lengths: Sequence[int], source: RowSource) -> None:
    """Write the rows ``keys`` in this order; ``path`` is then whole, on the disk and read-only, or absent.

    Raises:
        EyasError: a row of another length than planned.
    """
    tokens, layers, hidden = sum(lengths), len(spec.layers), spec.hidden_size
    input_ids = np.empty(tokens, dtype="<i4")
    checksums = {"hidden_crc32": np.zeros(len(keys), "<u4")}
    if spec.lossy:
        checksums["scale_crc32"] = np.zeros(len(keys), "<u4")
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths))]).astype("<i8")
    with atomic_file(path) as temporary:
        pages = {"alignment_threshold": _LARGE_BYTES, "alignment_interval": _PAGE_BYTES}
        with (
            NewFile(temporary) as stream,
            h5py.File(stream, "w", libver=_LIBVER, track_order=False, **pages) as file,
        ):
            _create_datasets(file, spec, tokens)
            file.attrs.update(_attributes(spec))
            write = ChunkWriter(file["hidden_states"]) if spec.codec == "lossless" else _ContiguousWriter(file, stream)
            waiting = 0
            for number, key in enumerate(keys):
                row = source(key)
                shape = (lengths[number], layers, hidden)
                if row.states.shape != shape or len(row.input_ids) != lengths[number]:
                    raise EyasError(f"row {key}: has the shape {row.states.shape}, planned was {shape}")
                start, end = int(offsets[number]), int(offsets[number + 1])
                input_ids[start:end] = row.input_ids
                checksums["hidden_crc32"][number] = row.crc32
                if row.scale_TL is not None:
                    file["scales"][start:end] = row.scale_TL
                    checksums["scale_crc32"][number] = checksum(row.scale_TL)
                write(row.states)
                stream.check()
                waiting += row.states.nbytes
                if waiting >= _WRITEBACK_BYTES:
                    stream.start_writeback()
                    waiting = 0
            options: dict[str, Any] = {"track_times": False}
            file.create_dataset("input_ids", data=input_ids, **options)
            file.create_dataset("row_offsets", data=offsets, **options)
            file.create_dataset("row_keys", data=np.asarray(keys, dtype=f"S{KEY_CHARACTERS}"), **options)
            for name, values in checksums.items():
                file.create_dataset(name, data=values, **options)
        temporary.chmod(0o444)


class _ContiguousWriter:
    """Writes rows past HDF5 to where the contiguous dataset lies: no copy in between."""

    def __init__(self, file: h5py.File, stream: NewFile) -> None:
        file.flush()
        self._position: int = file["hidden_states"].id.get_offset()
        self._stream = stream

    def __call__(self, states_TLH: NDArray[Any]) -> None:
        """Append a row."""
        self._stream.seek(self._position)
        self._position += self._stream.write(np.ascontiguousarray(states_TLH).data)


def link_shard(source: Path, target: Path) -> None:
    """Hard link ``target`` to what ``source`` is or points to; a copy where they are on different file systems."""
    if target.exists():
        return
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        with atomic_file(target) as temporary:
            shutil.copyfile(source, temporary)
            temporary.chmod(0o444)


@contextmanager
def _reading(path: Path, row: str | None, dataset: str | None) -> Iterator[None]:
    """HDF5 reports damage as errors of many kinds; here they become one, except a lack of file handles or memory."""
    try:
        yield
    except EyasError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DamageError(path, row, dataset, f"cannot be read ({reason})") from error


class ShardFile:
    """A shard open for reading. Its index (keys, offsets, checksums) is checked on opening, a row when it is read."""

    def __init__(self, path: Path, record: ShardRecord | None = None) -> None:
        self.path = path
        if not path.is_file():
            raise DamageError(path, None, None, "the shard is missing")
        size = path.stat().st_size
        if record is not None and size != record.bytes:
            raise DamageError(path, None, None, f"has {size} bytes, the manifest says {record.bytes}")
        with _reading(path, None, None):
            self._file = h5py.File(path, "r", rdcc_nbytes=8 << 20)
        try:
            self._open(record)
        except BaseException:
            self._file.close()
            raise

    def _open(self, record: ShardRecord | None) -> None:
        with _reading(self.path, None, "attributes"):
            version = int(self._attribute("format_version"))
            if version > FORMAT_VERSION:
                raise EyasError(f"{self.path}: format version {version} is newer than {FORMAT_VERSION}; upgrade Eyas")
            self.fingerprint = bytes(self._attribute("fingerprint")).decode("ascii")
            self.codec = bytes(self._attribute("codec")).decode("ascii")
            if self.codec not in CODECS:
                raise ValueError(f"codec {self.codec!r} is none of {', '.join(CODECS)}")
            layers, self.hidden_size = self._attribute("layers").tolist(), int(self._attribute("hidden_size"))
            self.layers = len(layers)
            identity = json.loads(bytes(self._attribute("identity")))
            if not layers or self.hidden_size < 1:
                raise ValueError(f"{len(layers)} layers, hidden size {self.hidden_size}")
            if StoreSpec(tuple(layers), self.hidden_size, self.codec, identity, 1).fingerprint != self.fingerprint:
                raise ValueError("layers, hidden size and identity do not give the fingerprint")
        with _reading(self.path, None, "row_keys"):
            keys = self._dataset("row_keys", (None,), f"S{KEY_CHARACTERS}")[()]
            self.keys: list[str] = [key.decode("ascii") for key in keys.tolist()]
        with _reading(self.path, None, "row_offsets"):
            self.offsets: NDArray[np.int64] = self._dataset("row_offsets", (len(keys) + 1,), "<i8")[()]
            if self.offsets[0] != 0 or (np.diff(self.offsets) <= 0).any():
                raise ValueError("does not ascend from 0 by one row after the other")
        with _reading(self.path, None, "checksums"):
            names = ["hidden_crc32", *(["scale_crc32"] if self.codec == "fp8" else [])]
            self._checksums = {name: self._dataset(name, (len(keys),), "<u4")[()] for name in names}
        with _reading(self.path, None, "hidden_states"):
            shape = (self.tokens, self.layers, self.hidden_size)
            self._states = self._dataset("hidden_states", shape, "u1" if self.codec == "fp8" else "<u2")
            # a contiguous dataset is read past HDF5, straight into the caller's buffer
            self._data_offset: int | None = None if self.codec == "lossless" else self._states.id.get_offset()
            self._descriptor = self._file.id.get_vfd_handle()
            self._chunks = Chunks(self._states, self._descriptor) if self.codec == "lossless" else None
        if self.codec == "fp8":
            with _reading(self.path, None, "scales"):
                self._scales = self._dataset("scales", shape[:2], "<f4")
        with _reading(self.path, None, "input_ids"):
            self._input_ids = self._dataset("input_ids", (self.tokens,), "<i4")
        self.index_sha256 = _index_hash(keys, self.offsets, *self._checksums.values())
        if record is not None and (self.index_sha256, self.codec) != (record.index_sha256, record.codec):
            raise DamageError(self.path, None, "row_keys, row_offsets, checksums", "not what the manifest says")

    def _attribute(self, name: str) -> Any:
        """An attribute's value, if it is a small one of whole numbers or fixed text."""
        size = h5py.h5a.get_info(self._file.id, name.encode()).data_size
        if size > _ATTRIBUTE_BYTES:
            raise ValueError(f"{name} has {size} bytes")
        kind = h5py.h5a.open(self._file.id, name.encode()).get_type()
        if not isinstance(kind, h5py.h5t.TypeIntegerID | h5py.h5t.TypeStringID) or (
            isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str()
        ):
            raise ValueError(f"{name} is neither a whole number nor text")
        return self._file.attrs[name]

    def _dataset(self, name: str, shape: tuple[int | None, ...], dtype: str) -> Any:
        """A dataset that is in this very file, laid out as `write_shard` does it; nothing else is followed or read."""
        if self._file.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise ValueError("is a link")
        dataset = self._file[name]
        if not isinstance(dataset, h5py.Dataset):
            raise ValueError("is no dataset")
        known = tuple(length if wanted is None else wanted for length, wanted in zip(dataset.shape, shape, strict=True))
        if not dataset.shape == dataset.maxshape == known or dataset.dtype != np.dtype(dtype):
            raise ValueError(f"has shape {dataset.shape} and type {dataset.dtype}, expected {shape} and {dtype}")
        layout = dataset.id.get_create_plist()
        compressed = name == "hidden_states" and self.codec == "lossless"
        if layout.get_layout() != (h5py.h5d.CHUNKED if compressed else h5py.h5d.CONTIGUOUS) or (
            not compressed and layout.get_external_count()
        ):
            raise ValueError("is not laid out as this codec's")
        if compressed:
            filters = [layout.get_filter(number)[0] for number in range(layout.get_nfilters())]
            chunk = (min(self.tokens, chunk_tokens(self.hidden_size)), 1, self.hidden_size)
            if filters != [_BLOSC_FILTER] or dataset.chunks != chunk:
                raise ValueError(f"has the filters {filters} and chunks {dataset.chunks}")
        # low bytes are stored as they are, so that no dataset is more than twice what the file holds
        if dataset.nbytes > 2 * self.path.stat().st_size:
            raise ValueError(f"claims {dataset.nbytes} bytes")
        return dataset

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return int(self.offsets[-1])

    def record(self) -> ShardRecord:
        """What a manifest says of this shard."""
        return ShardRecord(
            self.path.name, self.codec, self.path.stat().st_size, len(self.keys), self.tokens, self.index_sha256
        )

    def length(self, row: int) -> int:
        """Tokens of one row."""
        return int(self.offsets[row + 1] - self.offsets[row])

    def _read_contiguous(self, start: int, out: NDArray[Any]) -> None:
        if self._data_offset is None:
            raise ValueError("is not contiguous")
        view = out.data.cast("B")
        position = self._data_offset + start * out[0].nbytes
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], position + done)
            if count == 0:
                raise OSError("the file ends too early")
            done += count

    def prefetch(self, row: int) -> None:
        """Let the disk begin with a row in chunks, which HDF5 would ask for one by one; waits only while its queue is full.

        A contiguous row is read in one piece, which the kernel reads ahead by itself.

        Raises:
            DamageError: the row's chunks are not there.
        """
        if self._chunks is not None:
            with _reading(self.path, self.keys[row], "hidden_states"):
                self._chunks.prefetch(int(self.offsets[row]), int(self.offsets[row + 1]))

    def read_into(self, row: int, hidden_TLH: Hidden, input_ids: Ids, verify: bool = True) -> None:
        """Read one row into buffers of exactly its shape (C-contiguous).

        Raises:
            DamageError: the row cannot be read, or (``verify``) is not what was written.
        """
        key, start, end = self.keys[row], int(self.offsets[row]), int(self.offsets[row + 1])
        with _reading(self.path, key, "input_ids"):
            self._input_ids.read_direct(input_ids, np.s_[start:end])
        if verify and row_key(self.fingerprint, input_ids) != key:
            raise DamageError(self.path, key, "input_ids", "the ids do not give the row's key")
        if self.codec == "fp8":
            code_TLH, scale_TL = self._read_codes(row, verify)
            hidden_TLH[...] = decode_fp8(code_TLH, scale_TL)
            return
        with _reading(self.path, key, "hidden_states"):
            if self._chunks is not None:
                self._chunks.check(start, end)
                self._states.read_direct(hidden_TLH, np.s_[start:end])
                unrotate_in_place(hidden_TLH)
            else:
                self._read_contiguous(start, hidden_TLH)
        if verify:
            self._check(row, "hidden_states", "hidden_crc32", hidden_TLH)

    def _read_codes(self, row: int, verify: bool) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        key, start, end = self.keys[row], int(self.offsets[row]), int(self.offsets[row + 1])
        with _reading(self.path, key, "hidden_states"):
            code_TLH = np.empty((end - start, self.layers, self.hidden_size), np.uint8)
            self._read_contiguous(start, code_TLH)
        with _reading(self.path, key, "scales"):
            scale_TL = self._scales[start:end]
        if verify:
            self._check(row, "hidden_states", "hidden_crc32", code_TLH)
            self._check(row, "scales", "scale_crc32", scale_TL)
        return code_TLH, scale_TL

    def _check(self, row: int, dataset: str, name: str, array: NDArray[Any]) -> None:
        if checksum(array) != int(self._checksums[name][row]):
            raise DamageError(self.path, self.keys[row], dataset, "the checksum does not match")

    def read(self, row: int, verify: bool = True) -> tuple[Ids, Hidden]:
        """One row in fresh arrays.

        Raises:
            DamageError: as `read_into`.
        """
        length = self.length(row)
        input_ids, hidden_TLH = np.empty(length, "<i4"), np.empty((length, self.layers, self.hidden_size), "<u2")
        self.read_into(row, hidden_TLH, input_ids, verify)
        return input_ids, hidden_TLH

    def read_stored(self, row: int) -> StoredRow:
        """One row as it is stored, for another shard of the same codec: codes are not decoded and encoded again.

        Raises:
            DamageError: as `read_into`.
        """
        input_ids, hidden_TLH = self.read(row)
        crc32 = int(self._checksums["hidden_crc32"][row])
        if self.codec == "fp8":
            code_TLH, scale_TL = self._read_codes(row, verify=True)
            return StoredRow(input_ids, code_TLH, crc32, scale_TL)
        return StoredRow(input_ids, hidden_TLH, crc32, None)
