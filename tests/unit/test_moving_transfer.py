"""Pushing and fetching one profile, with a folder as the remote: what goes over, in which order, and every kind of damage."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from eyas.errors import EyasError
from eyas.moving.fetching import fetch
from eyas.moving.objects import open_repo
from eyas.moving.pushing import check, push
from eyas.moving.rclone import Rclone
from eyas.moving.remote import set_remote
from eyas.moving.transfer import Transfer
from tests.moving_checkout import TinyCheckout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:dvc")
SHARD = "data/one/hidden_states/a.h5"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckout:
    made = TinyCheckout(tmp_path_factory.mktemp("built") / "eyas")
    made.set_params(["one", "two"])
    result = made.dvc("repro")
    assert result.returncode == 0, result.stderr
    made.commit("built")
    return made


class Pair:
    """A built checkout, its remote, and a way to look at both."""

    def __init__(self, checkout: TinyCheckout, remote: Path) -> None:
        self.checkout, self.remote = checkout, remote

    def push(self, profile: str = "one") -> tuple[int, int]:
        moved = push(Transfer(open_repo()), profile)
        return moved.objects, moved.there

    def fetch(self, profile: str = "one") -> int:
        return fetch(Transfer(open_repo()), profile).objects

    def there(self) -> set[str]:
        return {f.parent.name + f.name for f in (self.remote / "files/md5").rglob("*") if f.is_file()}

    def oid(self, path: str) -> str:
        lines = (self.checkout.folder / "dvc.lock").read_text()
        entry = lines.split(f"- path: {path}\n")[-1]
        return entry.split("md5: ")[1].split("\n")[0]

    def shard(self, top: Path, name: str = "a") -> Path:
        """Where a shard's object is below a cache or remote."""
        for file in (top / "files/md5").rglob("*"):
            if file.is_file() and file.read_bytes()[:1] == name.encode() and file.stat().st_size == 100_000:
                return file
        raise AssertionError(f"no object of shard {name} below {top}")


