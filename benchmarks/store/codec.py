"""Compression ratio, and speed of writing and reading a store, for each codec, on one core.

    python benchmarks/store/codec.py DIR [--tokens N]     real states, out of a published store
    python benchmarks/store/codec.py --hidden 7168        synthetic ones: normal, with a scale for each layer and channel

Writing is the sealing of shards from loose rows in the page cache, flushed to the disk at the end; reading is of whole rows in
random order, warm. Speeds are in MB of bf16 states a second of wall clock, and (`_cpu`) a second of processor time, which says
more on a busy machine. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import write_report

from eyas.stage import machine_description
from eyas.store.format import CODECS, StoreSpec
from eyas.store.fsck import store_info
from eyas.store.reader import StoreReader
from eyas.store.spool import RowSpool
from eyas.store.writer import publish

_SHARD_MIB = 1 << 14  # one shard, which is written in this process


def synthetic_rows(spec: StoreSpec, tokens: int) -> Iterator[tuple[Any, Any]]:
    """Rows of 512 tokens whose layers grow in scale from about 0.3 to 20, as the residual stream does."""
    source = np.random.default_rng(0)
    scale_L = np.geomspace(0.3, 20, len(spec.layers))
    scale_LH = scale_L[:, None] * np.exp(source.normal(0, 0.7, (len(spec.layers), spec.hidden_size)))
    for _ in range(max(1, tokens // 512)):
        values_TLH = source.standard_normal((512, *scale_LH.shape), dtype=np.float32) * scale_LH.astype(np.float32)
        yield source.integers(0, 50_000, 512).astype(np.int32), (values_TLH.view(np.uint32) >> 16).astype(np.uint16)


def stored_rows(reader: StoreReader, tokens: int) -> Iterator[tuple[Any, Any]]:
    for key in reader.keys:
        if tokens <= 0:
            return
        row = reader.read(key)
        tokens -= len(row.input_ids)
        yield row.input_ids, row.hidden_TLH


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall clock and of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def _read_all(reader: StoreReader, keys: list[str], buffer: Any, ids: Any, verify: bool) -> None:
    for key in keys:
        reader.read_into(key, buffer, ids, verify)


def measure(rows: list[tuple[Any, Any]], spec: StoreSpec, folder: Path) -> dict[str, float]:
    spool = RowSpool(folder / "work" / "rows", spec)
    keys = [spool.write(*row) for row in rows]
    megabytes = sum(row[1].nbytes for row in rows) / 1e6
    wall, cpu = _timed(lambda: publish(spool, folder / "store", spec, keys))
    result = {
        "ratio": store_info(folder / "store")["ratio"],
        "write_mb_s": megabytes / wall,
        "write_mb_s_cpu": megabytes / cpu,
    }
    buffer = np.empty_like(max((row[1] for row in rows), key=len))
    ids = np.empty(len(buffer), np.int32)
    for name, verify in (("read", False), ("read_verified", True)):
        times = []
        for repeat in range(3):
            order = random.Random(repeat).sample(keys, len(keys))
            with StoreReader(folder / "store") as reader:
                times.append(_timed(partial(_read_all, reader, order, buffer, ids, verify)))
        result[f"{name}_mb_s"] = megabytes / sorted(wall for wall, _ in times)[1]
        result[f"{name}_mb_s_cpu"] = megabytes / sorted(cpu for _, cpu in times)[1]
    return {name: round(value, 3 if name == "ratio" else 0) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?", help="published store with real states")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--hidden", type=int, default=576, help="hidden size of synthetic states, four layers")
    parser.add_argument("--out", type=Path, help="where the JSON goes, with command and versions")
    arguments = parser.parse_args()
    if arguments.store:
        reader = StoreReader(arguments.store)
        spec, rows = replace(reader.spec, shard_mib=_SHARD_MIB), list(stored_rows(reader, arguments.tokens))
    else:
        spec = StoreSpec((1, 2, 3, 4), arguments.hidden, "none", {"engine": "synthetic"}, _SHARD_MIB)
        rows = list(synthetic_rows(spec, arguments.tokens))
    results: dict[str, Any] = {
        "states": "real" if arguments.store else "synthetic",
        "shape": [sum(len(ids) for ids, _ in rows), len(spec.layers), spec.hidden_size],
        "machine": machine_description(),
    }
    for codec in CODECS:
        with tempfile.TemporaryDirectory() as folder:
            results[codec] = measure(rows, replace(spec, codec=codec), Path(folder))
    write_report(arguments.out, arguments.store, results)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
