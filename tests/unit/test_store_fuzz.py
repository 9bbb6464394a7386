"""Damaged manifests and shards give the original bits or a clear error. `benchmarks/store/fuzz.py` has the damage."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.store.fuzz import (
    DATASET_CHANGES,
    GOOD,
    Original,
    all_rebuilt,
    damaged_bytes,
    damaged_manifest,
    lookup3,
    random_cases,
    read_and_compare,
    run_cases,
)
from eyas.errors import EyasError
from eyas.store.format import CODECS, Manifest
from eyas.store.fsck import store_info
from eyas.store.reader import StoreReader


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    return {codec: Original.make(tmp_path_factory.mktemp(codec), codec) for codec in CODECS}


def bad(cases: list[str], folder: Path) -> dict[str, tuple[str, str]]:
    """In a process of their own: a damaged file may hang or crash the HDF5 library."""
    outcomes = run_cases(cases, folder)
    assert len(outcomes) == len(cases)
    return {case: outcome for case, outcome in outcomes.items() if outcome[0] not in GOOD}


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=st.randoms(use_true_random=False), codec=st.sampled_from(CODECS))
def test_any_manifest_is_read_as_it_is_or_refused(
    originals: dict[str, Original], tmp_path: Path, source: random.Random, codec: str
) -> None:
    original = originals[codec]
    content = damaged_manifest(original, source)
    (tmp_path / "manifest.json").write_bytes(content)
    (tmp_path / original.shard).write_bytes(original.content)
    (tmp_path / original.other).write_bytes(original.other_content)
    try:
        manifest = Manifest.read(tmp_path)
    except EyasError as error:
        assert str(tmp_path / "manifest.json") in str(error)
        for read in (StoreReader, store_info):
            with pytest.raises(EyasError) as again:
                read(tmp_path)
            assert str(again.value) == str(error)
        return
    assert manifest.to_json() == json.loads(content)
    assert store_info(tmp_path)["rows"] == len(manifest.rows)
    try:
        read_and_compare(tmp_path, original.truth)
    except EyasError as error:
        assert str(tmp_path) in str(error)


def test_the_damage_gets_past_the_librarys_own_checksums(originals: dict[str, Original]) -> None:
    assert [lookup3(text) for text in (b"", b"Four score and seven years ago")] == [0xDEADBEEF, 0x17770551]
    for codec, original in originals.items():
        assert len(original.structures) >= 10
        changed = [damaged_bytes(original, random.Random(f"{codec}{number}")) for number in range(50)]
        sealed = [
            all(
                lookup3(content[start:end]) == int.from_bytes(content[end : end + 4], "little")
                for start, end in original.structures
            )
            for content in changed
        ]
        assert 10 < sum(sealed) < 50


def test_any_bytes_of_a_shard(tmp_path: Path) -> None:
    assert bad(random_cases("bytes", 150, 0), tmp_path) == {}


def test_datasets_and_attributes_of_another_kind(tmp_path: Path) -> None:
    cases = all_rebuilt()
    chosen = [case for case in cases if case.startswith(("rebuilt/lossless/hidden_states", "rebuilt/none/row_offsets"))]
    chosen += [case for case in cases if case.startswith(("rebuilt/fp8/scales", "room/lossless", "chunk/", "file/"))]
    others = {case for case in cases if case.endswith(("a huge row", "exchanged", "unused bits"))} | set(cases[::29])
    chosen += sorted(others - set(chosen))
    assert len(chosen) > 3 * len(DATASET_CHANGES)
    assert bad(chosen, tmp_path) == {}
