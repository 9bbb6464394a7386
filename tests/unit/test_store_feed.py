"""Batches read ahead by processes: the right bits in the right order, bounded memory, and no process left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from eyas.errors import EyasError
from eyas.store.batches import PackedBatches
from eyas.store.feed import BatchFeed, FedBatch, _Piece, _pieces
from eyas.store.format import StoreSpec
from eyas.store.reader import StoreReader
from eyas.store.shards import DamageError
from eyas.store.spool import RowSpool
from eyas.store.writer import publish

CODECS = ["none", "lossless", "fp8"]
LAYERS, HIDDEN, ROWS = 3, 64, 60


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for codec in CODECS:
        folder = tmp_path_factory.mktemp(codec)
        spec = StoreSpec((2, 4, 7), HIDDEN, codec, {"engine": "fixed"}, 1)
        spool = RowSpool(folder / "work" / "rows", spec)
        keys = []
        for number in range(ROWS):
            source = np.random.default_rng(number)
            tokens = 50 + number * 31 % 170
            values = source.standard_normal((tokens, LAYERS, HIDDEN)).astype(np.float32)
            states = (values.view(np.uint32) >> 16).astype(np.uint16)
            keys.append(spool.write(source.integers(0, 1000, tokens).astype(np.int32), states))
        publish(spool, folder / "store", spec, keys)
        made[codec] = folder / "store"
    return made


def plan_of(store: Path, tokens: int = 600, **where: int) -> PackedBatches:
    reader = StoreReader(store)
    return PackedBatches(reader, reader.keys, tokens, seed=1, epoch=0, **where)


def assert_bits(fed: FedBatch, reader: StoreReader) -> None:
    rows = [reader.read(key) for key in fed.batch.keys]
    assert fed.lengths == [len(row.input_ids) for row in rows]
    assert fed.hidden_TLH.dtype == np.uint16
    assert fed.input_ids.dtype == np.int32
    assert np.array_equal(fed.hidden_TLH, np.concatenate([row.hidden_TLH for row in rows]))
    assert np.array_equal(fed.input_ids, np.concatenate([row.input_ids for row in rows]))


def running(pid: int) -> bool:
    """A process that nobody has collected yet does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_every_row_once_in_the_planned_order_with_its_bits(stores: dict[str, Path], codec: str, workers: int) -> None:
    plan, reader, seen = plan_of(stores[codec]), StoreReader(stores[codec]), []
    with BatchFeed(plan, workers=workers) as feed:
        for fed in feed:
            assert_bits(fed, reader)
            seen.append(fed.batch)
        assert list(feed) == []
    assert seen == list(plan)
    assert sorted(key for batch in seen for key in batch.keys) == sorted(reader.keys)
    assert feed.waited_s > 0


def test_goes_on_from_any_position(stores: dict[str, Path]) -> None:
    plan, reader = plan_of(stores["none"]), StoreReader(stores["none"])
    for start in (1, 5, len(plan) - 1, len(plan)):
        positions = []
        with BatchFeed(plan, start) as feed:
            for fed in feed:
                assert_bits(fed, reader)
                positions.append(fed.batch.position)
        assert positions == list(range(start, len(plan)))
    for wrong in ({"start": len(plan) + 1}, {"start": -1}, {"workers": 0}, {"ahead": 0}):
        with pytest.raises(EyasError, match="out of range"):
            BatchFeed(plan, **wrong)


def test_ranks_have_nothing_in_common_and_nothing_is_missing(stores: dict[str, Path]) -> None:
    reader, seen = StoreReader(stores["none"]), []
    # a number of ranks that divides the number of batches: else the first come twice
    world = next(n for n in (2, 3, 5, 7) if len(plan_of(stores["none"])) % n == 0)
    for rank in range(world):
        with BatchFeed(plan_of(stores["none"], rank=rank, world=world), workers=2) as feed:
            for fed in feed:
                assert_bits(fed, reader)
                seen += fed.batch.keys
    assert sorted(seen) == sorted(reader.keys)


def test_a_few_buffers_serve_all_batches(stores: dict[str, Path]) -> None:
    plan, reader = plan_of(stores["lossless"], 300), StoreReader(stores["lossless"])
    whole: list[np.ndarray] = []
    used: list[int] = []
    with BatchFeed(plan, workers=2, ahead=2, on_buffer=whole.append) as feed:
        assert len(whole) == 3
        for fed in feed:
            if len(used) < 6:
                time.sleep(0.1)  # the readers have all the time to write where they should not
            assert_bits(fed, reader)
            holders = [n for n, memory in enumerate(whole) if np.shares_memory(memory, fed.hidden_TLH)]
            assert holders == [n for n, memory in enumerate(whole) if np.shares_memory(memory, fed.input_ids)]
            used += holders
    assert len(whole) == 3
    assert len(used) == len(plan) > 9
    assert used == [used[n % 3] for n in range(len(used))]
    needed = plan.capacity * (2 * LAYERS * HIDDEN + 4)
    assert all(needed <= memory.nbytes < needed + 4096 for memory in whole)
    assert all(memory.ctypes.data % 4096 == 0 for memory in whole)


