from __future__ import annotations

import json
import pickle
import random
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from eyas.errors import EyasError
from eyas.files import value_hash
from eyas.store.cli import app
from eyas.store.format import Manifest, StoreSpec
from eyas.store.fsck import compact, store_info, verify_store
from eyas.store.reader import StoreReader
from eyas.store.shards import DamageError
from eyas.store.spool import RowSpool
from eyas.store.writer import publish

CODECS = ["none", "lossless", "fp8"]
HIDDEN = 64


def build(folder: Path, codec: str, rows: int = 60) -> list[str]:
    spec = StoreSpec((2, 4, 7), HIDDEN, codec, {"engine": "fixed", "weights_hash": "w"}, 1)
    spool = RowSpool(folder / "work" / "rows", spec)
    keys = []
    for number in range(rows):
        source = np.random.default_rng(number)
        tokens = 50 + number * 31 % 170
        values = source.standard_normal((tokens, 3, HIDDEN)).astype(np.float32)
        keys.append(
            spool.write(
                source.integers(0, 1000, tokens).astype(np.int32), (values.view(np.uint32) >> 16).astype(np.uint16)
            )
        )
    publish(spool, folder / "store", spec, keys)
    shutil.rmtree(folder / "work")
    return keys


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    made = {}
    for codec in CODECS:
        folder = tmp_path_factory.mktemp(codec)
        made[codec] = (folder / "store", build(folder, codec))
    return made


def copied(stores: dict[str, tuple[Path, list[str]]], codec: str, to: Path) -> tuple[Path, list[str], Path]:
    """A store that may be damaged, its keys, and its first key's shard."""
    shutil.copytree(stores[codec][0], to / "store")
    keys = stores[codec][1]
    shard = to / "store" / StoreReader(to / "store").shard_of(keys[0])
    shard.chmod(0o644)
    return to / "store", keys, shard


def flip(path: Path, dataset: str, element: tuple[int, ...]) -> None:
    with h5py.File(path, "r+") as file:
        value = file[dataset][element]
        changed = np.frombuffer(np.asarray(value).tobytes(), np.uint8).copy()
        changed[0] ^= 4
        file[dataset][element] = np.frombuffer(changed.tobytes(), file[dataset].dtype)[0]


@pytest.mark.parametrize("codec", CODECS)
def test_a_whole_store_has_no_damage(stores: dict[str, tuple[Path, list[str]]], codec: str) -> None:
    store, keys = stores[codec]
    assert verify_store(store, None, 1) == []
    assert verify_store(store, 7, 1) == []
    assert len(StoreReader(store).keys) == len(keys)


@pytest.mark.parametrize(("codec", "dataset"), [*product(CODECS, ["hidden_states", "input_ids"]), ("fp8", "scales")])
def test_a_flipped_bit_is_named(
    stores: dict[str, tuple[Path, list[str]]], tmp_path: Path, codec: str, dataset: str
) -> None:
    store, keys, shard = copied(stores, codec, tmp_path)
    with h5py.File(shard) as file:
        row, first = file["row_keys"][1].decode(), int(file["row_offsets"][1])
    size = shard.stat().st_size
    flip(shard, dataset, {"hidden_states": (first, 1, 5), "input_ids": (first,), "scales": (first, 1)}[dataset])
    if shard.stat().st_size == size:
        with pytest.raises(DamageError, match=f"{shard.name}, row {row}, dataset {dataset}"):
            StoreReader(store).read(row)
        assert StoreReader(store).read(keys[-1])
        [damage] = verify_store(store, None, 1)
        assert (damage.shard, damage.row, damage.dataset) == (shard.name, row, dataset)
    else:  # a chunk of other length went to the end of the file
        with pytest.raises(DamageError, match=shard.name):
            StoreReader(store)


