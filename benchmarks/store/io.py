"""Reading and writing a store against plain file I/O, and feeding it against speculators' own loader.

    python benchmarks/store/io.py FOLDER              on the disk to be measured; needs 45 GB of room
    python benchmarks/store/io.py FOLDER --quick      a few rows, to see that it works

Rows of 1,024 tokens, shape [tokens, 4, 7168]. First, codec `none` in one process: whole rows written and flushed, and read in random
order into one buffer, against one plain file with the same rows in the same order. Then the same rows as packed batches, from a
store with either codec and from speculators' own DataLoader over one safetensors file a row, each to the GPU if there is one;
beside them the feed alone, which ends in its buffers, and plain reads in as many threads. Cold is after the files were dropped from
the page cache. Checksums are verified wherever a store is read, except where it says `not verified`.

The loader's rate is that of a whole later epoch with its workers alive and nothing prefetched; a store's leaves out the first
batches of an epoch, of which some may have been ready at once. `after_first` in the JSON counts both from the first batch on.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    LAYERS,
    ROW_TOKENS,
    Measured,
    SyntheticRows,
    cores,
    drop_from_cache,
    note,
    on_pages,
    prepare,
    print_table,
    row_bytes,
    sample_table,
    speculators_loader,
    store_spec,
    token_rows,
    write_plain,
    write_report,
)

from eyas.store.batches import PackedBatches
from eyas.store.feed import BatchFeed
from eyas.store.format import row_key
from eyas.store.reader import StoreReader
from eyas.store.shards import checksum, stored_row, write_shard

_SETTLED = 4  # batches of an epoch after which none can have been ready from the start


def writing(rows: SyntheticRows, count: int, folder: Path, repeats: int) -> dict[str, float]:
    """MB/s of writing and flushing ``count`` rows: a plain file, a shard, a shard whose checksums are made as well."""
    spec = store_spec(rows.hidden, "none", 1 << 20)
    number_of = {row_key(spec.fingerprint, ids): number for number, ids in enumerate(rows.ids[:count])}
    given = {key: checksum(rows.states(number)) for key, number in number_of.items()}

    def shard(crc32_of: Callable[[str], int]) -> None:
        write_shard(
            folder / "shard.h5",
            spec,
            list(number_of),
            [ROW_TOKENS] * count,
            lambda key: stored_row("none", rows.ids[number_of[key]], rows.states(number_of[key]), crc32_of(key)),
        )

    ways: dict[str, Callable[[], None]] = {
        "plain": lambda: write_plain(rows, folder / "plain", count, row_bytes(rows.hidden)),
        "shard": lambda: shard(given.__getitem__),
        "shard_checksummed": lambda: shard(lambda key: checksum(rows.states(number_of[key]))),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    ways["plain"]()  # a virtual machine's memory is slow when it is used for the first time
    for _ in range(repeats):
        for way, write in ways.items():
            os.sync()
            with Measured() as measured:
                write()
            seconds[way].append(measured.seconds)
            for path in (folder / "plain", folder / "shard.h5"):
                path.unlink(missing_ok=True)
    size = count * row_bytes(rows.hidden) / 1e6
    return {way: size / statistics.median(values) for way, values in seconds.items()}


def read_plain(path: Path, size: int, order: list[int], buffers: list[Any]) -> None:
    """Read pieces of ``size`` bytes in this order, with a thread for each buffer."""
    descriptor = os.open(path, os.O_RDONLY)

    def read(numbers: list[int], view: memoryview) -> None:
        for number in numbers:
            done = 0
            while done < size:
                done += os.preadv(descriptor, [view[done:]], number * size + done)

    parts = [(order[first :: len(buffers)], buffer.data.cast("B")) for first, buffer in enumerate(buffers)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(read, *zip(*parts, strict=True)))
    os.close(descriptor)


def read_store(store: Path, order: list[int], buffer: Any, verify: bool) -> None:
    with StoreReader(store) as reader:
        ids = np.empty(ROW_TOKENS, np.int32)
        for number in order:
            reader.read_into(reader.keys[number], buffer, ids, verify)


def reading(rows: SyntheticRows, count: int, store: Path, plain: Path, repeats: int) -> dict[str, dict[str, float]]:
    """MB/s of reading ``count`` rows in random order, one process; ``disk_gb`` is what really came from the disk."""
    size = row_bytes(rows.hidden)
    buffer = on_pages((ROW_TOKENS, len(LAYERS), rows.hidden), np.uint16)
    ways: dict[str, tuple[Path, Callable[[list[int]], None]]] = {
        "plain": (plain, lambda order: read_plain(plain, size, order, [buffer])),
        "store": (store, lambda order: read_store(store, order, buffer, False)),
        "store_verified": (store, lambda order: read_store(store, order, buffer, True)),
    }
    found: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for repeat in range(repeats):
        order = random.Random(repeat).sample(range(count), count)
        for way, (place, read) in ways.items():
            for state in ("cold", "warm"):
                if state == "cold":
                    drop_from_cache(place)
                with Measured() as measured:
                    read(order)
                found[way].setdefault(f"{state}_mb_s", []).append(count * size / measured.seconds / 1e6)
                found[way].setdefault(f"{state}_disk_gb", []).append(measured.read / 1e9)
    return {way: {name: statistics.median(v) for name, v in values.items()} for way, values in found.items()}


def _packed(store: Path, tokens_per_batch: int) -> PackedBatches:
    reader = StoreReader(store)
    return PackedBatches(reader, reader.keys, tokens_per_batch, 0, 0)


def feed_epoch(store: Path, tokens_per_batch: int, workers: int) -> Iterator[None]:
    """The feed alone: rows end to end in its buffers."""
    with BatchFeed(_packed(store, tokens_per_batch), workers=workers) as feed:
        for _ in feed:
            yield


def batches_epoch(
    store: Path, tokens_per_batch: int, workers: int, rows_by_key: dict[str, list[Any]], device: Any
) -> Iterator[None]:
    """Aligned batches with their masks on the device, planned, as training gets them."""
    from eyas.drafting.feeding import device_batches

    with device_batches(_packed(store, tokens_per_batch), rows_by_key, device, workers, depths=3) as batches:
        for _ in batches:
            yield


def loader_epoch(loader: Any, device: Any) -> Iterator[None]:
    """speculators' batches on the device."""
    import torch

    for loaded in loader:
        if loaded["error_records"]:
            raise RuntimeError("speculators' loader dropped a sample")
        if device.type == "cuda":
            kept = [value.to(device, non_blocking=True) for value in loaded.values() if isinstance(value, torch.Tensor)]
            torch.cuda.synchronize()
            del kept
        yield


