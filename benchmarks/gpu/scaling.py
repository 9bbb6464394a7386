"""Training from a store by 1, 2, 4 and 8 GPUs of one host: rate, efficiency, waiting, memory, and the same losses.

    python benchmarks/gpu/scaling.py FOLDER --out FILE                  all sizes that the machine has; needs 60 GB of room
    python benchmarks/gpu/scaling.py FOLDER --out FILE --feed-only      the same ranks read, and do nothing else
    python benchmarks/gpu/scaling.py FOLDER --shape tiny --ranks 1 2    to see that it works; without a GPU, ranks are on the CPU

Every rank runs the project's own loop (`eyas.drafting.training`) with its readers, global batch and sharding, on a head of random
weights. Each rank computes as many packs of 8,192 tokens a step, so that the global batch grows with the ranks.

    efficiency   rate, by the rate of one rank with the same codec, by the ranks
    waiting      share of the time in which some rank had no batch
    loss, norm   largest relative difference from one rank's losses and gradient norms in the first steps of a training whose
                 global batch is the same for all: as many packs as the largest group has ranks

The files are written once, and are in the page cache unless `--cold` says otherwise. The JSON is written after each measurement.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import common
from common import note
from training import SHAPES, make_model

from eyas.console import console
from eyas.drafting.data import TokenRow, TrainingData
from eyas.drafting.feeding import device_batches
from eyas.drafting.global_batch import Steps, selected
from eyas.drafting.gradients import Together, together
from eyas.drafting.ranks import Ranks, member, training_device
from eyas.drafting.state import TrainingState
from eyas.drafting.stopping import Stop
from eyas.drafting.tracking import Trackers
from eyas.drafting.training import Loop
from eyas.params import Machine, TrainParams
from eyas.process import die_with_parent
from eyas.store.batches import PackedBatches
from eyas.store.reader import StoreReader

_EXACT_STEPS = 3
_READ_AHEAD = 5  # batches that a feed is ahead; the last steps, which need no more reading, do not count
_TRAINING = ("ranks", "codec", "tokens/s", "efficiency", "waiting", "step s", "peak GiB", "loss", "norm")
_READING = ("ranks", "codec", "page cache", "readers", "tokens/s", "GB/s of states")


@dataclass(frozen=True)
class Job:
    """What a group of ranks does."""

    world: int
    sharding: str | None  # None: the ranks only read
    readers: int  # of a rank
    most_ranks: int
    shape: str
    stores: dict[str, Path]
    rows: dict[str, list[TokenRow]]
    tokens: int  # of a pack
    packs: int  # of a rank in a step
    warm_up: int
    steps: int
    cold: bool

    def epoch(self, codec: str, packs: int, count: int | None = None) -> Steps:
        """So many steps of so many packs, rows come again where there are too few; or all rows once."""
        plan = PackedBatches(StoreReader(self.stores[codec]), list(self.rows), self.tokens, 0, 0)
        places = range(packs * (len(plan) // packs if count is None else count))
        return Steps(selected(plan, [place % len(plan) for place in places]), packs, self.rows)

    def begin(self, codec: str, cold: bool, ranks: Ranks) -> None:
        """Wait for all ranks, with the page cache as it is wanted."""
        if cold and ranks.first:
            common.drop_from_cache(self.stores[codec])
        ranks.of_first(None)


def run_epoch(head: Together, steps: Steps, packs: int, job: Job, ranks: Ranks) -> tuple[TrainingState, list[float]]:
    """The project's loop over one epoch, from a fresh optimiser; gives its records, and when each step was done."""
    params = TrainParams(epochs=1, lr=1e-5, tokens_per_step=packs * job.tokens, tokens_per_pack=job.tokens)
    state, times = TrainingState(head.model, params), []
    clock = SimpleNamespace(advance=lambda: times.append(time.perf_counter()))  # where the loop has its progress bar
    data = TrainingData(steps.plan.reader, list(itertools.chain(*job.rows.values())), [], job.readers)
    with Stop(False) as stop, Trackers([], Path(), 0) as trackers:
        Loop(head, state, data, [steps], params, Machine(), ranks).train_epoch(None, stop, clock, trackers)
    return state, times


def exact(head: Together, job: Job, codec: str, ranks: Ranks) -> dict[str, Any]:
    """Losses and norms of a global batch that does not depend on the ranks."""
    state, _ = run_epoch(head, job.epoch(codec, job.most_ranks, _EXACT_STEPS), job.most_ranks, job, ranks)
    return {"losses": [step.loss for step in state.steps], "grad_norms": [step.grad_norm for step in state.steps]}


