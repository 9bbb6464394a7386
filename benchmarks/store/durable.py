"""Extraction until every row is on the disk: Eyas with each codec, the stock connector's files, and one plain file.

    python benchmarks/store/durable.py FOLDER                 on the disk to be measured; needs twice --gb of room
    python benchmarks/store/durable.py FOLDER --quick         a few rows, to see that it works

The engine is replayed: rows of 1,024 tokens and four layers are handed over as fast as they are taken, at most 64 in
flight, to 8 writer threads of one process. Measured from the first row until everything is published and synced: the stage's
writing processes start while the engine does, which takes longer, and so they have here. The variants take turns; medians.
`disk` is what the disk was given for each GB of states: 1.0 is once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    ROW_TOKENS,
    Measured,
    SyntheticRows,
    cores,
    note,
    print_table,
    row_bytes,
    store_spec,
    write_plain,
    write_report,
    write_samples,
    write_store,
)

VARIANTS = ("none", "lossless", "stock", "plain")
RATIOS = (("lossless", "none"), ("lossless", "stock"), ("none", "stock"), ("none", "plain"))
_BLOCK = 16 << 20
_ENGINE_START_SECONDS = 5  # of a real one: 20 s and more


def measure(variant: str, rows: SyntheticRows, folder: Path, workers: int, shard_mib: int) -> dict[str, float]:
    measured = Measured()

    def start_engine() -> None:
        time.sleep(_ENGINE_START_SECONDS)
        measured.restart()

    def store() -> None:
        write_store(rows, store_spec(rows.hidden, variant, shard_mib), folder, workers, start_engine)

    writers: dict[str, Callable[[], object]] = {
        "none": store,
        "lossless": store,
        "stock": lambda: write_samples(rows, folder / "samples"),
        "plain": lambda: write_plain(rows, folder / "plain", rows.count, _BLOCK),
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()
    with measured:  # a store's clock starts again when the engine is up
        writers[variant]()
        os.sync()
    states = rows.count * row_bytes(rows.hidden)
    # a published shard has two names
    files = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree(folder)
    return {
        "seconds": measured.seconds,
        "cpu_seconds": measured.cpu_seconds,
        "system_seconds": measured.system_seconds,
        "tokens_per_s": rows.count * ROW_TOKENS / measured.seconds,
        "mb_per_s": states / measured.seconds / 1e6,
        "ratio": states / sum(files.values()),
        "disk_written_per_state_byte": measured.written / states,
    }


def compare(hidden: int, arguments: argparse.Namespace, warm_up: bool) -> dict[str, Any]:
    rows = SyntheticRows(hidden, max(2, round(arguments.gb * 1e9 / row_bytes(hidden))))
    if warm_up:  # a virtual machine's memory is slow when it is used for the first time
        measure("plain", rows, arguments.folder / "durable", arguments.workers, arguments.shard_mib)
    repeats: dict[str, list[dict[str, float]]] = {variant: [] for variant in arguments.variants}
    for _ in range(arguments.repeats):
        for variant in arguments.variants:
            found = measure(variant, rows, arguments.folder / "durable", arguments.workers, arguments.shard_mib)
            repeats[variant].append(found)
            note(f"hidden {hidden}, {variant}: {found['seconds']:.1f} s, {found['mb_per_s']:,.0f} MB/s")
    medians = {
        variant: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for variant, found in repeats.items()
    }
    return {
        "hidden": hidden,
        "rows": rows.count,
        "gb": rows.count * row_bytes(rows.hidden) / 1e9,
        "medians": medians,
        "ratios": {
            f"{one}/{other}": medians[one]["tokens_per_s"] / medians[other]["tokens_per_s"]
            for one, other in RATIOS
            if one in medians and other in medians
        },
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168, 4096])
    parser.add_argument("--gb", type=float, default=16, help="GB of states a variant")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, min(12, cores() * 3 // 4)),
        help="processes that write shards (as the stage has)",
    )
    parser.add_argument("--shard-mib", type=int, default=512, help="size of a shard before compression")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--quick", action="store_true", help="1 GB, once")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.gb, arguments.repeats, arguments.shard_mib = 1, 1, 256
    results = [compare(hidden, arguments, number == 0) for number, hidden in enumerate(arguments.hidden)]
    fixed = {"workers": arguments.workers, "shard_mib": arguments.shard_mib}
    write_report(arguments.out, arguments.folder, fixed | {"results": results})
    for result in results:
        print(f"\nhidden {result['hidden']}: {result['rows']} rows, {result['gb']:.1f} GB of states")
        names = ("tokens_per_s", "mb_per_s", "seconds", "cpu_seconds", "ratio", "disk_written_per_state_byte")
        print_table(
            ("variant", "tokens/s", "MB/s", "s", "cpu s", "ratio", "disk"),
            ([variant, *(values[name] for name in names)] for variant, values in result["medians"].items()),
        )
        print(", ".join(f"{name} {value:.2f}" for name, value in result["ratios"].items()))


if __name__ == "__main__":
    main()