def timed_epoch(epoch: Iterator[None], tokens_per_batch: int) -> dict[str, float]:
    """Rates of an epoch: all of it, after its first batch, and when the first few batches are past."""
    with Measured() as measured:
        arrivals = [time.perf_counter(), *(time.perf_counter() for _ in epoch)]

    def rate(first: int) -> float:
        return tokens_per_batch * (len(arrivals) - 1 - first) / (arrivals[-1] - arrivals[first])

    return {
        "first_batch_s": arrivals[1] - arrivals[0],
        "whole": rate(0),
        "after_first": rate(1),
        "settled": rate(_SETTLED),
        "cpu_seconds": measured.cpu_seconds,
        "disk_gb": measured.read / 1e9,
    }


def _summary(
    rate: str, cold: dict[str, float], warm: list[dict[str, float]], first_batch_s: float | None = None
) -> dict[str, Any]:
    return {
        "first_batch_s": first_batch_s or statistics.median(epoch["first_batch_s"] for epoch in warm),
        "warm": statistics.median(epoch[rate] for epoch in warm),
        "cold": cold[rate],
        "warm_epochs": warm,
        "cold_epoch": cold,
    }


def measure_plain(path: Path, size: int, order: list[int], threads: int) -> dict[str, Any]:
    buffers = [on_pages((size,), np.uint8) for _ in range(threads)]
    drop_from_cache(path)
    found: dict[str, Any] = {"first_batch_s": None}
    for state in ("cold", "warm"):
        with Measured() as measured:
            read_plain(path, size, order, buffers)
        found[state] = len(order) * ROW_TOKENS / measured.seconds
    return found


def measure_store(
    store: Path, open_epoch: Callable[[], Iterator[None]], tokens_per_batch: int, repeats: int
) -> dict[str, Any]:
    drop_from_cache(store)
    cold = timed_epoch(open_epoch(), tokens_per_batch)
    return _summary("settled", cold, [timed_epoch(open_epoch(), tokens_per_batch) for _ in range(repeats)])


def measure_loader(
    table: Path, samples: Path, hidden: int, tokens_per_batch: int, workers: int, repeats: int, device: Any
) -> dict[str, Any]:
    import speculators.train.dataloader  # noqa: F401, so that this process's imports are not counted

    before = time.perf_counter()
    loader = speculators_loader(table, samples, hidden, tokens_per_batch, workers)
    opened_s = time.perf_counter() - before
    first = timed_epoch(loader_epoch(loader, device), tokens_per_batch)
    drop_from_cache(samples)
    cold = timed_epoch(loader_epoch(loader, device), tokens_per_batch)
    warm = [timed_epoch(loader_epoch(loader, device), tokens_per_batch) for _ in range(repeats)]
    return _summary("whole", cold, warm, opened_s + first["first_batch_s"])