def speed(head: Together, job: Job, codec: str, ranks: Ranks) -> dict[str, Any]:
    """Rate and waiting with a rank's packs a step, and most memory."""
    device, counted = training_device(), range(job.warm_up, job.warm_up + job.steps)
    job.begin(codec, job.cold, ranks)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    packs = job.world * job.packs
    steps = job.epoch(codec, packs, counted.stop + _READ_AHEAD)
    state, times = run_epoch(head, steps, packs, job, ranks)
    records = [(state.steps[place], steps.slots(place)) for place in counted]
    waits = [record.waiting_share * slots / record.tokens_per_s for record, slots in records]
    peak, taken = None, None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        peak, taken = torch.cuda.max_memory_allocated(device) / 2**30, (total - free) / 2**30
    waits_by_rank, peaks, taken_by_rank = zip(*ranks.gathered((waits, peak, taken)), strict=True)
    seconds = times[counted.stop - 1] - times[counted.start - 1]
    return {
        "tokens_per_s": sum(slots for _, slots in records) / seconds,
        "waiting_share": sum(map(max, zip(*waits_by_rank, strict=True))) / seconds,
        "waiting_share_by_rank": [sum(own) / seconds for own in waits_by_rank],
        "step_seconds": [round(times[place] - times[place - 1], 5) for place in counted],
        "peak_gib_by_rank": peaks,
        "taken_on_gpu_gib_by_rank": taken_by_rank,  # with NCCL's buffers, CUDA's own, and what PyTorch keeps
    }


