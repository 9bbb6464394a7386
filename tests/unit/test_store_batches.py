from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from eyas.errors import EyasError
from eyas.store.batches import PackedBatches
from eyas.store.format import StoreSpec
from eyas.store.reader import StoreReader
from eyas.store.spool import RowSpool
from eyas.store.writer import publish

SPEC = StoreSpec((1, 2), 128, "lossless", {"engine": "fixed"}, 1)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    folder = tmp_path_factory.mktemp("batches")
    spool = RowSpool(folder / "work" / "rows", SPEC)
    keys = []
    for number in range(120):
        source = np.random.default_rng(number)
        tokens = int(source.integers(20, 400))
        hidden = source.integers(0, 65536, (tokens, 2, 128)).astype(np.uint16)
        keys.append(spool.write(source.integers(0, 1000, tokens).astype(np.int32), hidden))
    publish(spool, folder / "store", SPEC, keys)
    return StoreReader(folder / "store")


def test_every_row_is_in_exactly_one_batch_and_batches_fit(reader: StoreReader) -> None:
    batches = PackedBatches(reader, reader.keys, 1024, seed=1, epoch=0)
    seen = [key for batch in batches for key in batch.keys]
    assert sorted(seen) == sorted(reader.keys)
    assert all(batch.tokens == sum(map(reader.length, batch.keys)) <= 1024 for batch in batches)
    assert sum(batch.tokens for batch in batches) / (len(batches) * 1024) > 0.85
    assert [batch.position for batch in batches] == list(range(len(batches)))


def test_the_plan_follows_from_seed_and_epoch(reader: StoreReader) -> None:
    def plan(seed: int, epoch: int, keys: list[str]) -> list[tuple[str, ...]]:
        return [batch.keys for batch in PackedBatches(reader, keys, 1024, seed, epoch)]

    assert plan(1, 0, reader.keys) == plan(1, 0, reader.keys[::-1])
    assert len({str(plan(seed, epoch, reader.keys)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_rows_of_a_shard_stay_near_each_other(reader: StoreReader) -> None:
    assert len(reader.manifest.shards) > 5
    batches = PackedBatches(reader, reader.keys, 1024, seed=1, epoch=0)
    order = [reader.shard_of(batch.keys[0]) for batch in batches]
    changes = sum(before != after for before, after in pairwise(order))
    assert changes < len(order) * 0.6


def test_ranks_share_the_epoch(reader: StoreReader) -> None:
    whole = PackedBatches(reader, reader.keys, 1024, seed=1, epoch=0)
    ranks = [PackedBatches(reader, reader.keys, 1024, 1, 0, rank, 4) for rank in range(4)]
    assert len({len(rank) for rank in ranks}) == 1
    together = [ranks[number % 4][number // 4].keys for number in range(len(whole))]
    assert together == [batch.keys for batch in whole]


class _Batches(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """What a loader of somebody else's would make of a plan."""

    def __init__(self, plan: PackedBatches) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.plan.reader.read(key) for key in self.plan[position].keys]
        states = np.concatenate([row.hidden_TLH for row in rows])
        return torch.from_numpy(np.concatenate([row.input_ids for row in rows])), torch.from_numpy(states)


def test_a_plan_goes_to_spawned_workers_of_torch(reader: StoreReader) -> None:
    plan = PackedBatches(reader, reader.keys, 4096, seed=3, epoch=2)
    reader.read(reader.keys[0])  # an open shard is no obstacle
    loader = torch.utils.data.DataLoader(
        _Batches(plan), batch_size=None, num_workers=2, multiprocessing_context="spawn"
    )
    loaded = list(loader)
    assert len(loaded) == len(plan)
    for batch, (ids, states) in zip(plan, loaded, strict=True):
        rows = [reader.read(key) for key in batch.keys]
        assert np.array_equal(ids.numpy(), np.concatenate([row.input_ids for row in rows]))
        assert np.array_equal(states.numpy(), np.concatenate([row.hidden_TLH for row in rows]))


def test_a_row_longer_than_a_batch_comes_alone(reader: StoreReader) -> None:
    batches = PackedBatches(reader, reader.keys, 200, seed=0, epoch=0)
    assert sorted(key for batch in batches for key in batch.keys) == sorted(reader.keys)
    assert all(len(batch.keys) == 1 for batch in batches if batch.tokens > 200)
    assert batches.capacity == max(reader.lengths) == max(batch.tokens for batch in batches) > 200
    assert PackedBatches(reader, reader.keys, 1024, seed=0, epoch=0).capacity == 1024


def test_what_cannot_be_planned_is_an_error(reader: StoreReader) -> None:
    with pytest.raises(EyasError, match="no live row"):
        PackedBatches(reader, ["0" * 32], 1024, seed=0, epoch=0)
    with pytest.raises(EyasError, match="rank"):
        PackedBatches(reader, reader.keys, 1024, 0, 0, 2, 2)
    with pytest.raises(EyasError, match="no rows"):
        PackedBatches(reader, [], 1024, seed=0, epoch=0)
