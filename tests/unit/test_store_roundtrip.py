from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.store.codecs import decode_fp8, encode_fp8
from eyas.store.format import StoreSpec, row_key
from eyas.store.reader import StoreReader
from eyas.store.shards import ShardFile, StoredRow, checksum, stored_row, write_shard
from eyas.store.spool import RowSpool
from eyas.store.writer import Sealer, publish

IDENTITY = {"weights_hash": "abc", "dtype": "bfloat16", "norm": "1.0", "engine": "fixed", "engine_version": "1"}
SPEC = StoreSpec((1, 3), 8, "lossless", IDENTITY, 1)


def make_row(number: int, tokens: int, spec: StoreSpec = SPEC) -> tuple[Any, Any]:
    random = np.random.default_rng([number, tokens])
    shape = (tokens, len(spec.layers), spec.hidden_size)
    values = random.standard_normal(shape).astype(np.float32)
    return random.integers(0, 50000, tokens).astype(np.int32), (values.view(np.uint32) >> 16).astype(np.uint16)


def make_rows(count: int, spec: StoreSpec, first: int = 0) -> list[tuple[Any, Any]]:
    return [make_row(number, 40 + number * 37 % 211, spec) for number in range(first, first + count)]


def fill(spool: RowSpool, rows: list[tuple[Any, Any]]) -> list[str]:
    return [spool.write(*row) for row in rows]


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def wide(codec: str = "lossless") -> StoreSpec:
    """About seven rows to a shard of 1 MiB."""
    return StoreSpec((1, 3), 256, codec, IDENTITY, 1)


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_every_bit_pattern_comes_back(tmp_path: Path, codec: str) -> None:
    spec = replace(SPEC, codec=codec)
    spool = RowSpool(tmp_path / "rows", spec)
    every = np.random.default_rng(0).permutation(np.arange(65536, dtype=np.uint16)).reshape(-1, 2, 8)
    special = np.array([0x7FC0, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x807F], np.uint16)
    rows = [
        (np.arange(len(every), dtype=np.int32), every),
        (np.array([-1], np.int32), np.broadcast_to(special, (1, 2, 8))),
    ]
    keys = fill(spool, rows)
    publish(spool, tmp_path / "store", spec, keys)
    with StoreReader(tmp_path / "store") as reader:
        assert reader.keys == keys
        for key, (ids, hidden) in zip(keys, rows, strict=True):
            row = reader.read(key)
            assert np.array_equal(row.input_ids, ids)
            assert np.array_equal(row.hidden_TLH, hidden)


def test_fp8_is_the_codecs_value_and_says_that_it_is_lossy(tmp_path: Path) -> None:
    spec = wide("fp8")
    spool = RowSpool(tmp_path / "rows", spec)
    rows = make_rows(9, spec)
    keys = fill(spool, rows)
    manifest = publish(spool, tmp_path / "store", spec, keys)
    reader = StoreReader(tmp_path / "store")
    for key, (_, hidden) in zip(keys, rows, strict=True):
        assert np.array_equal(reader.read(key).hidden_TLH, decode_fp8(*encode_fp8(hidden)))
    assert manifest.to_json()["lossy"] is True
    with h5py.File(tmp_path / "store" / manifest.shards[0].name) as file:
        assert file.attrs["lossy"] == 1
        assert file["hidden_states"].attrs["dtype"] == b"float8_e4m3fn"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    codec=st.sampled_from(["none", "lossless"]),
    hidden=st.sampled_from([1, 3, 64]),
)
def test_any_row_lengths(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], codec: str, hidden: int) -> None:
    folder = tmp_path_factory.mktemp("store")
    spec = StoreSpec((0, 5, 9), hidden, codec, IDENTITY, 1)
    spool = RowSpool(folder / "rows", spec)
    rows = [make_row(number, length, spec) for number, length in enumerate(lengths)]
    keys = fill(spool, rows)
    publish(spool, folder / "store", spec, keys)
    reader = StoreReader(folder / "store")
    assert reader.lengths == lengths
    hidden_buffer, ids_buffer = np.zeros((800, 3, hidden), np.uint16), np.zeros(800, np.int32)
    for key, (ids, states) in zip(keys, rows, strict=True):
        tokens = reader.read_into(key, hidden_buffer, ids_buffer)
        assert np.array_equal(hidden_buffer[:tokens], states)
        assert np.array_equal(ids_buffer[:tokens], ids)


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_completion_order_leaves_no_trace(tmp_path: Path, codec: str) -> None:
    spec = wide(codec)
    rows = make_rows(30, spec)
    stores = []
    for name, order in [("a", range(30)), ("b", np.random.default_rng(1).permutation(30))]:
        spool = RowSpool(tmp_path / name / "rows", spec)
        for index in order:
            spool.write(*rows[index])
        keys = [row_key(spec.fingerprint, ids) for ids, _ in rows]
        publish(spool, tmp_path / name / "store", spec, keys)
        stores.append(digests(tmp_path / name / "store"))
    assert stores[0] == stores[1]
    assert len(stores[0]) > 3


