"""Stages as real processes: one writer, clear ends, no orphans, metrics and provenance."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "stages.act"]
SCRIPT = """
import errno, json, os, time
from pathlib import Path

from eyas.errors import EyasError
from eyas.stage import Stage, stage_main


def run(stage: Stage) -> None:
    os.system("echo noise of an engine")
    act = os.environ["ACT"]
    if act == "wait":
        Path("started.tmp").write_text(str(os.getpid()))
        Path("started.tmp").rename("started")
        while not Path("go").exists():
            time.sleep(0.02)
    elif act == "fault":
        raise EyasError("data/x: row [row] of [/data] is bad; mend it in [2, 15]")
    elif act == "bug":
        raise ValueError("boom [bold]")
    elif act == "full":
        raise OSError(errno.ENOSPC, "No space left on device", "data/smoke/shard.h5")
    Path("environment.json").write_text(json.dumps(dict(os.environ)))
    stage.provenance["tokens"] = 7
    stage.write_metrics({"tokens": 7, "pid": os.getpid()})


if __name__ == "__main__":
    stage_main("act", run)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which `python -m stages.act smoke` runs."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "act.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes to end after the test, whatever became of it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(folder: Path, act: str, *arguments: str, command: list[str] = COMMAND) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env=os.environ | {"ACT": act},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status, and all that the user saw."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_a_good_end(checkout: Path) -> None:
    (checkout / "machine.yaml").write_text("threads: 3\n")
    process = start(checkout, "end", "smoke")
    assert finish(process) == (0, "")  # the engine's noise goes to the log
    assert "noise of an engine" in (checkout / ".work/smoke/logs/act.log").read_text()
    metrics = json.loads((checkout / "metrics/smoke/act.json").read_text())
    assert metrics == {"tokens": 7, "pid": process.pid}  # the process that DVC knows is the one that works
    provenance = json.loads((checkout / "metrics/smoke/provenance/act.json").read_text())
    assert (provenance["stage"], provenance["profile"], provenance["tokens"]) == ("act", "smoke", 7)
    assert provenance["params"]["target"]["source"] == "bundled:smollm2-135m"
    assert provenance["placement"]["threads"] == 3
    assert {"python", "torch", "transformers"} <= set(provenance["versions"])
    assert provenance["wall_seconds"] >= 0
    assert provenance["peak_memory_mib"] > 0
    environment = json.loads((checkout / "environment.json").read_text())
    assert environment["PYTHONHASHSEED"] == "0"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment.get("OMP_NUM_THREADS", "3") == "3"


def test_a_second_process_is_refused_while_the_first_works(
    checkout: Path, started: list[subprocess.Popen[str]]
) -> None:
    first = start(checkout, "wait", "smoke")
    started.append(first)
    wait_for((checkout / "started").exists)
    status, seen = finish(start(checkout, "end", "smoke"))
    assert status == 1
    assert seen == f"error: act@smoke is running already (pid {first.pid}); wait for it or stop it\n"
    assert not (checkout / "metrics").exists()
    (checkout / "go").touch()
    assert finish(first) == (0, "")
    assert finish(start(checkout, "end", "smoke")) == (0, "")


@pytest.mark.parametrize("shell", [["/bin/sh", "-c"], ["/bin/bash", "--noprofile", "--norc", "-c"]])
def test_a_stage_dies_with_dvc(checkout: Path, started: list[subprocess.Popen[str]], shell: list[str]) -> None:
    # DVC starts a stage's command through a shell and, killed, leaves it running; not every shell makes way by itself
    written: str = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]["prepare"]["do"]["cmd"]
    command = written.replace("python", sys.executable).replace("stages.prepare", "stages.act")
    child = [*shell, command.replace("${item}", "smoke")]
    parent = start(checkout, "wait", command=[sys.executable, "-c", f"import subprocess; subprocess.run({child!r})"])
    started.append(parent)
    wait_for((checkout / "started").exists)
    pid = int((checkout / "started").read_text())
    assert alive(pid)
    try:
        parent.kill()
        wait_for(lambda: not alive(pid), seconds=20)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    with (checkout / ".work/smoke/act.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a rerun may start at once


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("fault", "error: data/x: row [row] of [/data] is bad; mend it in [2, 15]\n"),
        ("full", "error: act: the disk is full (data/smoke/shard.h5); free some space and run again, "
         "finished work is kept\n"),
        ("bug", "error: act: unexpected ValueError: boom [bold]\n(engine log: .work/smoke/logs/act.log)\n"),
    ],
)  # fmt: skip
def test_a_bad_end_is_one_message(checkout: Path, act: str, message: str) -> None:
    status, seen = finish(start(checkout, act, "smoke"))
    assert status == 1
    assert seen == message
    assert not (checkout / "metrics").exists()
    log = (checkout / ".work/smoke/logs/act.log").read_text()
    assert ("Traceback" in log) == (act == "bug")


def test_a_disk_without_room_is_found_before_the_stage_begins(checkout: Path) -> None:
    (checkout / "data").symlink_to("/proc")  # a file system that never has any
    status, seen = finish(start(checkout, "end", "smoke"))
    assert (status, "error: act: 0 MiB are free on the disk of data/, a stage needs 1024 at the least" in seen) == (
        1,
        True,
    )
    assert "`make gc` shows what may go" in seen
    assert not (checkout / "environment.json").exists()


def test_an_interrupt_is_one_message(checkout: Path, started: list[subprocess.Popen[str]]) -> None:
    # a shell's background job ignores the interrupt and hands that on; a process with a handler hands on the default
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = start(checkout, "wait", "smoke")
    finally:
        signal.signal(signal.SIGINT, before)
    started.append(process)
    wait_for((checkout / "started").exists)
    process.send_signal(signal.SIGINT)
    assert finish(process) == (1, "error: act: interrupted; run again to go on\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smokee"], "error: params.yaml: no profile `smokee`; did you mean `smoke`?\n"),
        ([], "error: usage: python -m stages.act PROFILE\n"),
    ],
)
def test_a_wrong_call_is_one_message(checkout: Path, arguments: list[str], message: str) -> None:
    assert finish(start(checkout, "end", *arguments)) == (1, message)
    assert not (checkout / ".work").exists()
