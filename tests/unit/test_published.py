"""What DVC's cache has of earlier stores, with the real DVC in a repository of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eyas.errors import EyasError
from eyas.extraction.extract import adopt_published, check_disk
from eyas.published import cached_stores
from eyas.store.format import StoreSpec
from eyas.store.spool import RowSpool
from eyas.store.writer import publish

SPEC = StoreSpec((1, 2), 16, "none", {"engine": "fixed", "engine_version": "1"}, 1)
PIPELINE = """stages:
  extract:
    foreach: [one, two]
    do:
      cmd: mkdir -p data/${item} && cp -r source-${item} data/${item}/hidden_states
      deps:
        - source-${item}
      outs:
        - data/${item}/hidden_states
"""


def row(number: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(number)
    return source.integers(0, 99, 8).astype(np.int32), source.integers(1, 30_000, (8, 2, 16), dtype=np.uint16)


def dvc(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    before = Path.cwd()
    os.chdir(folder)
    subprocess.run(["git", "init", "-q"], check=True)
    dvc("init", "-q")
    dvc("config", "cache.type", "hardlink,symlink")
    for name, numbers in (("one", range(3)), ("two", range(2, 5))):
        spool = RowSpool(Path("made") / name / "rows", SPEC)
        publish(spool, Path(f"source-{name}"), SPEC, [spool.write(*row(number)) for number in numbers])
    Path("dvc.yaml").write_text(PIPELINE)
    dvc("repro", "-q")
    shutil.rmtree("made")
    shutil.rmtree("data")
    os.chdir(before)
    return folder


def test_what_the_disk_cannot_hold_is_not_begun(tmp_path: Path) -> None:
    check_disk(tmp_path, 1000, SPEC, workers=2)
    with pytest.raises(EyasError, match=r"extraction of 10+ tokens needs up to .* GiB on .*; free some space"):
        check_disk(tmp_path, 10**15, SPEC, workers=2)


def test_shards_of_all_profiles_are_taken_from_the_cache(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    assert {store.profile for store in cached_stores()} == {"one", "two"}
    spool = RowSpool(Path("fresh/rows"), SPEC)
    adopt_published(spool, "one")
    assert len(spool.published()) == 2
    assert len(spool.keys()) == 5
    links = {shard.stat().st_nlink for shard in Path("fresh/shards").glob("shard-*.h5")}
    assert min(links) >= 2  # the cache's own file under another name
    assert sorted(path.name for path in Path("fresh").iterdir()) == ["rows", "shards"]


def test_only_the_own_profile_s_differences_are_told(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repository)
    newer = StoreSpec((1, 2), 16, "none", {"engine": "fixed", "engine_version": "2"}, 1)
    spool = RowSpool(Path("newer/rows"), newer)
    adopt_published(spool, "one")
    assert spool.keys() == []
    assert capsys.readouterr().err.count("extraction starts afresh: engine_version: 1 → 2") == 1


def test_what_the_cache_lacks_is_named_and_left_out(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(repository, folder)
    monkeypatch.chdir(folder)
    (one,) = (store for store in cached_stores() if store.profile == "one")
    shard = next(name for name in one.files if name.startswith("shard-"))
    one.files[shard].unlink()
    spool = RowSpool(Path("partly/rows"), SPEC)
    adopt_published(spool, "one")
    assert len(spool.published()) == 1
    assert shard in capsys.readouterr().err
    manifest = one.files["manifest.json"]
    manifest.chmod(0o644)
    manifest.write_text(json.dumps({"format_version": 2}))
    adopt_published(RowSpool(Path("again/rows"), SPEC), "one")
    assert "one's earlier store is not reused" in capsys.readouterr().err
    Path("dvc.lock").write_text("<<<<<<< HEAD\n")
    with pytest.raises(EyasError, match=r"dvc\.lock"):
        cached_stores()


def test_without_a_lock_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cached_stores() == []