def test_workers_and_blosc_threads_leave_no_trace(tmp_path: Path) -> None:
    spec = wide()
    spool = RowSpool(tmp_path / "one" / "rows", spec)
    keys = fill(spool, make_rows(30, spec))
    publish(spool, tmp_path / "one" / "store", spec, keys)
    other = RowSpool(tmp_path / "two" / "rows", spec)
    fill(other, make_rows(30, spec))
    script = tmp_path / "publish.py"
    script.write_text(
        "import pickle, sys\nfrom eyas.store.writer import publish\n"
        "if __name__ == '__main__':\n    publish(*pickle.load(open(sys.argv[1], 'rb')), workers=2)\n"
    )
    import pickle

    (tmp_path / "arguments").write_bytes(pickle.dumps((other, tmp_path / "two" / "store", spec, keys)))
    environment = os.environ | {"BLOSC_NTHREADS": "4"}
    subprocess.run([sys.executable, script, tmp_path / "arguments"], check=True, env=environment)
    assert digests(tmp_path / "one" / "store") == digests(tmp_path / "two" / "store")


def test_sealing_while_rows_arrive_leaves_no_trace(tmp_path: Path) -> None:
    spec = wide()
    rows = make_rows(40, spec)
    plain = RowSpool(tmp_path / "plain" / "rows", spec)
    keys = fill(plain, rows)
    publish(plain, tmp_path / "plain" / "store", spec, keys)
    rolling = RowSpool(tmp_path / "rolling" / "rows", spec)
    lengths = {key: len(row[0]) for key, row in zip(keys, rows, strict=True)}
    with Sealer(rolling, spec, lengths, workers=2) as sealer:
        for first in range(0, len(rows), 8):
            for row in rows[first : first + 8][::-1]:
                sealer.wait_for_room()
                rolling.write(*row)
    assert len(list((tmp_path / "rolling" / "shards").glob("shard-*.h5"))) > 2
    assert len(rolling.loose()) < 20
    assert all(rolling.has(key) for key in keys)
    assert rolling.keys() == sorted(keys)
    publish(rolling, tmp_path / "rolling" / "store", spec, keys)
    assert digests(tmp_path / "plain" / "store") == digests(tmp_path / "rolling" / "store")


