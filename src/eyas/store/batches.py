"""Packs of whole rows for training, in an order that seed and epoch decide.

Takes a `StoreReader` and row keys; gives, for each position, the rows of one batch. The same arguments give the same
plan on every machine, so a position is all that a resume needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eyas.errors import EyasError
from eyas.store.reader import StoreReader

_OPEN_PACKS = 32


@dataclass(frozen=True)
class Batch:
    """The rows of one pack: ``position`` counts this rank's batches of the epoch."""

    position: int
    keys: tuple[str, ...]
    tokens: int


@dataclass
class _Pack:
    keys: list[str]
    room: int


def _rank(seed: int, epoch: int, name: str) -> bytes:
    """A random-looking place in the order that is the same with every version of everything."""
    return hashlib.blake2b(f"{seed}/{epoch}/{name}".encode(), digest_size=16).digest()


class PackedBatches:
    """One epoch of batches, each of whole rows, for one rank of several. Can be sent to spawned processes.

    A batch has at most ``tokens_per_batch`` tokens; a longer row is a batch of its own.
    """

    def __init__(
        self,
        reader: StoreReader,
        keys: Sequence[str],
        tokens_per_batch: int,
        seed: int,
        epoch: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Plan the epoch: shards in random order, their rows in random order, packed first-fit into a few open packs.

        All ranks get the same number of batches; where the number does not divide, the first batches come once more.

        Raises:
            EyasError: no rows, a row that the store lacks, a rank out of range.
        """
        if not keys or not 0 <= rank < world:
            raise EyasError(f"no rows to train on, or rank {rank} of {world} is out of range")
        self.reader, self.tokens_per_batch = reader, tokens_per_batch
        self._capacity = max(tokens_per_batch, max(map(reader.length, keys)))
        packs = self._pack(sorted(dict.fromkeys(keys), key=lambda key: self._order(seed, epoch, key)))
        packs += [packs[index % len(packs)] for index in range(-len(packs) % world)]
        self._batches = [
            Batch(position, tuple(pack.keys), tokens_per_batch - pack.room)
            for position, pack in enumerate(packs[rank::world])
        ]

    def _order(self, seed: int, epoch: int, key: str) -> tuple[bytes, bytes]:
        return _rank(seed, epoch, self.reader.shard_of(key)), _rank(seed, epoch, key)

    def _pack(self, keys: Sequence[str]) -> list[_Pack]:
        """First fit; with too many open packs the fullest is closed, so that a batch touches few shards."""
        closed: list[_Pack] = []
        opened: list[_Pack] = []
        for key in keys:
            length = self.reader.length(key)
            pack = next((pack for pack in opened if pack.room >= length), None)
            if pack is None:
                if len(opened) == _OPEN_PACKS:
                    closed.append(opened.pop(min(range(len(opened)), key=lambda index: opened[index].room)))
                pack = _Pack([], self.tokens_per_batch)
                opened.append(pack)
            pack.keys.append(key)
            pack.room -= length
            if pack.room <= 0:
                opened.remove(pack)
                closed.append(pack)
        return closed + opened

    @property
    def capacity(self) -> int:
        """Tokens that a buffer for any of the batches needs."""
        return self._capacity

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, position: int) -> Batch:
        return self._batches[position]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)
