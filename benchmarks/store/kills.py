"""Kills extraction at random moments, hundreds of times; every rerun must end in the bytes of an uninterrupted run.

    python benchmarks/store/kills.py --kills 200 --seed 0

A replayed engine, whose rows are functions of their number, completes rows in random order from two threads and another
process while shards are sealed, as the stage does. The wanted rows change now and then, as a user's data set does. Each run is a
process that is killed in one of these phases, which what it leaves behind shows:

    recording    rows arrive, no shard is being written
    sealing      a shard's temporary file is there
    publishing   between the last row and the rename of the store's directory
    cleaning     the new store is in place; the former one is not removed yet, or the scratch not cleared

What is killed: the process (SIGKILL, SIGTERM), one that writes shards (SIGKILL), or both at once. Some runs may not write files
beyond a limit, which is what a full disk looks like from inside.

After each completed run: all rows wanted, in their order, with the engine's bits; the store's files byte for byte those of a run
that was never killed and had the same published states before; shards published earlier unchanged; no row computed again
that had been recorded; no process and no temporary file left. Prints a line every 20 kills and a JSON summary; the
exit status is 1 when anything was violated.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import EyasError
from eyas.process import die_with_parent
from eyas.store.format import MANIFEST_NAME, StoreSpec, row_key
from eyas.store.reader import StoreReader
from eyas.store.shards import ShardFile
from eyas.store.spool import RowSpool
from eyas.store.writer import Sealer, publish

PHASES = ("recording", "sealing", "publishing", "cleaning")
KINDS = ("SIGKILL", "SIGTERM", "worker", "both")
SPEC = StoreSpec((1, 2, 3, 4), 128, "lossless", {"engine": "replayed"}, 1)
_ROWS = 60
_THREADS = 2
_SECONDS_PER_ROW = 0.06
_PATIENCE_SECONDS = 120.0
_FILE_LIMITS = (100_000, 900_000)  # a row has 80 to 330 kB, a shard nearly 1 MB
_NO_LIMIT = 1 << 40


def engine_row(number: int) -> tuple[Any, Any]:
    """Row ``number``: ids int32 [T], states uint16 [T, 4, 128]; about six rows make a shard."""
    source = np.random.default_rng(number)
    tokens = 80 + number * 53 % 240
    values = source.standard_normal((tokens, len(SPEC.layers), SPEC.hidden_size), dtype=np.float32)
    return source.integers(0, 1000, tokens).astype(np.int32), (values.view(np.uint32) >> 16).astype(np.uint16)


def _key(number: int) -> str:
    return row_key(SPEC.fingerprint, engine_row(number)[0])


# ---- the process that is killed


@dataclass(frozen=True)
class Run:
    """What one run is to do."""

    wanted: list[int]
    workers: int = 2
    slow: bool = True  # rows take time, so that shards are sealed meanwhile
    file_limit: int | None = None  # bytes that a file may have

    def write(self, folder: Path) -> None:
        """Leave the order for the process."""
        (folder / "run.json").write_text(json.dumps(vars(self)))


def extract(folder: Path) -> None:
    """What the stage does: take over the published store, record what is missing, publish."""
    run = Run(**json.loads((folder / "run.json").read_text()))
    spool = RowSpool(folder / "work" / "rows", SPEC)
    rows = {_key(number): number for number in run.wanted}
    lengths = {key: len(engine_row(number)[0]) for key, number in rows.items()}
    faulthandler.register(signal.SIGUSR1)
    print("ready", flush=True)
    if run.file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.file_limit, run.file_limit))
    if (folder / "store" / MANIFEST_NAME).exists():
        spool.adopt(folder / "store")
    missing = [rows[key] for key in spool.missing(lengths)]
    random.shuffle(missing)
    half = len(missing) // 2
    context = get_context("fork")  # a fork starts at once; nothing else has been started yet
    other = context.Process(target=_record_in_threads, args=(folder, missing[:half], run.slow, os.getpid()))
    other.start()
    with Sealer(spool, SPEC, lengths, run.workers) as sealer:
        _record_in_threads(folder, missing[half:], run.slow, None, sealer.wait_for_room)
        other.join()
    if lost := spool.missing(lengths):
        raise EyasError(f"{len(lost)} rows were not recorded")
    publish(spool, folder / "store", SPEC, list(lengths), run.workers)


def _record_in_threads(
    folder: Path,
    numbers: Sequence[int],
    slow: bool,
    parent: int | None,
    before_each: Callable[[], None] = lambda: None,
) -> None:
    if parent is not None:
        die_with_parent(parent)
    spool, queue = RowSpool(folder / "work" / "rows", SPEC), list(numbers)
    errors: list[Exception] = []

    def work() -> None:
        while queue and not errors:
            try:
                number = queue.pop()
            except IndexError:
                return
            try:
                before_each()
                _log(folder, "start", number)
                if slow:
                    time.sleep(random.expovariate(1 / _SECONDS_PER_ROW))
                spool.write(*engine_row(number))
                _log(folder, "end", number)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # a full disk: the other process's rows are then missing, which this one's caller notices
    if errors and parent is None:
        raise errors[0]


def _log(folder: Path, event: str, number: int) -> None:
    with (folder / "log").open("a") as log:
        log.write(f"{event} {number}\n")


def _run_and_report(folder: Path) -> int:
    """As the command line does it: a fault that the user can mend is one message and exit status 1."""
    try:
        extract(folder)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        print("error: the disk is full", file=sys.stderr)
        return 1
    return 0


# ---- what it leaves behind


def digests(directory: Path) -> dict[str, str]:
    """MD5 of each file by name."""
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def _manifest_text(folder: Path) -> bytes | None:
    try:
        return (folder / "store" / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        return None


def _published_names(folder: Path) -> list[str]:
    path = folder / "work" / "shards" / "published.json"
    return json.loads(path.read_text()) if path.exists() else []


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208  (a directory may come and go while this looks)
    except FileNotFoundError:
        return []


@dataclass
class Watched:
    """A folder in which one run after the other is at work, and what is known of it."""

    folder: Path
    before: bytes | None = None
    finished: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    asked: int = 0  # rows that the engine began in this run
    repeated: int = 0  # rows begun again that were in flight when an earlier run ended
    _read: int = 0

    def started(self) -> None:
        """A run begins: note the store that it finds."""
        self.before, self.asked = _manifest_text(self.folder), 0

    def computed(self) -> list[str]:
        """What is wrong with what the engine has been asked for since the last call."""
        path, faults = self.folder / "log", []
        if not path.exists():
            return []
        with path.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.decode().splitlines():
            event, number = line.split()[0], int(line.split()[1])
            if event == "end":
                self.finished.add(number)
                continue
            self.asked += 1
            if number in self.finished:
                faults.append(f"row {number} was recorded already and is computed again")
            self.repeated += number in self.begun
            self.begun.add(number)
        return faults

    def kept_only(self, numbers: set[int]) -> None:
        """Only these rows are here; others may be computed anew."""
        self.finished &= numbers
        self.begun &= numbers

    def phase(self, wanted: Sequence[int]) -> str:
        """Where the run is now, or was when it ended; `finished` when it has nothing left to do."""
        now = _manifest_text(self.folder)
        beside = any(name.startswith(".store.") for name in _names(self.folder))
        shards = set(_names(self.folder / "work" / "shards"))
        if now is not None and now != self.before:
            published = set(_published_names(self.folder))
            listed = {entry["name"] for entry in json.loads(now)["shards"]}
            loose = {f"{entry[0]}.row" for entry in json.loads(now)["rows"]} & set(
                _names(self.folder / "work" / "rows")
            )
            superseded = {name for name in shards if name.startswith("shard-")} - published
            return "cleaning" if beside or loose or superseded or not listed <= published else "finished"
        if beside:
            return "publishing"
        if any(name.startswith(".shard-") for name in shards):
            return "sealing"
        return "recording" if set(wanted) - self.finished else "publishing"


def _descendants(pid: int) -> dict[int, str]:
    """Command lines of a process's children and theirs."""
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for task in _names(Path(f"/proc/{parent}/task")):
            try:
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            for child in map(int, children):
                try:
                    found[child] = Path(f"/proc/{child}/cmdline").read_text()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                waiting.append(child)
    return found