def test_a_row_longer_than_a_batch_is_fed(stores: dict[str, Path]) -> None:
    plan, reader = plan_of(stores["none"], 100), StoreReader(stores["none"])
    with BatchFeed(plan, workers=3) as feed:
        assert max(fed.batch.tokens for fed in feed if assert_bits(fed, reader) is None) == plan.capacity > 100


def test_work_is_shared_out(stores: dict[str, Path]) -> None:
    for tokens in (100, 600):  # one row a batch, and many
        plan = plan_of(stores["none"], tokens)
        with BatchFeed(plan, workers=3) as feed:
            for _ in feed:
                pass
            given = [reader.given for reader in feed._readers]
        assert sum(given) == sum(batch.tokens for batch in plan)
        assert max(given) < 1.3 * min(given)


def test_the_disk_begins_with_all_that_waits_before_the_first_is_read(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    advise = os.posix_fadvise

    def noted(descriptor: int, offset: int, length: int, advice: int) -> None:
        asked.append(offset)
        advise(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    ours, theirs = multiprocessing.Pipe()
    with StoreReader(stores["lossless"]) as reader, theirs:
        rows = [reader.row(key) for key in reader.keys[:3]]
        given = [_Piece(0, 0, (row,)) for row in rows]
        for piece in given[:2]:
            ours.send(piece)
        pieces = _pieces(theirs, reader.shards)
        assert next(pieces) == given[0]
        assert len(asked) == 2  # a row of this size is one piece of advice
        ours.send(given[2])
        assert next(pieces) == given[1]
        assert len(asked) == 3
        assert next(pieces) == given[2]
        ours.close()
        with pytest.raises(EOFError):
            next(pieces)


@pytest.mark.parametrize(("codec", "fault"), [("none", "flipped"), ("none", "missing"), ("lossless", "missing")])
def test_damage_is_named_where_it_comes(stores: dict[str, Path], tmp_path: Path, codec: str, fault: str) -> None:
    store = tmp_path / "store"
    shutil.copytree(stores[codec], store)
    plan = plan_of(store, 300)
    position = len(plan) // 2
    key = plan[position].keys[0]
    shard = store / plan.reader.shard_of(key)
    if fault == "flipped":
        shard.chmod(0o644)
        with h5py.File(shard, "r+") as file:
            first = int(file["row_offsets"][plan.reader.row(key).row])
            file["hidden_states"][first, 1, 5] ^= 4
    else:
        shard.unlink()
    healthy = 0
    with BatchFeed(plan, workers=2) as feed:
        with pytest.raises(DamageError) as caught:
            for fed in feed:
                assert all(name != key for name in fed.batch.keys)
                healthy += 1
        assert not feed._readers
        with pytest.raises(EyasError, match="closed"):
            next(feed)
    assert caught.value.shard == shard
    assert shard.name in str(caught.value)
    if fault == "flipped":
        assert (healthy, caught.value.row, caught.value.dataset) == (position, key, "hidden_states")


def test_a_killed_reader_is_an_error(stores: dict[str, Path]) -> None:
    with BatchFeed(plan_of(stores["none"], 100), workers=2) as feed:
        next(feed)
        os.kill(feed._readers[1].process.pid, signal.SIGKILL)
        with pytest.raises(EyasError, match="-9"):
            for _ in feed:
                pass


def test_closing_in_the_middle_leaves_nothing(stores: dict[str, Path]) -> None:
    def traces() -> int:
        found = Path("/proc/self/maps").read_text().count("eyas-batches")
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                found += "eyas-batches" in str(link.readlink())
        return found

    with BatchFeed(plan_of(stores["none"]), workers=2) as feed:
        fed = next(feed)
        pids = [reader.process.pid for reader in feed._readers]
        assert traces() > 0
        assert all(map(running, pids))
    assert not any(map(running, pids))
    assert not multiprocessing.active_children()
    assert fed.hidden_TLH.any()  # what the consumer still holds is not pulled from under it
    del fed
    gc.collect()
    assert traces() == 0

    forgotten = BatchFeed(plan_of(stores["none"]), workers=1)
    pid = forgotten._readers[0].process.pid
    del forgotten
    gc.collect()
    assert wait_until(lambda: not running(pid))
    assert traces() == 0


def test_readers_end_with_a_killed_consumer(stores: dict[str, Path]) -> None:
    consumer = subprocess.Popen([sys.executable, __file__, str(stores["lossless"])], stdout=subprocess.PIPE, text=True)
    assert consumer.stdout is not None
    pids = [int(word) for word in consumer.stdout.readline().split()]
    assert len(pids) == 3
    assert all(map(running, pids))
    consumer.kill()
    consumer.wait()
    consumer.stdout.close()
    assert wait_until(lambda: not any(map(running, pids)))


def test_readers_start_quickly_because_they_import_little(stores: dict[str, Path]) -> None:
    import torch  # noqa: F401

    with BatchFeed(plan_of(stores["none"])) as feed:
        next(feed)
        assert "torch" not in Path(f"/proc/{feed._readers[0].process.pid}/maps").read_text()


if __name__ == "__main__":
    endless = BatchFeed(plan_of(Path(sys.argv[1]), 100), workers=3)
    next(endless)
    print(*[reader.process.pid for reader in endless._readers], flush=True)
    time.sleep(60)
