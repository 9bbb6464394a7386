"""What the store's benchmarks share: synthetic rows, extraction replayed into a store or one file a sample, the disk's counters.

Spawned workers import a benchmark's script anew; so torch and speculators are imported where they are used.
Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.files import write_json_atomic
from eyas.stage import installed_versions, machine_description
from eyas.store.format import StoreSpec, row_key
from eyas.store.spool import RowSpool
from eyas.store.writer import Sealer, publish

ROW_TOKENS = 1024
LAYERS = (2, 30, 58, 61)
VOCABULARY = 50_000
SPECULATORS_WORKERS, SPECULATORS_PREFETCH = 12, 4  # the defaults of `speculators train`
_BLOCK_TOKENS = 16 * ROW_TOKENS
_PIECE_TOKENS = 256
_WRITERS = 8  # threads of one engine process, in the project's connector and in the stock one
_IN_FLIGHT = 64
_UNREAL_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr")


def store_spec(hidden: int, codec: str, shard_mib: int) -> StoreSpec:
    return StoreSpec(LAYERS, hidden, codec, {"engine": "synthetic"}, shard_mib)


class SyntheticRows:
    """Rows with ids of their own, whose states are windows of one block: as many as wanted, at no cost.

    The block is larger than a processor's cache; its layers grow in scale from about 0.3 to 20, as the residual stream does.
    """

    def __init__(self, hidden: int, count: int) -> None:
        source = np.random.default_rng(0)
        scale_L1 = np.geomspace(0.3, 20, len(LAYERS))[:, None]
        scale_LH = (scale_L1 * np.exp(source.normal(0, 0.7, (len(LAYERS), hidden)))).astype(np.float32)
        self.hidden, self.count = hidden, count
        self.ids = source.integers(0, VOCABULARY, (count, ROW_TOKENS)).astype(np.int32)
        self._block_TLH = on_pages((_BLOCK_TOKENS + ROW_TOKENS, *scale_LH.shape), np.uint16)

        def fill(start: int) -> None:
            shape = (_PIECE_TOKENS, *scale_LH.shape)
            values_TLH = np.random.default_rng(start).standard_normal(shape, dtype=np.float32) * scale_LH
            self._block_TLH[start : start + _PIECE_TOKENS] = values_TLH.view(np.uint32) >> 16

        with ThreadPoolExecutor(cores()) as pool:
            list(pool.map(fill, range(0, len(self._block_TLH), _PIECE_TOKENS)))

    def states(self, number: int) -> NDArray[np.uint16]:
        """bf16 bit patterns uint16 [T, L, H] of one row."""
        start = number * 389 % _BLOCK_TOKENS
        return self._block_TLH[start : start + ROW_TOKENS]


def row_bytes(hidden: int) -> int:
    """Bytes of one row's states."""
    return 2 * ROW_TOKENS * len(LAYERS) * hidden


