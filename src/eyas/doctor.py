"""Is this machine fit to run Eyas? Each check says what it found and, where something is wrong, what to do.

Takes nothing but the machine and the checkout; gives `Finding`s. Needs neither vLLM nor torch to be imported.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas.environment import ENGINES, installed_differences, installed_engine
from eyas.errors import EyasError

Verdict = Literal["good", "advice", "fault"]
_GIB = 2**30
_FICLONE = 0x40049409
_MIN_DISK_GIB, _ENOUGH_DISK_GIB = 2, 10
_MIN_MEMORY_GIB, _ENOUGH_MEMORY_GIB = 3, 8


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    verdict: Verdict
    text: str


def examine() -> Iterator[Finding]:
    """Run every check, cheapest first."""
    yield _python()
    yield _versions()
    yield from _engine()
    yield _git()
    yield _links()
    yield _disk()
    yield _memory()
    yield _cores()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info < (3, 13):
        return Finding(
            "python", "fault", f"{version}; the locks are for 3.11 and 3.12: remove .venv, then `make setup`"
        )
    return Finding("python", "good", f"{version} in {sys.prefix}")


def _versions() -> Finding:
    differences = installed_differences()
    if differences:
        return Finding("versions", "fault", f"{'; '.join(differences)}: run `make setup`")
    return Finding("versions", "good", "as locked")


def _engine() -> Iterator[Finding]:
    engine = installed_engine()
    if engine is None:
        yield Finding("engine", "fault", "no vLLM is installed: run `make setup`")
        return
    torch = importlib.metadata.version("torch")
    # a CPU lock leaves the CUDA libraries out, so PyPI's torch would not even import
    if engine == "cpu" and not torch.endswith("+cpu"):
        yield Finding(
            "engine",
            "fault",
            f"torch {torch} is not the CPU build; give a folder that has it for this Python in UV_FIND_LINKS, "
            "or let `make setup` reach PyTorch's own index, after removing .venv",
        )
        return
    gpus = _gpus()
    if engine == "cuda" and not gpus:
        yield Finding("engine", "fault", "the CUDA build, but nvidia-smi shows no GPU: mend the driver, or ENGINE=cpu")
        return
    if engine == "cpu" and gpus:
        yield Finding("engine", "advice", f"the CPU build, but there is {gpus[0]}: `make setup ENGINE=cuda` uses it")
        return
    package = ENGINES[engine]
    yield Finding("engine", "good", f"{package} {importlib.metadata.version(package)}, torch {torch}")
    if engine == "cpu":
        yield _dtype()
    else:
        yield Finding("gpus", "good", f"{len(gpus)}: {', '.join(sorted(set(gpus)))}")


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    result = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []


def _dtype() -> Finding:
    flags = next(
        (set(line.split()) for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")),
        set(),
    )
    if "avx2" not in flags:
        return Finding("dtype", "fault", "this processor has no AVX2, which vLLM's CPU build needs")
    fast = sorted(flags & {"avx512_bf16", "amx_bf16"})
    if fast:
        return Finding("dtype", "good", f"bfloat16 is fast here ({', '.join(fast)})")
    return Finding(
        "dtype", "advice", "no AVX-512-BF16 or AMX: target.dtype and train.autocast float32 are 5 to 7 times faster"
    )


def _git() -> Finding:
    if shutil.which("git") is None:
        return Finding("git", "fault", "not found; DVC and the provenance need it: install git")
    inside = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False)
    if inside.returncode != 0:
        return Finding("git", "fault", f"this is no Git checkout ({inside.stderr.strip()}): clone the repository")
    return Finding("git", "good", "checkout found")


def _links() -> Finding:
    """DVC's own idea of a link: only the first type in ``cache.type`` is used without a byte copy into the cache."""
    from dvc.config import Config, ConfigError

    try:
        config = Config.from_cwd()["cache"]
    except ConfigError as error:
        raise EyasError(f".dvc/config: {error}") from error
    types = list(config.get("type") or ["reflink", "copy"])
    cache = Path(config.get("dir") or ".dvc/cache")
    cache.mkdir(parents=True, exist_ok=True)
    Path("data").mkdir(exist_ok=True)
    able = [
        name for name, link in (("reflink", _reflink), ("hardlink", os.link)) if _can_link(link, Path("data"), cache)
    ]
    found = f"cache.type {','.join(types)}; data/ and {cache} share {' and '.join(able) or 'no links'}"
    if not able:
        return Finding("links", "advice", f"{found}: each output is kept twice; put both on one filesystem")
    if types[0] not in able:
        better = ",".join([able[0], "symlink"])
        return Finding(
            "links", "advice", f"{found}: `dvc config --local cache.type {better}` saves a copy of each output"
        )
    return Finding("links", "good", found)


def _reflink(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())


def _can_link(link: object, source_folder: Path, target_folder: Path) -> bool:
    assert callable(link)
    with (
        tempfile.NamedTemporaryFile(dir=source_folder, prefix=".doctor-", suffix=".tmp") as source,
        tempfile.TemporaryDirectory(dir=target_folder, prefix=".doctor-") as folder,
    ):
        source.write(b"eyas")
        source.flush()
        try:
            link(Path(source.name), Path(folder) / "link")
        except OSError:
            return False
        return True


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / _GIB
    text = f"{free:.0f} GiB free here"
    if free < _MIN_DISK_GIB:
        return Finding("disk", "fault", f"{text}; even the smoke profile needs {_MIN_DISK_GIB}: free some")
    if free < _ENOUGH_DISK_GIB:
        return Finding("disk", "advice", f"{text}: enough for the smoke profile, not for much more")
    return Finding("disk", "good", text)


def _memory() -> Finding:
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (value := limit.read_text().strip()).isdigit():
        used = int((limit.parent / "memory.current").read_text())
        available = min(available, int(value) - used)
    text = f"{available / _GIB:.1f} GiB available"
    if available < _MIN_MEMORY_GIB * _GIB:
        return Finding("memory", "fault", f"{text}; the smoke profile needs {_MIN_MEMORY_GIB}: stop something")
    if available < _ENOUGH_MEMORY_GIB * _GIB:
        return Finding("memory", "advice", f"{text}: enough for the smoke profile, not for much more")
    return Finding("memory", "good", text)


def _cores() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return Finding("cores", "good", f"{usable}" if usable == present else f"{usable} of {present}")