def test_a_flipped_bit_in_compressed_bytes_is_named(stores: dict[str, tuple[Path, list[str]]], tmp_path: Path) -> None:
    store, keys, shard = copied(stores, "lossless", tmp_path)
    with h5py.File(shard) as file:
        chunk = file["hidden_states"].id.get_chunk_info(0)
    content = bytearray(shard.read_bytes())
    content[chunk.byte_offset + chunk.size // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamageError, match="hidden_states"):
        for key in keys:
            StoreReader(store).read(key)
    found = verify_store(store, None, 1)
    assert found
    assert {(damage.shard, damage.dataset) for damage in found} == {(shard.name, "hidden_states")}


@pytest.mark.parametrize("dataset", ["row_keys", "row_offsets", "hidden_crc32"])
def test_a_flipped_bit_in_the_index_is_named(
    stores: dict[str, tuple[Path, list[str]]], tmp_path: Path, dataset: str
) -> None:
    store, keys, shard = copied(stores, "none", tmp_path)
    flip(shard, dataset, (1,))
    with pytest.raises(DamageError, match=shard.name):
        StoreReader(store).read(keys[0])
    damages = verify_store(store, None, 1)
    assert {damage.shard for damage in damages} == {shard.name}
    assert all(damage.dataset for damage in damages)


@pytest.mark.parametrize("fault", ["truncated", "missing", "swapped", "zeroed"])
def test_a_shard_that_is_not_what_was_written(
    stores: dict[str, tuple[Path, list[str]]], tmp_path: Path, fault: str
) -> None:
    store, keys, shard = copied(stores, "lossless", tmp_path)
    size = shard.stat().st_size
    if fault == "truncated":
        shard.write_bytes(shard.read_bytes()[: size // 2])
    elif fault == "missing":
        shard.unlink()
    elif fault == "zeroed":
        shard.write_bytes(bytes(size))
    else:
        other = next(path for path in store.glob("*.h5") if path != shard)
        shard.write_bytes(other.read_bytes())
    with pytest.raises(DamageError, match=shard.name):
        StoreReader(store).read(keys[0])
    assert {damage.shard for damage in verify_store(store, None, 1)} == {shard.name}


@pytest.mark.parametrize("codec", CODECS)
def test_no_flipped_byte_ever_changes_what_is_read(
    stores: dict[str, tuple[Path, list[str]]], tmp_path: Path, codec: str
) -> None:
    original, keys = stores[codec]
    store, _, shard = copied(stores, codec, tmp_path)
    rows = [key for key in keys if StoreReader(original).shard_of(key) == shard.name]
    truth = {key: StoreReader(original).read(key) for key in rows}
    content = shard.read_bytes()
    source = random.Random(0)
    # headers and indices are at the ends, where most positions would miss them
    positions = [source.randrange(len(content)) for _ in range(40)]
    positions += [source.randrange(2048) for _ in range(60)] + [
        len(content) - 1 - source.randrange(6000) for _ in range(60)
    ]
    named = 0
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << source.randrange(8)
        shard.write_bytes(damaged)
        try:
            with StoreReader(store) as reader:
                for key in rows:
                    row = reader.read(key)
                    assert np.array_equal(row.input_ids, truth[key].input_ids)
                    assert np.array_equal(row.hidden_TLH, truth[key].hidden_TLH)
        except EyasError as error:
            assert shard.name in str(error)
            named += 1
    assert named > 40


def test_a_newer_manifest_is_refused(stores: dict[str, tuple[Path, list[str]]], tmp_path: Path) -> None:
    store, _, _ = copied(stores, "none", tmp_path)
    content = json.loads((store / "manifest.json").read_text())
    content["format_version"] = 2
    (store / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(EyasError, match="newer"):
        StoreReader(store)
    with pytest.raises(EyasError, match=r"manifest\.json"):
        StoreReader(tmp_path)


def test_a_row_moved_in_a_resealed_manifest_is_not_substituted(
    stores: dict[str, tuple[Path, list[str]]], tmp_path: Path
) -> None:
    store, keys, _ = copied(stores, "none", tmp_path)
    content = json.loads((store / "manifest.json").read_text())
    content["rows"][0][2], content["rows"][1][2] = content["rows"][1][2], content["rows"][0][2]
    del content["sha256"]
    (store / "manifest.json").write_text(json.dumps(content | {"sha256": value_hash(content)}))
    with pytest.raises(EyasError, match=keys[0]):
        StoreReader(store).read(keys[0])
    assert {damage.row for damage in verify_store(store, None, 1)} == set(keys[:2])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [path] + [found for name, inner in items for found in _paths(inner, (*path, name))]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), replacement=JSON, resealed=st.booleans())
def test_any_manifest_gives_a_store_or_a_clear_error(
    stores: dict[str, tuple[Path, list[str]]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    replacement: Any,
    resealed: bool,
) -> None:
    original, keys = stores["none"]
    content = json.loads((original / "manifest.json").read_text())
    path = data.draw(st.sampled_from(_paths(content)))
    if path:
        parent = content
        for name in path[:-1]:
            parent = parent[name]
        parent[path[-1]] = replacement
    else:
        content = replacement
    if resealed and isinstance(content, dict):
        content.pop("sha256", None)
        try:
            content["sha256"] = value_hash(content)
        except (ValueError, UnicodeEncodeError):
            return
    folder = tmp_path_factory.mktemp("fuzz")
    for shard in original.glob("*.h5"):
        (folder / shard.name).hardlink_to(shard)
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    try:
        with StoreReader(folder) as reader:
            for key in reader.keys:
                assert key in keys
                assert np.array_equal(reader.read(key).input_ids, StoreReader(original).read(key).input_ids)
    except EyasError:
        pass


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.just(b"[" * 100_000) | st.just(b'{"a":' * 100_000))
def test_any_bytes_as_manifest_give_a_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(EyasError):
        Manifest.read(tmp_path)


def test_a_damaged_shard_is_not_adopted(
    stores: dict[str, tuple[Path, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, keys, shard = copied(stores, "none", tmp_path)
    shard.write_bytes(shard.read_bytes()[:-1])
    spool = RowSpool(tmp_path / "work" / "rows", Manifest.read(store).spec)
    assert spool.adopt(store) == []
    assert len(spool.published()) == len(Manifest.read(store).shards) - 1
    assert shard.name in capsys.readouterr().err.replace("\n", "")
    assert not spool.has(keys[0])
    assert spool.has(keys[-1])


@pytest.mark.parametrize("codec", CODECS)
def test_compacting_keeps_live_rows_bit_for_bit(
    stores: dict[str, tuple[Path, list[str]]], tmp_path: Path, codec: str
) -> None:
    store, keys = stores[codec]
    spec = Manifest.read(store).spec
    spool = RowSpool(tmp_path / "work" / "rows", spec)
    reader = StoreReader(store)
    first = reader.shard_of(keys[0])
    kept = [key for number, key in enumerate(keys) if number % 3 == 0 or reader.shard_of(key) != first]
    spool.adopt(store)
    publish(spool, tmp_path / "store", spec, kept)
    assert store_info(tmp_path / "store")["dead_rows"]
    compact(tmp_path / "store", tmp_path / "store")
    assert store_info(tmp_path / "store")["dead_rows"] == 0
    assert verify_store(tmp_path / "store", None, 1) == []
    compacted = StoreReader(tmp_path / "store")
    assert compacted.keys == kept
    for key in kept:
        assert np.array_equal(compacted.read(key).hidden_TLH, reader.read(key).hidden_TLH)
        if reader.shard_of(key) != first:
            assert compacted.shard_of(key) == reader.shard_of(key)


def test_a_reader_goes_to_another_process(stores: dict[str, tuple[Path, list[str]]]) -> None:
    store, keys = stores["lossless"]
    reader = StoreReader(store)
    reader.read(keys[0])
    again = pickle.loads(pickle.dumps(reader))  # noqa: S301
    assert np.array_equal(again.read(keys[0]).hidden_TLH, reader.read(keys[0]).hidden_TLH)
    error = pickle.loads(pickle.dumps(DamageError(Path("a"), "b", "c", "d")))  # noqa: S301
    assert "row b" in str(error)


def test_command_line(stores: dict[str, tuple[Path, list[str]]], tmp_path: Path) -> None:
    store, keys, shard = copied(stores, "lossless", tmp_path)
    run = CliRunner()
    assert run.invoke(app, ["verify", str(store), "--workers", "2"]).exit_code == 0
    shown = json.loads(run.invoke(app, ["info", str(store), "--json"]).stdout)
    assert shown["rows"] == len(keys)
    assert shown["ratio"] > 1.2
    assert "fingerprint" in run.invoke(app, ["info", str(store)]).stdout
    assert run.invoke(app, ["compact", str(store)]).exit_code == 0
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run.invoke(app, ["verify", str(store), "--sample", "60"]).exit_code == 1
    assert run.invoke(app, ["verify", str(tmp_path)]).exit_code == 1