def on_pages(shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
    """An array that begins on a page and whose pages are there.

    Large arrays of NumPy's begin 16 bytes past a page, from where some processors copy to a page's start at a third of the speed.
    """
    array: NDArray[Any] = np.frombuffer(mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(
        shape
    )
    array.fill(1)
    return array


def cores() -> int:
    return len(os.sched_getaffinity(0))


def hand_over(
    count: int, write: Callable[[int, Any], object], before_each: Callable[[int], Any] = lambda number: None
) -> None:
    """An engine that has its rows ready: hands over numbers as fast as the writers take them, few in flight.

    Args:
        count: rows.
        write: called in a writer's thread with the row's number and what ``before_each`` gave.
        before_each: called in the engine's thread, and may wait.
    """
    room = threading.Semaphore(_IN_FLIGHT)
    with ThreadPoolExecutor(_WRITERS) as pool:
        futures = []
        for number in range(count):
            given = before_each(number)
            room.acquire()
            future = pool.submit(write, number, given)
            future.add_done_callback(lambda _: room.release())
            futures.append(future)
        for future in futures:
            future.result()


def write_store(
    rows: SyntheticRows, spec: StoreSpec, folder: Path, workers: int, start_engine: Callable[[], object] = lambda: None
) -> Path:
    """Extraction into a store, as the project's connector and stage do it. Gives the published store.

    ``start_engine`` is called where the stage starts the engine: while the processes that write shards start.
    """
    lengths = {row_key(spec.fingerprint, ids): len(ids) for ids in rows.ids}
    spool = RowSpool(folder / "work" / "rows", spec)
    with Sealer(spool, spec, lengths, workers) as sealer:
        start_engine()
        hand_over(
            rows.count,
            lambda number, _: spool.write(rows.ids[number], rows.states(number)),
            lambda _: sealer.wait_for_room(),
        )
    publish(spool, folder / "store", spec, list(lengths), workers)
    return folder / "store"


def write_samples(rows: SyntheticRows, folder: Path) -> Path:
    """Extraction as vLLM 0.32's ExampleHiddenStatesConnector does it: one safetensors file a row, a lock file while it is written."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)

    def lock(number: int) -> int:
        descriptor = os.open(folder / f"hs_{number}.safetensors.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def save(number: int, descriptor: int) -> None:
        states = torch.from_numpy(rows.states(number).view(np.int16)).view(torch.bfloat16)
        tensors = {"hidden_states": states, "token_ids": torch.from_numpy(rows.ids[number].astype(np.int64))}
        try:
            save_file(tensors, folder / f"hs_{number}.safetensors")
        finally:
            os.close(descriptor)

    hand_over(rows.count, save, lock)
    return folder


def write_plain(rows: SyntheticRows, path: Path, count: int, block: int) -> None:
    """One file with the states of ``count`` rows in blocks of at most ``block`` bytes, flushed to the disk."""
    with path.open("wb", buffering=0) as stream:
        for number in range(count):
            view = rows.states(number).data.cast("B")
            for start in range(0, len(view), block):
                piece = view[start : start + block]
                while len(piece):
                    piece = piece[stream.write(piece) :]
        os.fsync(stream.fileno())


def prepare(
    rows: SyntheticRows, folder: Path, shard_mib: int, names: Sequence[str] = ("none", "lossless", "samples")
) -> dict[str, Path]:
    """The same rows as two stores and as one file a sample, on the disk; those that an earlier benchmark left are taken."""
    folder = folder / f"hidden-{rows.hidden}-rows-{rows.count}"
    places = {name: folder / name if name == "samples" else folder / name / "store" for name in names}
    for name, place in places.items():
        if place.exists():
            continue
        note(f"writing {rows.count} rows: {name}")
        if name == "samples":
            part = write_samples(rows, folder / "samples.part")
            for path in part.glob("*.lock"):
                path.unlink()
            part.rename(place)
        else:
            shutil.rmtree(folder / name, ignore_errors=True)
            write_store(rows, store_spec(rows.hidden, name, shard_mib), folder / name, max(1, cores() - 1))
    os.sync()
    return places


def token_rows(rows: SyntheticRows, fingerprint: str, supervised_from: int) -> dict[str, list[Any]]:
    """The rows with their masks, as the project's data path joins them: every token from ``supervised_from`` on counts."""
    from eyas.drafting.data import TokenRow, by_key

    mask = np.arange(ROW_TOKENS) >= supervised_from
    return by_key([TokenRow("", row_key(fingerprint, ids), ids, mask) for ids in rows.ids])


def sample_table(rows: SyntheticRows, samples: Path, supervised_from: int, times: int = 1) -> Path:
    """The dataset that speculators' loader reads beside the files, each of which it names ``times`` (by hard link).

    Every token from ``supervised_from`` on is supervised.
    """
    import pyarrow
    from datasets import Dataset

    count = rows.count * times
    for number in range(rows.count, count):
        link = samples / f"hs_{number}.safetensors"
        if not link.exists():
            os.link(samples / f"hs_{number % rows.count}.safetensors", link)
    table = samples.parent / f"dataset-{count}-{supervised_from}"
    if not table.exists():
        ids = np.concatenate([rows.ids] * times + [rows.ids[:1]])  # the last row is the validation split, never read
        mask = (np.arange(ROW_TOKENS) >= supervised_from).astype(np.int64)
        columns = {"input_ids": list(ids.astype(np.int64)), "loss_mask": [mask] * len(ids)}
        # with a name of its own, as hashing the table by content fails with some versions of pyarrow
        columns |= {"seq_len": [ROW_TOKENS] * len(ids)}
        dataset = Dataset(pyarrow.table(columns), fingerprint=table.name)
        dataset.set_format("torch")
        dataset.save_to_disk(table)
    return table


def speculators_loader(
    table: Path, samples: Path, hidden: int, tokens_per_batch: int, workers: int = SPECULATORS_WORKERS
) -> Any:
    """speculators' own training DataLoader over `sample_table`."""
    import torch
    from datasets import load_from_disk
    from hs_connectors import FileTransfer
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders

    rows = len(load_from_disk(table))
    loader, _ = create_train_val_loaders(
        data_path=str(table),
        total_seq_len=tokens_per_batch,
        hidden_states_dtype=torch.bfloat16,
        transfer=FileTransfer(samples),
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path="",
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=hidden,
        num_target_layers=len(LAYERS) - 1,
        num_workers=workers,
        prefetch_factor=SPECULATORS_PREFETCH,
        preprocess=shift_batch,
        train_data_ratio=(rows - 0.5) / rows,
    )
    return loader


def drop_from_cache(place: Path) -> None:
    """Flush everything, then drop the files of a folder (or one file) out of the page cache."""
    os.sync()
    for path in [place] if place.is_file() else sorted(place.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def disk_bytes() -> dict[str, int]:
    """Bytes that the machine's disks have read and written since it started."""
    counters = {"read": 0, "written": 0}
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if (Path("/sys/block") / fields[2]).exists() and not fields[2].startswith(_UNREAL_DISKS):
            counters["read"] += 512 * int(fields[5])
            counters["written"] += 512 * int(fields[9])
    return counters


class Measured:
    """Seconds of a ``with`` block, and what processor and disk did meanwhile; ended child processes count."""

    def __enter__(self) -> Measured:
        self.restart()
        return self

    def restart(self) -> None:
        """Forget what was so far."""
        self._disk, self._times, self._started = disk_bytes(), os.times(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        times, disk = os.times(), disk_bytes()
        self.cpu_seconds = sum(times[:4]) - sum(self._times[:4])
        self.system_seconds = sum(times[1:4:2]) - sum(self._times[1:4:2])
        self.read, self.written = disk["read"] - self._disk["read"], disk["written"] - self._disk["written"]


def note(text: str) -> None:
    """A line for whoever waits."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def print_table(header: Iterable[str], lines: Iterable[Iterable[Any]]) -> None:
    def shown(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.0f}"
        return "-" if value is None else f"{value:,}" if type(value) is int else str(value)

    table = [list(header), *([shown(value) for value in line] for line in lines)]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))


def write_report(out: Path | None, folder: Path | None, results: dict[str, Any]) -> None:
    """Write the results with machine, versions and command, if there is a place for them."""
    if out is None:
        return
    arguments = [a for a in sys.argv[1:] if a != "--out" and Path(a) != out]
    command = ["python", sys.argv[0], *arguments]
    result = {
        "command": " ".join("FOLDER" if Path(word) == folder else word for word in command),
        "machine": machine_description() | {"gpu": _gpu()},
        "versions": installed_versions(),
    }
    write_json_atomic(out, result | results)


def _gpu() -> str | None:
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