def _alive(pid: int, command: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text() == command != ""
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- the loop


@dataclass
class Tally:
    """What has happened so far."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    full_disks: int = 0
    completed: int = 0
    states: int = 0
    rows_checked: int = 0
    rows_repeated: int = 0
    violations: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Kills by phase and kind."""
        lines = [f"{'':<12}" + "".join(f"{kind:>9}" for kind in (*KINDS, "all"))]
        for phase in PHASES:
            counts = [self.kills[phase, kind] for kind in KINDS]
            lines.append(f"{phase:<12}" + "".join(f"{count:>9}" for count in (*counts, sum(counts))))
        totals = [sum(self.kills[phase, kind] for phase in PHASES) for kind in KINDS]
        return "\n".join([*lines, f"{'all':<12}" + "".join(f"{count:>9}" for count in (*totals, sum(totals)))])

    def to_json(self) -> dict[str, Any]:
        """The summary."""
        by_phase = {phase: {kind: self.kills[phase, kind] for kind in KINDS} for phase in PHASES}
        return vars(self) | {"kills": by_phase, "total_kills": self.kills.total()}


def changed(wanted: Sequence[int], removed: list[int], source: random.Random) -> list[int]:
    """Another state of the data set: some rows less, a tenth more (some of them seen before), sometimes in another order."""
    rows = list(wanted)
    gone = source.sample(rows, source.randrange(max(1, len(rows) // 20)) + max(0, len(rows) - _ROWS))
    rows = [number for number in rows if number not in gone]
    removed += gone
    for _ in range(_ROWS // 10):
        if removed and source.random() < 0.3:
            rows.append(removed.pop(source.randrange(len(removed))))
        else:
            rows.append(max(*wanted, *removed, *rows, 0) + 1)
    if source.random() < 0.3:
        source.shuffle(rows)
    return rows


class Loop:
    """One data set's life: it changes, extraction runs, is killed and runs again."""

    def __init__(self, folder: Path, source: random.Random, tally: Tally) -> None:
        """``folder`` must be empty; the runs that are killed work in ``killed``, the others in ``plain``."""
        self.source, self.tally = source, tally
        self.killed, self.plain = folder / "killed", folder / "plain"
        self.killed.mkdir()
        self.plain.mkdir()
        self.watched = Watched(self.killed)
        self.wanted = list(range(_ROWS))
        self._removed: list[int] = []
        self._published: dict[str, str] = {}
        self._published_keys: set[str] = set()

    def violation(self, what: str) -> None:
        """Note it, with how far things were."""
        self.tally.violations.append(f"after {self.tally.kills.total()} kills: {what}")
        print(f"violation: {self.tally.violations[-1]}", flush=True)

    def _start(self, folder: Path, run: Run) -> subprocess.Popen[str]:
        run.write(folder)
        child = subprocess.Popen(
            [sys.executable, __file__, "--run", str(folder)],
            stdout=subprocess.PIPE,
            stderr=(folder / "errors").open("w"),
            text=True,
        )
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise EyasError(f"the run in {folder} did not start: {(folder / 'errors').read_text()[-2000:]}")
        return child

    def run(self, phase: str, kind: str, file_limit: int | None = None) -> bool:
        """One run, killed in this phase if it comes to it; whether it completed."""
        self.watched.started()
        child = self._start(self.killed, Run(self.wanted, file_limit=file_limit))
        status = self._await_end(child) if file_limit is not None else self._strike(child, phase, kind)
        child.stdout.close()  # type: ignore[union-attr]
        self._note_computed()
        if status not in (0, -signal.SIGKILL, -signal.SIGTERM):
            self._check_message(kind, file_limit)
            self.tally.full_disks += file_limit is not None
        self._look_at_published(completed=status == 0)
        return status == 0

    def _await_end(self, child: subprocess.Popen[str]) -> int:
        """Wait for a run and for what it started; gives the exit status."""
        family = _descendants(child.pid)
        try:
            status = child.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGUSR1)  # it prints where its threads are
            time.sleep(1)
            self.violation(f"a run goes on after {_PATIENCE_SECONDS} s: {self._errors()}")
            child.kill()
            status = child.wait()
        self._bury(family)
        return status

    def _bury(self, family: dict[int, str]) -> None:
        limit = time.monotonic() + 10
        while survivors := [pid for pid, command in family.items() if _alive(pid, command)]:
            if time.monotonic() > limit:
                self.violation(f"processes go on after their parent's end: {[family[pid] for pid in survivors]}")
                for pid in survivors:
                    os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.01)

    def _note_computed(self) -> None:
        for fault in self.watched.computed():
            self.violation(fault)

    def _await_phase(self, child: subprocess.Popen[str], phase: str) -> None:
        """Wait for a random moment of this phase, or for the run's end where it does not come to it."""
        asked = self.source.randrange(max(1, len(set(self.wanted) - self.watched.finished)))
        shards: set[str] = set()
        limit = time.monotonic() + _PATIENCE_SECONDS
        while child.poll() is None and time.monotonic() < limit:
            self._note_computed()
            now = self.watched.phase(self.wanted)
            if now == phase == "sealing":
                names = {name for name in _names(self.killed / "work" / "shards") if name.startswith(".shard-")}
                if names - shards and self.source.random() < 0.5:
                    time.sleep(self.source.choice((0, self.source.uniform(0, 0.01))))
                    return
                shards |= names
            elif now == phase and (phase != "recording" or self.watched.asked > asked):
                longest = {"recording": 0.05, "publishing": 0.02}.get(phase, 0.001)
                time.sleep(self.source.choice((0, self.source.uniform(0, longest))))
                return
            time.sleep(0.0002)

    def _strike(self, child: subprocess.Popen[str], phase: str, kind: str) -> int:
        """Wait for the phase and kill; gives the exit status."""
        self._await_phase(child, phase)
        family = _descendants(child.pid)
        writers = [pid for pid, command in family.items() if "spawn_main" in command]
        if kind in ("worker", "both") and not writers:
            kind = "SIGKILL"  # no process writes shards yet, or any more
        victims = {"worker": writers[:1], "both": [*writers[:1], child.pid]}.get(kind, [child.pid])
        seen = self.watched.phase(self.wanted)
        for pid in victims:
            try:
                os.kill(pid, signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
            except ProcessLookupError:
                continue
        status = self._await_end(child)
        self._bury(family)
        self._note_computed()
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            seen = self.watched.phase(self.wanted)  # what it left is what it was at
        if status and seen != "finished":
            self.tally.kills[seen, kind] += 1
        return status

    def _errors(self) -> str:
        return (self.killed / "errors").read_text()[-2000:]

    def _check_message(self, kind: str, file_limit: int | None) -> None:
        """A run that lost a process which writes shards, or was out of room, ends with one clear message."""
        expected = ["the disk is full", "rows were not recorded"]
        if file_limit is None:
            expected = ["a process that writes shards was ended"] if kind == "worker" else []
        # Python itself may have more to say about how its processes ended
        messages = [line for line in self._errors().splitlines() if line.startswith("error: ")]
        if len(messages) != 1 or not any(text in messages[0] for text in expected):
            self.violation(f"{'a full disk' if file_limit is not None else kind} ends in: {self._errors()}")

    def _look_at_published(self, completed: bool) -> None:
        """After a run, however it ended: if there is another published store, it must be the undisturbed one."""
        store = self.killed / "store"
        now = _manifest_text(self.killed)
        if now is None or not {entry["name"] for entry in json.loads(now)["shards"]} <= set(_names(store)):
            if completed or store.exists() or self.watched.before is not None:
                self.violation("there is no whole store, neither the new one nor the former")
            return
        if now == self.watched.before and not completed:
            return
        self.tally.states += now != self.watched.before
        run = self._start(self.plain, Run(self.wanted, workers=1, slow=False))
        if self._await_end(run) != 0:
            self.violation(f"the run without kills failed: {(self.plain / 'errors').read_text()[-2000:]}")
        run.stdout.close()  # type: ignore[union-attr]
        mine, theirs = digests(store), digests(self.plain / "store")
        if mine != theirs:
            wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            self.violation(f"files differ from those of a run without kills: {wrong}")
        scratch = digests(self.killed / "work" / "shards")
        for name, md5 in self._published.items():
            if {mine.get(name, md5), scratch.get(name)} != {md5}:
                self.violation(f"{name} was published before and has changed")
        for name in mine.keys() - self._published.keys() - {MANIFEST_NAME}:
            self._published[name] = mine[name]
            with ShardFile(store / name) as shard:
                self._published_keys.update(shard.keys)
        # rows that were recorded for a state that was never published, and are not wanted now, may be dropped
        lost = {number for number in self.watched.begun if _key(number) not in self._published_keys} - set(self.wanted)
        self.watched.kept_only(self.watched.begun - lost)
        if completed:
            self._check_completed()

    def _check_completed(self) -> None:
        self.tally.completed += 1
        with StoreReader(self.killed / "store") as reader:
            if reader.keys != [_key(number) for number in self.wanted]:
                self.violation("rows are missing, doubled or in another order")
            for key, number in zip(reader.keys, self.wanted, strict=False):
                row, (ids, hidden) = reader.read(key), engine_row(number)
                if not (np.array_equal(row.input_ids, ids) and np.array_equal(row.hidden_TLH, hidden)):
                    self.violation(f"row {number} has other bits")
            self.tally.rows_checked += len(reader)
        work = self.killed / "work"
        expected = {*self._published, "published.json"}
        strays = [name for name in _names(self.killed) if name not in ("work", "store", "log", "errors", "run.json")]
        strays += [name for name in _names(work) if name not in ("rows", "shards")]
        strays += [name for name in _names(work / "shards") if name not in expected]
        live = {f"{_key(number)}.row" for number in self.wanted}
        strays += [name for name in _names(work / "rows") if name in live or not name.endswith(".row")]
        if strays:
            self.violation(f"left behind: {strays}")

    def change(self) -> None:
        """The data set changes."""
        self.wanted = changed(self.wanted, self._removed, self.source)


def kill_loop(folder: Path, kills: int, seed: int, report: Callable[[Tally], None] = lambda _: None) -> Tally:
    """Run and kill until there were ``kills`` kills, then once more without one.

    Args:
        folder: an empty directory to work in.
        kills: how many.
        seed: of everything that is random here; what the processes do in the meantime is not.
        report: called after each kill.
    """
    source, tally = random.Random(seed), Tally()
    lives: list[Loop] = []
    over = True
    while tally.kills.total() < kills:
        if over:
            place = folder / f"life-{len(lives)}"
            place.mkdir(parents=True)
            lives.append(Loop(place, source, tally))
        killed, states = tally.kills.total(), tally.states
        phase = source.choices(PHASES, (5, 6, 3, 4))[0]
        kind = source.choices(KINDS, (4, 3, 4, 3) if phase in ("recording", "sealing") else (4, 3, 0, 0))[0]
        limit = source.randrange(*_FILE_LIMITS) if source.random() < 0.06 else None
        completed = lives[-1].run(phase, kind, limit)
        if tally.kills.total() > killed:
            report(tally)
        over = completed and source.random() < 0.25  # a first extraction has the longest recording
        # a change right after a kill that let the new store through finds shards that the scratch does not know as published
        if not over and (completed or source.random() < (0.5 if tally.states > states else 0.1)):
            lives[-1].change()
    while not lives[-1].run("", "", file_limit=_NO_LIMIT):
        continue
    tally.rows_repeated = sum(life.watched.repeated for life in lives)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        return _run_and_report(arguments.run)
    started = time.monotonic()

    def report(tally: Tally) -> None:
        if tally.kills.total() % 20 == 0:
            phases = ", ".join(f"{sum(tally.kills[phase, kind] for kind in KINDS)} {phase}" for phase in PHASES)
            print(
                f"{tally.kills.total()} kills ({phases}), {tally.full_disks} full disks, {tally.completed} runs "
                f"completed, {tally.rows_checked:,} rows checked, {len(tally.violations)} violations",
                flush=True,
            )

    with tempfile.TemporaryDirectory() as folder:
        tally = kill_loop(Path(folder), arguments.kills, arguments.seed, report)
    print(tally.table())
    print(json.dumps(tally.to_json() | {"seconds": round(time.monotonic() - started)}, indent=2))
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
