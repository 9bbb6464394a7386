"""`eyas cache fsck` and `gc` on a real cache that DVC filled."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from eyas.keeping import fsck, gc
from eyas.keeping.cache import Cache, open_cache, read_lock
from eyas.keeping.cli import app
from eyas.store.format import StoreSpec
from eyas.store.spool import RowSpool
from eyas.store.writer import publish
from tests.stub_pipeline import StubCheckout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> StubCheckout:
    made = StubCheckout(tmp_path_factory.mktemp("built"))
    made.repro("vocab@smoke")
    made.commit("built")
    return made


@pytest.fixture
def checkout(built: StubCheckout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the built checkout, hard links between its files included, as the current directory."""
    subprocess.run(["cp", "-a", built.folder, tmp_path / "checkout"], check=True)
    folder = tmp_path / "checkout"
    (folder / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {tmp_path / 'state'}\n")
    monkeypatch.chdir(folder)
    return folder


def eyas_cache(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "400"})
    return result.exit_code, " ".join((result.output + str(result.exception or "")).split())


def dvc(*arguments: str) -> str:
    result = subprocess.run([sys.executable, "-m", "dvc", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True, capture_output=True)


def object_of(path: str) -> str:
    """The object that the lock records for an output."""
    stages = read_lock(Path("dvc.lock").read_text(), "dvc.lock")
    return next(str(out["md5"]) for entry in stages.values() for out in entry["outs"] if out["path"] == path)


def corrupt(path: Path) -> None:
    """Flip a bit in place and keep the times, as a failing disk does."""
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as stream:
        first = stream.read(1)
        stream.seek(0)
        stream.write(bytes([first[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_sound_cache_has_no_fault_and_says_what_was_never_here(checkout: Path) -> None:
    code, output = eyas_cache("fsck")
    assert code == 0
    assert "no damaged" in output
    lock = checkout / "dvc.lock"
    lock.write_text(lock.read_text() + Path("dvc.lock").read_text().partition("stages:\n")[2].replace("smoke", "rtx"))
    lock.write_text(re.sub(r"(rtx/vocab\n\s+hash: md5\n\s+md5: )\w+", r"\g<1>" + "7" * 32, lock.read_text()))
    code, output = eyas_cache("fsck")
    assert code == 0
    assert "not here (no damage): data/rtx/vocab; `make pull PROFILE=rtx`" in output


def test_damage_is_named_quarantined_and_its_links_are_told(checkout: Path) -> None:
    name = object_of("data/smoke/target.json")
    cache = open_cache()
    corrupt(cache.path(name))
    bytes_before = cache.path(name).read_bytes()
    code, output = eyas_cache("fsck", "--dry-run")
    assert code == 1
    assert f"damaged: {name}: its bytes have MD5" in output
    assert "the same file: data/smoke/target.json" in output
    assert "`make fsck` moves what is damaged to quarantine and fetches it" in output
    assert cache.path(name).exists()
    code, output = eyas_cache("fsck")
    assert code == 1
    assert not cache.path(name).exists()
    assert (cache.quarantine / name).read_bytes() == bytes_before
    assert "no remote is set" in output
    assert "`make repro PROFILE=…`" in output
    assert "prepare@smoke" in dvc("status")  # DVC does not take the damaged file for good either
    code, output = eyas_cache("fsck")
    assert (code, "not here (no damage): data/smoke/target.json" in output) == (0, True), output


def test_a_remote_gives_back_files_and_listings_and_the_checkout_gets_them(checkout: Path) -> None:
    pushed_to(checkout.parent / "remote")
    cache = open_cache()
    file, listing = object_of("data/smoke/target.json"), object_of("data/smoke/tokens")
    good = Path("data/smoke/target.json").read_bytes()
    corrupt(cache.path(file))
    corrupt(cache.path(listing))
    lost = cache.listed(object_of("data/smoke/vocab"))[0]
    cache.path(lost).unlink()
    code, output = eyas_cache("fsck")
    assert code == 1
    assert (
        f"incomplete: listing {object_of('data/smoke/vocab')}: 1 of its objects are not here, {lost} for one" in output
    )
    assert "fetched again: 3 of 3" in output
    assert Path("data/smoke/target.json").read_bytes() == good
    assert Path("data/smoke/target.json").stat().st_ino == cache.path(file).stat().st_ino
    assert eyas_cache("fsck")[0] == 0
    assert dvc("status", "vocab@smoke", "--with-deps").strip() == "Data and pipelines are up to date."


def test_a_damaged_remote_is_not_believed(checkout: Path) -> None:
    pushed_to(checkout.parent / "remote")
    cache = open_cache()
    name = object_of("data/smoke/target.json")
    corrupt(cache.path(name))
    corrupt(checkout.parent / "remote/files/md5" / name[:2] / name[2:])
    code, output = eyas_cache("fsck")
    assert code == 1
    assert "fetched again: 0 of 1" in output
    assert f"({name}): damaged on the remote; remove it there" in output
    assert not cache.path(name).exists()
    (checkout.parent / "remote/files/md5" / name[:2] / name[2:]).unlink()
    lost = cache.listed(object_of("data/smoke/vocab"))[0]
    cache.path(lost).unlink()
    (checkout.parent / "remote/files/md5" / lost[:2] / lost[2:]).unlink()
    code, output = eyas_cache("fsck")
    assert code == 1
    assert f"not fetched: .dvc/cache/files/md5/{lost[:2]}/{lost[2:]} ({lost}): missing on the remote" in output


def test_a_damaged_shard_is_named_and_fetched_or_to_be_repaired(checkout: Path) -> None:
    shard = publish_store(checkout)
    pushed_to(checkout.parent / "remote")
    assert eyas_cache("fsck")[0] == 0
    cache = open_cache()
    good = shard.read_bytes()
    name = hashlib.md5(good).hexdigest()
    assert shard.stat().st_ino == cache.path(name).stat().st_ino
    corrupt(shard)
    code, output = eyas_cache("fsck")
    assert code == 1
    assert f"damaged: {name}: its bytes have MD5" in output
    assert f"the same file: {shard}" in output
    assert "fetched again: 1 of 1" in output
    assert "eyas store repair" not in output  # nothing is left to extract
    assert shard.read_bytes() == good
    assert eyas_cache("fsck")[0] == 0

    shutil.copy(
        shard, shard.with_suffix(".tmp")
    )  # a copy, as DVC makes across file systems: the cache knows nothing of it
    shard.with_suffix(".tmp").replace(shard)
    with shard.open("r+b") as stream:
        stream.truncate(len(good) - 1)
    code, output = eyas_cache("fsck")
    assert (code, f"`eyas store repair {shard.parent}` extracts just that again" in output) == (1, True), output


def publish_store(checkout: Path) -> Path:
    """A real store as the profile's hidden states, recorded by DVC; gives one of its shards."""
    spec = StoreSpec((1, 2), 16, "none", {"engine": "fixed"}, 1)
    spool = RowSpool(checkout.parent / "rows", spec)
    source = np.random.default_rng(0)
    states = source.integers(1, 30_000, (8, 2, 16), dtype=np.uint16)
    keys = [spool.write(source.integers(0, 99, 8).astype(np.int32), states) for _ in range(3)]
    publish(spool, Path("data/smoke/hidden_states"), spec, keys)
    for file in ("metrics/smoke/extract.json", "metrics/smoke/provenance/extract.json"):
        Path(file).write_text('{"rows": 3}')
    dvc("commit", "--force", "extract@smoke")
    return next(Path("data/smoke/hidden_states").glob("*.h5"))


def test_a_lock_that_names_what_never_was_is_found(checkout: Path) -> None:
    lock = Path("dvc.lock")
    good, name = lock.read_text(), object_of("data/smoke/target.json")
    other = name.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))
    lock.write_text(good.replace(name, other))
    code, output = eyas_cache("fsck")
    assert code == 1
    assert f"dvc.lock: names {other} for data/smoke/target.json, which was never here; HEAD's names {name}" in output
    assert "`git restore dvc.lock`" in output
    assert "prepare@smoke" in dvc("status")  # nothing is built upon it
    lock.write_text(good[: good.index("  vocab@smoke:")])
    code, output = eyas_cache("fsck")
    assert (code, "dvc.lock: lacks stages that HEAD's has (vocab@smoke): `git diff dvc.lock`" in output) == (1, True)
    git("restore", "dvc.lock")
    assert eyas_cache("fsck")[0] == 0


def test_metrics_and_lock_are_checked_too(checkout: Path) -> None:
    metrics = Path("metrics/smoke/encode.json")
    metrics.write_text('{"value": 77}')
    code, output = eyas_cache("fsck")
    assert (code, "metrics/smoke/encode.json: not what the stage wrote" in output) == (1, True)
    git("restore", str(metrics))
    Path("dvc.lock").write_text("<<<<<<< ours\n" + Path("dvc.lock").read_text())
    code, output = eyas_cache("fsck")
    assert code == 1
    assert "`git restore dvc.lock` gives back the committed one" in output


def pushed_to(remote: Path) -> None:
    """Set a default remote and copy the objects to it; a remote is laid out as the cache is."""
    with Path(".dvc/config.local").open("a") as stream:
        stream.write(f"    remote = store\n['remote \"store\"']\n    url = {remote}\n")
    shutil.copytree(".dvc/cache/files", remote / "files")


def names(rubbish: tuple[gc.Rubbish, ...]) -> set[str]:
    return {r.path.parent.name + r.path.name for r in rubbish}


def put(cache: Cache, text: str) -> str:
    """An object that nothing names."""
    name = hashlib.md5(text.encode()).hexdigest()
    cache.path(name).parent.mkdir(exist_ok=True)
    cache.path(name).write_text(text)
    return name


def test_gc_shows_first_and_removes_only_what_nothing_names(checkout: Path) -> None:
    cache = open_cache()
    before = set(cache.objects())
    rubbish = put(cache, "rubbish")
    linked = put(cache, "linked from scratch")
    Path(".work").mkdir(exist_ok=True)
    os.link(cache.path(linked), ".work/scratch")
    old = cache.path("ab" + "0" * 30).with_name("cut.tmp")
    old.parent.mkdir(exist_ok=True)
    old.write_text("half")
    os.utime(old, (0, 0))
    code, output = eyas_cache("gc")
    assert code == 0
    assert "to go: 1 objects, 0 records of runs, 1 cut-off transfers" in output
    assert f"files/md5/{rubbish[:2]}/{rubbish[2:]}" in output
    assert "`make gc YES=1` removes them" in output
    assert cache.path(rubbish).exists()
    assert eyas_cache("gc", "--yes")[0] == 0
    assert set(cache.objects()) == before | {linked}
    assert not old.exists()


@pytest.mark.parametrize("keeper", ["branch", "tag", "stash", "index", "worktree", "amended"])
def test_gc_keeps_what_any_commit_names(checkout: Path, keeper: str) -> None:
    cache = open_cache()
    name = put(cache, keeper)
    lock = Path("dvc.lock")
    text = lock.read_text()
    changed = re.sub(r"(data/smoke/target.json\n\s+hash: md5\n\s+md5: )\w+", rf"\g<1>{name}", text)
    assert changed != text
    if keeper == "branch":
        git("checkout", "-qb", "side")
    lock.write_text(changed)
    if keeper in ("branch", "tag", "amended"):
        git("commit", "-qam", "another")
    if keeper == "branch":
        git("checkout", "-q", "main")
    if keeper == "tag":
        git("tag", "kept")
        git("reset", "-q", "--hard", "HEAD~1")
        git("reflog", "expire", "--expire=now", "--all")
    if keeper == "amended":
        lock.write_text(text)
        git("commit", "-qa", "--amend", "--allow-empty", "-m", "other")
    if keeper == "stash":
        git("stash")
    if keeper == "index":
        git("add", "dvc.lock")
        lock.write_text(text)
    assert name not in names(gc.plan(cache, only_head=False).objects)
    head = name in names(gc.plan(cache, only_head=True).objects)
    assert head == (keeper not in ("worktree",))


def test_only_head_lets_earlier_runs_go_with_their_records(checkout: Path, built: StubCheckout) -> None:
    cache = open_cache()
    first = set(cache.objects())
    listing = object_of("data/smoke/vocab")
    old = {listing, *cache.listed(listing)}
    with Path("stages/vocab.py").open("a") as stream:
        stream.write("# a remark\n")
    path = os.pathsep.join([str(built.bin), str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "-q", "vocab@smoke"], env=os.environ | {"PATH": path}, check=True
    )
    git("add", "-A")
    git("commit", "-qm", "second run")
    assert not gc.plan(cache, only_head=False).all
    code, output = eyas_cache("gc", "--only-head", "--yes")
    # the output, its listing, and the two metrics files that the run's record can give back
    assert (code, "4 objects, 1 records of runs" in output) == (0, True), output
    assert len(gone := first - set(cache.objects())) == 4
    assert gone >= old
    assert eyas_cache("fsck")[0] == 0
    assert dvc("status", "vocab@smoke", "--with-deps").strip() == "Data and pipelines are up to date."


def test_gc_refuses_when_it_cannot_know(checkout: Path) -> None:
    cache = open_cache()
    listing = object_of("data/smoke/tokens")
    corrupt(cache.path(listing))
    code, output = eyas_cache("gc", "--yes")
    assert (code, f"listing {listing} is damaged" in output) == (1, True)
    fsck.quarantine(cache, listing)
    code, output = eyas_cache("gc", "--yes")
    assert (code, "nobody can say which objects it names" in output) == (1, True)
    git("clone", "-q", "--depth", "1", f"file://{checkout}", "../shallow")
    os.chdir("../shallow")
    code, output = eyas_cache("gc")
    assert (code, "git fetch --unshallow" in output) == (1, True)