def spoil(file: Path) -> None:
    """Other bytes of the same number."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    file.write_bytes(content)
    file.chmod(0o444)


@pytest.fixture
def pair(built: TinyCheckout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    folder = tmp_path / "eyas"
    shutil.copytree(built.folder, folder, symlinks=True)
    copy = TinyCheckout.__new__(TinyCheckout)
    copy.folder = folder
    monkeypatch.chdir(folder)
    set_remote(open_repo(), str(tmp_path / "remote"))
    return Pair(copy, tmp_path / "remote")


def test_just_the_profile_s_objects_go_over_and_only_once(pair: Pair) -> None:
    assert pair.push() == (5, 0)  # three shards, their list, the report
    assert {pair.oid("data/one/hidden_states"), pair.oid("data/one/report")} < pair.there()
    assert pair.push() == (0, 5)
    assert check(Transfer(open_repo()), "one", content=True) == 5


def test_an_object_that_went_missing_is_named_and_sent_again(pair: Pair) -> None:
    pair.push()
    pair.shard(pair.remote).unlink()
    with pytest.raises(EyasError, match=rf"{SHARD} \(\w+\): missing"):
        check(Transfer(open_repo()), "one")
    assert pair.push() == (1, 4)


def test_an_object_that_was_cut_short_is_named_and_replaced(pair: Pair) -> None:
    pair.push()
    cut = pair.shard(pair.remote)
    content = cut.read_bytes()
    cut.unlink()
    cut.write_bytes(content[:70_000])
    with pytest.raises(EyasError, match="70000 bytes there, 100000 here"):
        check(Transfer(open_repo()), "one")
    assert pair.push() == (1, 4)
    assert cut.read_bytes() == content


def test_other_bytes_on_the_remote_are_found_and_never_fetched(pair: Pair) -> None:
    pair.push()
    spoil(pair.shard(pair.remote))
    with pytest.raises(EyasError, match=rf"{SHARD} \(\w+\): other bytes than its name says"):
        check(Transfer(open_repo()), "one", content=True)
    shutil.rmtree(pair.checkout.objects)
    with pytest.raises(EyasError, match=rf"{SHARD} \(\w+\): damaged on the remote"):
        pair.fetch()
    present = [f for f in pair.checkout.objects.rglob("*") if f.is_file()]
    assert len(present) == 3  # the other shards and the report: neither the damaged one nor the list that names it


def test_a_damaged_object_of_the_cache_is_not_sent_nor_is_the_list_that_names_it(pair: Pair) -> None:
    spoil(pair.shard(pair.checkout.folder / ".dvc/cache"))
    with pytest.raises(EyasError, match=rf"{SHARD}: damaged in DVC's cache"):
        pair.push()
    assert pair.oid("data/one/hidden_states") not in pair.there()


def test_what_is_nowhere_is_named_before_anything_is_sent(pair: Pair) -> None:
    pair.shard(pair.checkout.folder / ".dvc/cache").unlink()
    with pytest.raises(EyasError, match=rf"neither in DVC's cache nor on the remote:\n  {SHARD}"):
        pair.push()
    assert pair.there() == set()


def test_a_push_goes_on_where_it_was(pair: Pair) -> None:
    pair.push()
    kept = pair.shard(pair.remote, "b")
    written = kept.stat().st_mtime_ns
    shutil.move(kept, pair.remote / "kept")
    shutil.rmtree(pair.remote / "files")
    kept.parent.mkdir(parents=True)
    shutil.move(pair.remote / "kept", kept)
    assert pair.push() == (4, 1)
    assert kept.stat().st_mtime_ns == written


def test_rclone_moves_the_files_there_and_back(pair: Pair) -> None:
    rclone = Rclone.found("50M")
    moved = push(Transfer(open_repo()), "one", via=rclone)
    assert (moved.objects, moved.there) == (5, 0)
    assert check(Transfer(open_repo()), "one", content=True) == 5
    assert push(Transfer(open_repo()), "one", via=rclone).objects == 0
    cut = pair.shard(pair.remote)
    cut.chmod(0o644)
    cut.write_bytes(b"short")
    assert push(Transfer(open_repo()), "one", via=rclone).objects == 1
    assert check(Transfer(open_repo()), "one", content=True) == 5
    before = {f.name: f.read_bytes() for f in pair.checkout.objects.rglob("*") if f.is_file()}
    shutil.rmtree(pair.checkout.objects)
    assert fetch(Transfer(open_repo()), "one", via=rclone).objects == 5
    files = [f for f in pair.checkout.objects.rglob("*") if f.is_file()]
    assert {f.name: f.read_bytes() for f in files}.items() <= before.items()
    assert all(f.stat().st_mode & 0o222 == 0 for f in files)
    assert not Transfer(open_repo()).incoming.exists()


def test_rclone_takes_no_damaged_object_in_either_direction(pair: Pair) -> None:
    rclone = Rclone.found(None)
    pair.push()
    spoil(pair.shard(pair.remote))
    shutil.copytree(pair.checkout.objects, pair.checkout.folder.parent / "kept")
    shutil.rmtree(pair.checkout.objects)
    with pytest.raises(EyasError, match=rf"{SHARD} \(\w+\): damaged on the remote"):
        fetch(Transfer(open_repo()), "one", via=rclone)
    assert len([f for f in pair.checkout.objects.rglob("*") if f.is_file()]) == 3
    shutil.rmtree(pair.checkout.objects)
    shutil.copytree(pair.checkout.folder.parent / "kept", pair.checkout.objects)
    shutil.rmtree(pair.remote / "files")
    spoil(pair.shard(pair.checkout.folder / ".dvc/cache"))
    with pytest.raises(EyasError, match=rf"{SHARD}: damaged in DVC's cache"):
        push(Transfer(open_repo()), "one", via=rclone)
    assert pair.there() == set()


def test_rclone_s_own_failure_is_an_error(pair: Pair) -> None:
    with pytest.raises(EyasError, match="rclone failed with status"):
        push(Transfer(open_repo()), "one", via=Rclone.found("fast"))
    assert pair.there() == set()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--via", "scp"], "only `rclone` is known"),
        (["--bwlimit", "1M"], "add VIA=rclone"),
    ],
)
def test_a_way_that_is_not_there(pair: Pair, options: list[str], words: str) -> None:
    result = pair.checkout.run(sys.executable, "-m", "eyas.moving", "push", "one", *options)
    assert result.returncode == 1
    assert words in " ".join(result.stderr.split())


def test_a_machine_without_rclone_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EyasError, match="no `rclone` in PATH; `apt-get install rclone`"):
        Rclone.found(None)


def test_fetched_objects_are_whole_and_read_only(pair: Pair) -> None:
    pair.push()
    before = {f.name: f.read_bytes() for f in pair.checkout.objects.rglob("*") if f.is_file()}
    shutil.rmtree(pair.checkout.objects)
    assert pair.fetch() == 5
    files = [f for f in pair.checkout.objects.rglob("*") if f.is_file()]
    assert all(before[f.name] == f.read_bytes() and f.stat().st_mode & 0o222 == 0 for f in files)
    assert pair.fetch() == 0


def test_what_a_killed_fetch_left_goes_after_a_day(pair: Pair) -> None:
    pair.push()
    fresh, old = (pair.shard(pair.checkout.folder / ".dvc/cache").with_name(f".{name}.tmp") for name in ("new", "old"))
    fresh.write_bytes(b"half")
    old.write_bytes(b"half")
    os.utime(old, (0, 0))
    pair.fetch()
    assert fresh.exists()
    assert not old.exists()


@pytest.mark.parametrize(
    ("profile", "words"),
    [("three", "no profile `three`"), ("two", "`two` is not active"), ("one", "nothing of `one` was built yet")],
)
def test_profiles_that_cannot_be_pushed(pair: Pair, profile: str, words: str) -> None:
    (pair.checkout.folder / "dvc.lock").unlink()
    pair.checkout.set_params(["one"])
    with pytest.raises(EyasError, match=words):
        pair.push(profile)


def test_a_remote_whose_folder_is_gone(pair: Pair) -> None:
    shutil.rmtree(pair.remote)
    with pytest.raises(EyasError, match="there is no such folder"):
        pair.push()
    assert not pair.remote.exists()