def train(job: Job, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """All that is measured with one way of sharding; each training goes on from the weights of the one before."""
    device = training_device()
    model = make_model(SHAPES[job.shape], device)
    head = together(model, ranks, str(job.sharding), TrainParams(epochs=1, lr=1e-5, tokens_per_step=job.tokens), device)
    for measure, codec in itertools.product((exact, speed), job.stores):
        yield {"codec": codec, **measure(head, job, codec, ranks)}


def feed(job: Job, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """All rows once, shared out as in training, to the GPU's memory; from the moment that a rank has its first batch."""
    for codec, cold in itertools.product(job.stores, (True, False)):
        steps = job.epoch(codec, job.world)
        job.begin(codec, cold, ranks)
        times, slots = [], []
        with device_batches(steps.share_of(ranks, 0), job.rows, training_device(), job.readers, depths=3) as batches:
            for batch, _ in batches:
                times.append(time.monotonic())  # the same clock in all processes
                slots.append(sum(batch.lengths))
        first, last, counted = zip(*ranks.gathered((times[0], times[-1], sum(slots[1:]))), strict=True)
        yield {"codec": codec, "cold": cold, "tokens_per_s": sum(counted) / (max(last) - min(first))}


def _rank(connection: Connection, parent: int, port: int, rank: int, job: Job) -> None:
    """One rank: the first sends what is found; None at the end, or what went wrong."""
    die_with_parent(parent)
    console.quiet = True
    torch.set_num_threads(max(1, torch.get_num_threads() // job.world))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    message = None
    try:
        store = TCPStore("127.0.0.1", port, job.world, is_master=False)
        with nullcontext(Ranks()) if job.world == 1 else member(rank, job.world, store) as ranks:
            for found in (train if job.sharding else feed)(job, ranks):
                if ranks.first:
                    connection.send(found)
    except BaseException as error:
        traceback.print_exc()
        message = f"rank {rank}: {type(error).__name__}: {error}"
    connection.send(message)
    sys.stderr.flush()
    os._exit(0)  # a communicator whose peer is gone can keep a normal exit waiting


def run_group(job: Job, limit: float, take: Callable[[dict[str, Any]], None]) -> str | None:
    """Start a group and take what its first rank finds; gives what went wrong. At the end no rank is left."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, job.world, is_master=True, wait_for_workers=False)
    children, connections = [], []
    try:
        for rank in range(job.world):
            ours, theirs = context.Pipe(duplex=False)
            children.append(context.Process(target=_rank, args=(theirs, os.getpid(), store.port, rank, job)))
            children[-1].start()
            theirs.close()
            connections.append(ours)
        running = list(connections)
        while running:
            ready = wait(running, limit)
            if not ready:
                return f"timed out: no rank said anything for {limit:.0f} s"
            for connection in ready:
                try:
                    message = connection.recv()
                except EOFError:
                    rank = connections.index(connection)
                    children[rank].join(5)
                    return f"rank {rank} ended (exit status {children[rank].exitcode})"
                if isinstance(message, str):
                    return message
                if message is None:
                    running.remove(connection)
                else:
                    take(message)
        return None
    finally:
        for child in children:
            child.kill()
            child.join()


def compare(lines: list[dict[str, Any]]) -> None:
    """Efficiency and differences, where one rank has been measured with the same codec."""
    alone = {line["codec"]: line for line in lines if line["sharding"] == "alone"}
    for line in lines:
        one = alone.get(line["codec"], {})
        if "tokens_per_s" in line and "tokens_per_s" in one:
            line["efficiency"] = line["tokens_per_s"] / one["tokens_per_s"] / line["ranks"]
        for name in {"losses", "grad_norms"} & line.keys() & one.keys():
            pairs = zip(line[name], one[name], strict=True)
            line[f"{name}_off"] = max(abs(value / other - 1) for value, other in pairs)


def _training(line: dict[str, Any]) -> list[Any]:
    seconds, peaks = line.get("step_seconds"), [peak for peak in line.get("peak_gib_by_rank", ()) if peak]
    return [
        f"{line['ranks']} {line['sharding']}",
        line["codec"],
        *map(line.get, ("tokens_per_s", "efficiency", "waiting_share")),
        statistics.median(seconds) if seconds else None,
        max(peaks, default=None),
        *(f"{line[name]:.1e}" if name in line else None for name in ("losses_off", "grad_norms_off")),
    ]


def _reading(line: dict[str, Any]) -> list[Any]:
    cache, readers = "cold" if line["cold"] else "warm", line["ranks"] * line["readers_per_rank"]
    return [str(line["ranks"]), line["codec"], cache, readers, line.get("tokens_per_s"), line.get("gb_per_s")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder on a disk with room")
    parser.add_argument("--shape", choices=SHAPES, default="kimi-k2.5")
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 1, 2, 4 and 8, as far as there are GPUs")
    parser.add_argument("--shardings", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"])
    parser.add_argument("--codecs", nargs="+", choices=("none", "lossless"), default=["none", "lossless"])
    parser.add_argument("--rows", type=int, default=384, help="rows of 1,024 tokens")
    parser.add_argument("--tokens-per-pack", type=int, default=8192)
    parser.add_argument("--packs-per-step", type=int, default=1, help="of one rank")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not counted; so many batches are ahead")
    parser.add_argument("--steps", type=int, default=12, help="steps that are")
    parser.add_argument("--workers", type=int, default=common.cores() * 3 // 4, help="readers of all ranks (12 a rank)")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each training that is timed")
    parser.add_argument("--feed-only", action="store_true", help="read without a training step, cold and warm")
    parser.add_argument("--limit", type=float, default=180, help="seconds without news after which ranks are ended")
    parser.add_argument("--keep", action="store_true", help="leave the rows there, for another run with this folder")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    sizes = sorted(arguments.ranks or [size for size in (1, 2, 4, 8) if size <= gpus] or [1, 2])
    if gpus and max(sizes) > gpus:
        parser.error(f"{max(sizes)} ranks, but {gpus} GPUs are visible")
    if (
        arguments.warm_up < 1
        or arguments.rows * common.ROW_TOKENS < 2 * max(sizes) * arguments.tokens_per_pack * arguments.packs_per_step
    ):
        parser.error("too few: --warm-up is 1 or more, and --rows give each rank two batches or more")
    # ranks have these from their first moment; CUDA and NCCL read them when they start
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    hidden = SHAPES[arguments.shape].hidden
    rows = common.SyntheticRows(hidden, arguments.rows)
    places = common.prepare(rows, arguments.folder, 512, arguments.codecs)
    rows_by_key = common.token_rows(rows, common.store_spec(hidden, "none", 1).fingerprint, 1)
    del rows
    names = ("shape", "rows", "tokens_per_pack", "packs_per_step", "warm_up", "steps", "workers", "cold", "feed_only")
    settings = {name: vars(arguments)[name] for name in names} | {"exact_packs": max(sizes), "gpus": gpus}
    lines: list[dict[str, Any]] = []

    def write() -> None:
        compare(lines)
        common.write_report(arguments.out, arguments.folder, {"settings": settings, "results": lines})

    def take(found: dict[str, Any]) -> None:
        """Into the newest line that it is about."""
        own = [line for line in lines if all(line.get(key) == found.get(key) for key in ("codec", "cold"))]
        own[-1].update(found)
        if "tokens_per_s" in found:
            own[-1]["gb_per_s"] = found["tokens_per_s"] * 2 * len(common.LAYERS) * hidden / 1e9
        write()
        note(", ".join(f"{key} {value}" for key, value in found.items() if key != "step_seconds"))

    for world in sizes:
        for sharding in [None] if arguments.feed_only else ["alone"] if world == 1 else arguments.shardings:
            readers = max(1, min(12, arguments.workers // world))
            own = {"ranks": world, "sharding": sharding, "readers_per_rank": readers}
            caches = [{}] if sharding else [{"cold": True}, {"cold": False}]
            group = [{**own, "codec": codec, **cache} for codec in arguments.codecs for cache in caches]
            lines += group
            job = Job(
                *(world, sharding, readers, max(sizes), arguments.shape, places, rows_by_key),
                *(
                    arguments.tokens_per_pack,
                    arguments.packs_per_step,
                    arguments.warm_up,
                    arguments.steps,
                    arguments.cold,
                ),
            )
            note(f"{world} ranks, {sharding or 'reading'}")
            if error := run_group(job, arguments.limit, take):
                note(f"{world} ranks, {sharding or 'reading'}: {error}")
                for line in (line for line in group if "tokens_per_s" not in line):
                    line["error"] = error
                write()
    if not arguments.keep:
        shutil.rmtree(next(iter(places.values())).parents[1])
    cache = "cold" if arguments.cold else "warm"
    print(
        f"\n{arguments.shape}, {arguments.packs_per_step} packs of {arguments.tokens_per_pack} tokens a rank and step, page cache {cache} where trained"
    )
    header, shown = (_READING, _reading) if arguments.feed_only else (_TRAINING, _training)
    common.print_table(header, map(shown, lines))
    for line in (line for line in lines if "error" in line):
        print(line["ranks"], line["sharding"] or "reading", line["codec"], line["error"], sep=", ")


if __name__ == "__main__":
    main()