def test_sealing_stops_where_recording_does_and_tells_of_its_errors(tmp_path: Path) -> None:
    spec = wide()
    rows = make_rows(40, spec)
    lengths = {row_key(spec.fingerprint, ids): len(ids) for ids, _ in rows}
    spool = RowSpool(tmp_path / "work" / "rows", spec)
    with Sealer(spool, spec, lengths, workers=1):
        spool.write(*rows[0])
    assert len(spool.loose()) == 1
    torn = tmp_path / "work" / "rows" / f"{spool.loose()[0]}.row"
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(EyasError, match="run the extraction again"), Sealer(spool, spec, lengths, workers=1):
        fill(spool, rows[1:])


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_a_file_that_may_not_grow_is_an_error_of_the_disk_wherever_it_shows(tmp_path: Path, codec: str) -> None:
    spec = wide(codec)
    rows = {row_key(spec.fingerprint, row[0]): row for row in make_rows(4, spec)}

    def source(key: str) -> StoredRow:
        return stored_row(codec, rows[key][0], rows[key][1], checksum(rows[key][1]))

    def write(name: str) -> None:
        write_shard(tmp_path / name, spec, list(rows), [len(row[0]) for row in rows.values()], source)

    write("whole.h5")
    size = (tmp_path / "whole.h5").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for limit in (100, size // 2, *range(size - 6000, size, 500), size - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            with pytest.raises(OSError):
                write(f"{limit}.h5")
            assert not list(tmp_path.glob(f"*{limit}.h5*"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_torn_loose_row_is_missing_and_removed(tmp_path: Path) -> None:
    spool = RowSpool(tmp_path / "work" / "rows", SPEC)
    keys = fill(spool, make_rows(3, SPEC))
    path = tmp_path / "work" / "rows" / f"{keys[1]}.row"
    path.write_bytes(path.read_bytes()[:-1])
    again = RowSpool(tmp_path / "work" / "rows", SPEC)
    assert again.arrived(keys[1])
    assert again.missing([*keys, "0" * 32]) == [keys[1], "0" * 32]
    assert not again.arrived(keys[1])


def test_adding_rows_leaves_earlier_shards_as_they_are(tmp_path: Path) -> None:
    spec = wide()
    spool = RowSpool(tmp_path / "work" / "rows", spec)
    keys = fill(spool, make_rows(30, spec))
    publish(spool, tmp_path / "store", spec, keys)
    before = digests(tmp_path / "store")
    more = fill(spool, make_rows(3, spec, first=100))
    publish(spool, tmp_path / "store", spec, more[:1] + keys[::-1] + more[1:])
    after = digests(tmp_path / "store")
    shards = {name: md5 for name, md5 in before.items() if name != "manifest.json"}
    assert shards.items() <= after.items()
    assert len(after) == len(before) + 1
    assert StoreReader(tmp_path / "store").keys == more[:1] + keys[::-1] + more[1:]


def test_a_pulled_store_on_another_machine_is_reused(tmp_path: Path) -> None:
    spec = wide()
    spool = RowSpool(tmp_path / "first" / "rows", spec)
    keys = fill(spool, make_rows(30, spec))
    publish(spool, tmp_path / "store", spec, keys)
    elsewhere = RowSpool(tmp_path / "second" / "rows", spec)
    assert elsewhere.adopt(tmp_path / "store") == []
    assert len(elsewhere.published()) > 1
    assert all(elsewhere.has(key) for key in keys)
    more = fill(elsewhere, make_rows(2, spec, first=100))
    publish(elsewhere, tmp_path / "again", spec, keys + more)
    before, after = digests(tmp_path / "store"), digests(tmp_path / "again")
    assert {name for name in before if name != "manifest.json"} < set(after)
    name = StoreReader(tmp_path / "store").shard_of(keys[0])
    assert (tmp_path / "store" / name).stat().st_ino == (tmp_path / "again" / name).stat().st_ino


def test_removing_rows_rewrites_no_shard_and_brings_them_back_for_nothing(tmp_path: Path) -> None:
    spec = wide()
    spool = RowSpool(tmp_path / "work" / "rows", spec)
    rows = make_rows(30, spec)
    keys = fill(spool, rows)
    publish(spool, tmp_path / "store", spec, keys)
    before = digests(tmp_path / "store")
    publish(spool, tmp_path / "store", spec, keys[::2])
    after = digests(tmp_path / "store")
    assert {name for name in after if name != "manifest.json"} <= set(before)
    assert all(before[name] == md5 for name, md5 in after.items() if name != "manifest.json")
    assert StoreReader(tmp_path / "store").keys == keys[::2]
    publish(spool, tmp_path / "store", spec, keys)
    assert digests(tmp_path / "store") == before


def test_another_codec_takes_the_same_rows(tmp_path: Path) -> None:
    spec, plain = wide("lossless"), wide("none")
    spool = RowSpool(tmp_path / "work" / "rows", spec)
    rows = make_rows(10, spec)
    keys = fill(spool, rows)
    publish(spool, tmp_path / "store", spec, keys)
    changed = RowSpool(tmp_path / "work" / "rows", plain)
    assert all(changed.has(key) for key in keys)
    publish(changed, tmp_path / "store", plain, keys)
    reader = StoreReader(tmp_path / "store")
    assert {shard.codec for shard in reader.manifest.shards} == {"none"}
    assert np.array_equal(reader.read(keys[4]).hidden_TLH, rows[4][1])


def test_none_can_be_mapped_into_memory(tmp_path: Path) -> None:
    spec = wide("none")
    spool = RowSpool(tmp_path / "work" / "rows", spec)
    rows = make_rows(3, spec)
    publish(spool, tmp_path / "store", spec, fill(spool, rows))
    [path] = (tmp_path / "store").glob("*.h5")
    with h5py.File(path) as file:
        states = file["hidden_states"]
        mapped = np.memmap(path, "<u2", "r", states.id.get_offset(), states.shape)
    assert np.array_equal(mapped[: len(rows[0][0])], rows[0][1])


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_prefetching_asks_for_every_chunk_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    spec = StoreSpec((1, 3), 1024, codec, IDENTITY, 4)
    spool = RowSpool(tmp_path / "rows", spec)
    publish(spool, tmp_path / "store", spec, fill(spool, [make_row(number, 200, spec) for number in range(4)]))
    [path] = (tmp_path / "store").glob("*.h5")
    asked: set[int] = set()

    def advise(_: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        assert length <= 128 << 10  # of a longer one Linux leaves out what a disk does not take in one request
        asked.update(range(offset, offset + length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    with ShardFile(path) as shard, h5py.File(path) as file:
        shard.prefetch(1)
        if codec == "none":
            assert not asked
            return
        states = file["hidden_states"].id
        chunks = [states.get_chunk_info(number) for number in range(states.get_num_chunks())]
        tokens = file["hidden_states"].chunks[0]
        first, end = shard.offsets[1], shard.offsets[2]
        own = [chunk for chunk in chunks if first - tokens < chunk.chunk_offset[0] < end]
        assert len(own) == 2 * 4  # rows of 200 tokens, chunks of 64
        wanted = {byte for chunk in own for byte in range(chunk.byte_offset, chunk.byte_offset + chunk.size)}
        assert wanted <= asked
        assert len(asked) < len(wanted) + (128 << 10)
        assert shard._chunks is not None
        shard._chunks._places[int(first) // tokens * tokens, 0, 0] = (
            1 << 62,
            1 << 40,
            0,
        )  # damage: a chunk far past the end
        asked.clear()
        shard.prefetch(1)
        assert len(asked) <= path.stat().st_size + (128 << 10)


def test_the_format_document_reads_a_store_with_h5py_alone(tmp_path: Path) -> None:
    spec = wide()
    spool = RowSpool(tmp_path / "work" / "rows", spec)
    rows = make_rows(12, spec)
    keys = fill(spool, rows)
    publish(spool, tmp_path / "store", spec, keys)
    text = (Path(__file__).parents[2] / "docs" / "store-format.md").read_text()
    code = text.split("```python\n", 1)[1].split("```", 1)[0]
    space: dict[str, Any] = {}
    exec(code, space)
    for key, (ids, hidden) in zip(keys, rows, strict=True):
        read_ids, read_hidden = space["read_row"](tmp_path / "store", key)
        assert np.array_equal(read_ids, ids)
        assert np.array_equal(read_hidden, hidden)


def test_a_key_that_is_nowhere_is_an_error(tmp_path: Path) -> None:
    spool = RowSpool(tmp_path / "rows", SPEC)
    keys = fill(spool, make_rows(2, SPEC))
    with pytest.raises(EyasError, match="neither"):
        publish(spool, tmp_path / "store", SPEC, [*keys, "0" * 32])
    with pytest.raises(EyasError, match="no rows"):
        publish(spool, tmp_path / "store", SPEC, [])
    assert not (tmp_path / "store").exists()


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    spool = RowSpool(tmp_path / "rows", SPEC)
    ids, hidden = make_row(0, 5)
    for bad_ids, bad_hidden in [
        (ids[:4], hidden),
        (ids, hidden[:, :1]),
        (ids, hidden.view(np.int16)),
        (ids[:0], hidden[:0]),
    ]:
        with pytest.raises(EyasError, match="expected uint16"):
            spool.write(bad_ids, bad_hidden)


def test_checksums_are_zlibs() -> None:
    _, hidden = make_rows(1, SPEC)[0]
    for array in (hidden, hidden[:0], hidden.view(np.uint8)):
        assert checksum(array) == zlib.crc32(array.tobytes())


@pytest.mark.parametrize("fault", ["short", "flipped", "empty", "renamed"])
def test_a_loose_row_that_is_not_whole_is_absent(tmp_path: Path, fault: str) -> None:
    spool = RowSpool(tmp_path / "rows", SPEC)
    key, other = fill(spool, make_rows(2, SPEC))
    path = tmp_path / "rows" / f"{key}.row"
    content = bytearray(path.read_bytes())
    if fault == "flipped":
        content[-3] ^= 16
    path.write_bytes({"short": content[:-1], "flipped": content, "empty": b"", "renamed": content}[fault])
    if fault == "renamed":
        (tmp_path / "rows" / f"{other}.row").write_bytes(content)
        key = other
    again = RowSpool(tmp_path / "rows", SPEC)
    assert not again.has(key)
    assert key not in again.keys()  # noqa: SIM118
    with pytest.raises(EyasError):
        again.read(key)


def _write_some(directory: Path, numbers: list[int]) -> None:
    spool = RowSpool(directory, wide())
    for number in numbers:
        spool.write(*make_rows(1, wide(), first=number)[0])


def test_two_processes_write_rows_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_some, args=(tmp_path / "rows", list(range(20)))) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    spool = RowSpool(tmp_path / "rows", wide())
    rows = make_rows(20, wide())
    keys = [row_key(wide().fingerprint, ids) for ids, _ in rows]
    assert spool.keys() == sorted(keys)
    publish(spool, tmp_path / "store", wide(), keys)
    assert np.array_equal(StoreReader(tmp_path / "store").read(keys[7]).hidden_TLH, rows[7][1])


def test_the_fingerprint_changes_with_what_decides_the_bits_and_with_nothing_else() -> None:
    same = [replace(SPEC, codec="none"), replace(SPEC, shard_mib=77)]
    assert {spec.fingerprint for spec in same} == {SPEC.fingerprint}
    others = [
        replace(SPEC, layers=(1, 4)),
        replace(SPEC, hidden_size=16),
        replace(SPEC, codec="fp8"),
        *[replace(SPEC, identity=IDENTITY | {name: "other"}) for name in IDENTITY],
    ]
    prints = [spec.fingerprint for spec in others]
    assert len({SPEC.fingerprint, *prints}) == len(others) + 1
    assert all(spec.differences(SPEC) for spec in others)
    assert SPEC.differences(replace(SPEC, codec="none")) == []
    assert replace(SPEC, layers=(1, 4)).differences(SPEC) == ["layers: [1, 3] → [1, 4]"]


def test_a_store_of_another_fingerprint_is_left_alone_and_says_why(tmp_path: Path) -> None:
    spool = RowSpool(tmp_path / "a" / "rows", SPEC)
    publish(spool, tmp_path / "store", SPEC, fill(spool, make_rows(2, SPEC)))
    newer = RowSpool(tmp_path / "b" / "rows", replace(SPEC, identity=IDENTITY | {"engine_version": "2"}))
    assert newer.adopt(tmp_path / "store") == ["engine_version: 1 → 2"]
    assert newer.keys() == []


def test_specification_survives_json() -> None:
    assert StoreSpec.from_json(SPEC.to_json()) == SPEC
    with pytest.raises(EyasError, match="codec"):
        StoreSpec.from_json(SPEC.to_json() | {"codec": "zip"})
