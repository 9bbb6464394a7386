"""A server in a process of its own, for the tests that start vLLM for real."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_PATIENCE_SECONDS = 600


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str], port: int, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start a server and wait for it; gives its base URL. Its output is ``server.log`` in the folder that it runs in."""
    log = folder / "server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + _PATIENCE_SECONDS
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)