def feeding(
    rows: SyntheticRows, places: dict[str, Path], plain: Path, count: int, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    from eyas.drafting.ranks import training_device

    tokens, repeats = arguments.tokens_per_batch, arguments.repeats
    device = training_device()
    rows_by_key = token_rows(rows, store_spec(rows.hidden, "none", 1).fingerprint, 1)
    table = sample_table(rows, places["samples"], 1)
    order = random.Random(0).sample(range(count), count)
    found: dict[str, dict[str, Any]] = {}

    def keep(name: str, values: dict[str, Any]) -> None:
        found[name] = values
        note(f"{name}: warm {values['warm']:,.0f}, cold {values['cold']:,.0f} tokens/s")

    for workers in arguments.workers:
        keep(f"plain reads, {workers} threads", measure_plain(plain, row_bytes(rows.hidden), order, workers))
        for codec in ("none", "lossless"):
            alone = partial(feed_epoch, places[codec], tokens, workers)
            keep(f"feed, {codec}, {workers} processes", measure_store(places[codec], alone, tokens, repeats))
            aligned = partial(batches_epoch, places[codec], tokens, workers, rows_by_key, device)
            keep(f"batches, {codec}, {workers} processes", measure_store(places[codec], aligned, tokens, repeats))
    for workers in arguments.loader_workers:
        name, samples = f"speculators, {workers} workers", places["samples"]
        try:
            keep(name, measure_loader(table, samples, rows.hidden, tokens, workers, repeats, device))
        except RuntimeError as error:  # such as too little shared memory for its workers; the other figures stand
            note(f"{name}: {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rows", type=int, default=192, help="rows that are fed")
    parser.add_argument("--plain-rows", type=int, default=64, help="rows that are written and read in one process")
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    half = max(1, cores() // 2)
    parser.add_argument("--workers", type=int, nargs="+", default=[min(12, half)], help="processes that read a store")
    parser.add_argument("--loader-workers", type=int, nargs="+", default=[half, cores()])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--shard-mib", type=int, default=512, help="size of a shard before compression")
    parser.add_argument(
        "--keep", action="store_true", help="leave the rows there, for another benchmark with this folder"
    )
    parser.add_argument("--quick", action="store_true", help="40 rows, once, small batches")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.plain_rows, arguments.repeats = 40, 16, 1
        arguments.tokens_per_batch, arguments.workers, arguments.loader_workers = 2048, [cores()], [cores()]
    folder = arguments.folder / "io"
    folder.mkdir(parents=True, exist_ok=True)
    rows, count = SyntheticRows(arguments.hidden, arguments.rows), arguments.plain_rows
    note("writing")
    written = writing(rows, count, folder, arguments.repeats)
    places = prepare(rows, arguments.folder, arguments.shard_mib)
    write_plain(rows, folder / "plain", count, row_bytes(rows.hidden))
    note("reading")
    read = reading(rows, count, places["none"], folder / "plain", arguments.repeats)
    fed = feeding(rows, places, folder / "plain", count, arguments)
    shutil.rmtree(folder)
    if not arguments.keep:
        shutil.rmtree(places["samples"].parent)

    ratios = {
        "write / plain": written["shard"] / written["plain"],
        "write with checksums / plain": written["shard_checksummed"] / written["plain"],
    }
    for state in ("warm", "cold"):
        for way in ("store", "store_verified"):
            ratios[f"{way} / plain, read {state}"] = read[way][f"{state}_mb_s"] / read["plain"][f"{state}_mb_s"]

        def best(kind: str, state: str = state) -> float:
            return max((values[state] for name, values in fed.items() if name.startswith(kind)), default=math.inf)

        for codec in ("none", "lossless"):
            ratios[f"batches {codec} / speculators, {state}"] = best(f"batches, {codec}") / best("speculators")
            ratios[f"feed {codec} / plain reads, {state}"] = best(f"feed, {codec}") / best("plain reads")
    results = {"hidden": arguments.hidden, "rows": arguments.rows, "plain_rows": count, "ratios": ratios}
    write_report(arguments.out, arguments.folder, results | {"write_mb_s": written, "read": read, "feed": fed})
    print(f"\n{count} rows of [1024, 4, {arguments.hidden}], one process, MB/s")
    print_table(
        ("", "write", "read warm", "read cold"),
        [
            ("plain", written["plain"], read["plain"]["warm_mb_s"], read["plain"]["cold_mb_s"]),
            ("store, not verified", written["shard"], read["store"]["warm_mb_s"], read["store"]["cold_mb_s"]),
            (
                "store",
                written["shard_checksummed"],
                read["store_verified"]["warm_mb_s"],
                read["store_verified"]["cold_mb_s"],
            ),
        ],
    )
    print(f"\n{arguments.rows} rows in batches of {arguments.tokens_per_batch} tokens, tokens/s")
    print_table(
        ("", "warm", "cold", "first batch s"),
        ([name, values["warm"], values["cold"], values["first_batch_s"]] for name, values in fed.items()),
    )
    print("\n" + "\n".join(f"{name}: {value:.2f}" for name, value in ratios.items()))


if __name__ == "__main__":
    main()
