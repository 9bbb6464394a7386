"""Training by as many processes as the machine has GPUs.

Takes a function that makes a training's inputs in any process; gives the trained head and its records. The ranks are children that
end with this process. They leave the finished training in the last checkpoint, and this process takes it from there.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its `__all__`

from eyas.console import console
from eyas.drafting.data import TrainingData
from eyas.drafting.initial import InitialHead
from eyas.drafting.ranks import Ranks, member
from eyas.drafting.records import Training
from eyas.drafting.training import fit
from eyas.errors import EyasError
from eyas.params import Machine, TrainParams
from eyas.process import LeanContext, die_with_parent
from eyas.targets.head import TargetHead

_GRACE_SECONDS = 3.0  # the others' complaints about a dead rank often come before news of its death


@dataclass(frozen=True)
class Inputs:
    """What `fit` takes, made anew in each process."""

    model: Eagle3DraftModel
    data: TrainingData
    params: TrainParams
    target: TargetHead
    temperature: float
    initial: InitialHead | None = None


Make = Callable[[int], Inputs]
"""Makes the inputs for a number of ranks that share the machine's cores; importable by name."""


def train(make: Make, params: TrainParams, work: Path, machine: Machine) -> tuple[Inputs, Training]:
    """Train, and give the inputs, whose model is the trained head now.

    Args:
        make: called in every process.
        params: the same as the inputs'.
        work: as `fit` takes it; on a file system that all ranks see.
        machine: how many ranks, and what `fit` takes.

    Raises:
        EyasError: as `fit` says, or a rank has ended; what is done so far is kept.
    """
    world = _world(params, machine)
    if world > 1:
        _run_ranks(make, world, work, machine)
    inputs = make(1)
    return inputs, _fit(inputs, work, machine, Ranks())


def _fit(inputs: Inputs, work: Path, machine: Machine, ranks: Ranks) -> Training:
    return fit(inputs.model, inputs.data, inputs.params, inputs.target, inputs.temperature, work, machine, ranks)


def _world(params: TrainParams, machine: Machine) -> int:
    """Ranks to start: no more than a step has packs."""
    wanted = machine.train_ranks or max(1, torch.cuda.device_count())
    if torch.cuda.is_available() and wanted > torch.cuda.device_count():
        raise EyasError(f"machine.yaml: train_ranks: {wanted} ranks, but {torch.cuda.device_count()} GPUs are visible")
    if wanted > params.packs_per_step:
        console.print(
            f"a step has {params.packs_per_step} packs, so {params.packs_per_step} of {wanted} ranks train; "
            "lower train.tokens_per_pack to use them all"
        )
    return min(wanted, params.packs_per_step)


@contextmanager
def _passed_on(children: Sequence[Any]) -> Iterator[None]:
    """While open, SIGTERM and an interrupt go to the ranks, which stop after the step; a second one ends everything."""

    def ask(number: int, _: FrameType | None) -> None:
        restore()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        restore()


def _run_ranks(make: Make, world: int, work: Path, machine: Machine) -> None:
    """Start the ranks and wait for them.

    Raises:
        EyasError: one has failed or ended; by then all have ended.
    """
    store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    threads = max(1, torch.get_num_threads() // world)
    context = LeanContext()
    children, connections = [], []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, os.getpid(), _terminal(), rank, world, store.port, threads, make, work, machine)
            children.append(context.Process(target=_rank, args=arguments))
            children[-1].start()
            theirs.close()
            connections.append(ours)
        with _passed_on(children):
            wait_for: dict[Any, int] = {child.sentinel: rank for rank, child in enumerate(children)}
            while wait_for:
                ended = [wait_for.pop(sentinel) for sentinel in wait(list(wait_for))]
                for rank in ended:
                    children[rank].join()  # it may still be on its way out, without an exit status
                if any(children[rank].exitcode for rank in ended):
                    raise EyasError(_cause(children, connections))
    finally:
        for child in children:
            child.kill()
            child.join()


def _cause(children: Sequence[Any], connections: Sequence[Connection]) -> str:
    """The one message for a failure: a death, else what a rank says to its user, else what surprised it."""
    until = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < until and any(child.exitcode is None for child in children):
        wait([child.sentinel for child in children if child.exitcode is None], until - time.monotonic())
    deaths: list[str] = []
    said: list[str] = []
    surprises: list[str] = []
    for rank, (child, connection) in enumerate(zip(children, connections, strict=True)):
        try:
            expected, message = connection.recv() if connection.poll() else (None, "")
        except EOFError:
            expected, message = None, ""
        if message:
            (said if expected else surprises).append(message if expected else f"train: rank {rank}: {message}")
        elif child.exitcode:
            deaths.append(
                f"train: rank {rank} of {len(children)} ended (exit status {child.exitcode}; -9 is a kill, often for lack "
                "of memory); the others were stopped. Run again, training goes on from the last checkpoint"
            )
    return (deaths + said + surprises)[0]


def _terminal() -> Any:
    """The console's file for a child, or None where it has none."""
    try:
        return DupFd(console.file.fileno())
    except (io.UnsupportedOperation, ValueError):
        return None


def _rank(
    connection: Connection,
    parent: int,
    terminal: Any,
    rank: int,
    world: int,
    port: int,
    threads: int,
    make: Make,
    work: Path,
    machine: Machine,
) -> None:
    """One rank, from start to end; exit status 1 with a message for the parent."""
    # one that comes while the rank starts is taken by the loop, before its first step
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which passes it on
    console.quiet = rank > 0
    if terminal is not None:
        console.file = os.fdopen(terminal.detach(), "w", buffering=1)
    torch.set_num_threads(threads)
    try:
        store = TCPStore("127.0.0.1", port, world, is_master=False)
        with member(rank, world, store) as ranks:
            _fit(make(world), work, machine, ranks)
        status = 0
    except BaseException as error:
        traceback.print_exc()  # into the stage's log
        expected = isinstance(error, EyasError)
        connection.send((expected, str(error) if expected else f"unexpected {type(error).__name__}: {error}"))
        status = 1
    sys.stderr.flush()
    os._exit(status)  # a communicator whose peer is gone can keep a normal exit waiting
