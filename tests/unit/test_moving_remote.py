"""Setting a remote: what is written, what is refused, what is said."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from eyas.errors import EyasError
from eyas.moving.objects import open_repo
from eyas.moving.remote import open_remote, remote_kind, remote_url, set_remote
from tests.moving_checkout import TinyCheckout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:dvc")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyCheckout:
    made = TinyCheckout(tmp_path / "eyas")
    monkeypatch.chdir(made.folder)
    return made


def config_local(checkout: TinyCheckout) -> Path:
    return checkout.folder / ".dvc/config.local"


def test_a_folder_is_made_and_only_the_untracked_file_is_written(checkout: TinyCheckout, tmp_path: Path) -> None:
    assert set_remote(open_repo(), "../remote") == str(tmp_path / "remote")
    assert (tmp_path / "remote").is_dir()
    status = subprocess.run(["git", "status", "--porcelain"], cwd=checkout.folder, capture_output=True, check=True)
    assert status.stdout == b""
    repo = open_repo()
    assert remote_url(repo) == str(tmp_path / "remote")
    settings = {"url": str(tmp_path / "remote"), "verify": True, "jobs": 4}
    assert settings.items() <= repo.config["remote"]["store"].items()
    assert stat.S_IMODE(config_local(checkout).stat().st_mode) == 0o600


def test_own_settings_stay_with_the_kind(checkout: TinyCheckout, tmp_path: Path) -> None:
    set_remote(open_repo(), str(tmp_path / "one"))
    checkout.dvc("remote", "modify", "--local", "store", "type", "symlink")
    checkout.dvc("config", "--local", "core.checksum_jobs", "3")
    set_remote(open_repo(), str(tmp_path / "two"), transfers=9)
    config = open_repo().config
    settings = {"url": str(tmp_path / "two"), "verify": True, "jobs": 9, "type": ["symlink"]}
    assert settings.items() <= config["remote"]["store"].items()
    assert config["core"]["checksum_jobs"] == 3


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ssh://me:secret@host/eyas", "holds a password"),
        ("http://host/eyas", "not a remote that Eyas knows"),
        ("s3:///eyas", "not a remote that Eyas knows"),
        ("cache", "inside the checkout"),
        ("/nowhere/eyas", "/nowhere is not there"),
    ],
)
def test_refused_urls_change_nothing(checkout: TinyCheckout, url: str, words: str) -> None:
    with pytest.raises(EyasError, match=words) as caught:
        set_remote(open_repo(), url)
    assert "secret" not in str(caught.value)
    assert not config_local(checkout).exists()


def test_an_endpoint_is_for_s3(checkout: TinyCheckout, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="ENDPOINT is for S3 only"):
        set_remote(open_repo(), str(tmp_path / "remote"), endpoint="http://127.0.0.1:1")


def test_a_machine_that_does_not_answer_changes_nothing(checkout: TinyCheckout) -> None:
    with pytest.raises(EyasError, match=r"ssh://127.0.0.1:1/eyas: the remote failed"):
        set_remote(open_repo(), "ssh://127.0.0.1:1/eyas")
    assert not config_local(checkout).exists()


def test_without_a_remote_the_message_says_how_to_set_one(checkout: TinyCheckout) -> None:
    with pytest.raises(EyasError, match="make remote URL="):
        open_remote(open_repo())


def test_kinds() -> None:
    assert remote_kind("/mnt/x") == "folder"
    assert remote_kind("ssh://me@host:22/x") == "ssh"
    assert remote_kind("s3://bucket/x") == "s3"
