"""Looking after a published store: find damage, describe it, and drop dead rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.console import Progress
from eyas.errors import EyasError
from eyas.files import atomic_directory
from eyas.process import process_pool
from eyas.store.format import LiveRow, Manifest, ShardRecord, shard_name
from eyas.store.reader import StoreReader
from eyas.store.shards import DamageError, ShardFile, link_shard, write_shard

_ROWS_PER_TASK = 64
_DEAD_SHARE = 1 / 3


@dataclass(frozen=True)
class Damage:
    """One fault: in which shard, and where known in which row and dataset."""

    shard: str
    row: str | None
    dataset: str | None
    reason: str


def _damage(error: DamageError) -> Damage:
    return Damage(error.shard.name, error.row, error.dataset, error.reason)


def _check_rows(path: Path, record: ShardRecord, fingerprint: str, rows: Sequence[int]) -> list[Damage]:
    found = []
    try:
        with ShardFile(path, record) as shard:
            if shard.fingerprint != fingerprint:
                raise DamageError(path, None, "attributes", "the fingerprint is not the manifest's")
            for row in rows:
                try:
                    shard.read(row)
                except DamageError as error:
                    found.append(_damage(error))
    except DamageError as error:
        found.append(_damage(error))
    except EyasError as error:
        found.append(Damage(path.name, None, None, str(error)))
    return found


def check_shard(path: Path, record: ShardRecord, fingerprint: str) -> list[Damage]:
    """Read all rows of one shard and compare them with their checksums."""
    return _check_rows(path, record, fingerprint, range(record.rows))


def verify_store(directory: Path, sample: int | None, workers: int) -> list[Damage]:
    """Read rows back and compare their checksums.

    Args:
        directory: the published store.
        sample: read so many live rows, chosen at random; None for all rows, dead ones too.
        workers: processes.

    Raises:
        EyasError: the manifest itself cannot be used.
    """
    manifest = Manifest.read(directory)
    listed: dict[int, list[LiveRow]] = {number: [] for number in range(len(manifest.shards))}
    for live in manifest.rows:
        listed[live.shard].append(live)
    damages: dict[Damage, None] = {}
    rows: dict[int, list[int]] = {}
    for number, record in enumerate(manifest.shards):
        found, there = _check_places(directory / record.name, record, listed[number])
        damages |= dict.fromkeys(found)
        rows[number] = list(range(there))
    if sample is not None:
        chosen_rows = random.sample(manifest.rows, min(sample, len(manifest.rows)))
        rows = {number: [r.row for r in chosen_rows if r.shard == number and r.row in rows[number]] for number in rows}
    tasks = [
        (number, sorted(chosen)[start : start + _ROWS_PER_TASK])
        for number, chosen in rows.items()
        for start in range(0, max(1, len(chosen)), _ROWS_PER_TASK)
    ]
    with Progress("verifying", sum(len(chosen) for _, chosen in tasks), "rows") as progress:
        arguments = [
            (directory / manifest.shards[number].name, manifest.shards[number], manifest.spec.fingerprint, chosen)
            for number, chosen in tasks
        ]
        with process_pool(workers, _check_rows) as pool:
            futures = [(pool.submit(_check_rows, *argument), len(argument[3])) for argument in arguments]
            for future, count in futures:
                damages |= dict.fromkeys(future.result())
                progress.advance(count)
    return list(damages)


def _check_places(path: Path, record: ShardRecord, listed: Sequence[LiveRow]) -> tuple[list[Damage], int]:
    """Whether a shard has the rows that the manifest says, where it says; and how many it has.

    A shard that does not open is found by reading it.
    """
    try:
        with ShardFile(path, record) as shard:
            found = [
                Damage(path.name, live.key, "row_keys", "the manifest's row is not where it says")
                for live in listed
                if live.row >= len(shard.keys)
                or shard.keys[live.row] != live.key
                or shard.length(live.row) != live.tokens
            ]
            if (len(shard.keys), shard.tokens) != (record.rows, record.tokens):
                reason = f"has {len(shard.keys)} rows of {shard.tokens} tokens, the manifest says {record.rows} of {record.tokens}"
                found.append(Damage(path.name, None, "row_keys", reason))
            return found, len(shard.keys)
    except EyasError:
        return [], 0


def store_info(directory: Path) -> dict[str, Any]:
    """Rows, tokens, bytes, ratio, layers, fingerprint of a published store, as JSON values.

    Raises:
        EyasError: the manifest cannot be used.
    """
    manifest = Manifest.read(directory)
    spec = manifest.spec
    stored_tokens = sum(record.tokens for record in manifest.shards)
    stored_bytes = sum(record.bytes for record in manifest.shards)
    return {
        "rows": len(manifest.rows),
        "tokens": manifest.tokens,
        "shards": len(manifest.shards),
        "dead_rows": sum(record.rows for record in manifest.shards) - len(manifest.rows),
        "dead_tokens": stored_tokens - manifest.tokens,
        "bytes": stored_bytes,
        "bytes_per_token": stored_bytes / stored_tokens if stored_tokens else 0.0,
        "ratio": stored_tokens * spec.row_bytes / stored_bytes if stored_bytes else 0.0,
        "codec": spec.codec,
        "lossy": spec.lossy,
        "layers": list(spec.layers),
        "hidden_size": spec.hidden_size,
        "fingerprint": spec.fingerprint,
        "identity": spec.identity,
    }


def compact(directory: Path, out: Path) -> Manifest:
    """Write the store again without dead rows: shards of which more than a third is dead, the others as hard links.

    ``out`` may be ``directory`` itself; it is replaced as a whole. With nothing to rewrite, ``out`` is not touched.

    Raises:
        EyasError: a row that must be moved is damaged.
    """
    with StoreReader(directory) as reader:
        manifest, spec = reader.manifest, reader.spec
        live = [0] * len(manifest.shards)
        for row in manifest.rows:
            live[row.shard] += row.tokens
        rewrite = {
            number
            for number, record in enumerate(manifest.shards)
            if record.tokens - live[number] > _DEAD_SHARE * record.tokens
        }
        if not rewrite and out == directory:
            return manifest
        groups: list[list[LiveRow]] = []
        room = 0
        for row in manifest.rows:
            if row.shard not in rewrite:
                continue
            if not groups or room < row.tokens:
                groups.append([])
                room = max(row.tokens, (spec.shard_mib << 20) // spec.row_bytes)
            groups[-1].append(row)
            room -= row.tokens
        with (
            Progress("compacting", sum(len(group) for group in groups), "rows") as progress,
            atomic_directory(out) as temporary,
        ):
            records: dict[str, ShardRecord] = {}
            places: dict[str, tuple[str, int]] = {}
            for number, record in enumerate(manifest.shards):
                if number not in rewrite:
                    link_shard(directory / record.name, temporary / record.name)
                    records[record.name] = record
            for row in manifest.rows:
                if row.shard not in rewrite:
                    places[row.key] = (manifest.shards[row.shard].name, row.row)

            for group in groups:
                keys = [row.key for row in group]
                name = shard_name(spec.codec, keys)
                write_shard(temporary / name, spec, keys, [row.tokens for row in group], reader.stored)
                with ShardFile(temporary / name) as shard:
                    records[name] = shard.record()
                places |= {key: (name, index) for index, key in enumerate(keys)}
                progress.advance(len(group))
            names = sorted(records)
            rows = tuple(
                LiveRow(row.key, names.index(places[row.key][0]), places[row.key][1], row.tokens)
                for row in manifest.rows
            )
            compacted = Manifest(spec, tuple(records[name] for name in names), rows)
            compacted.write(temporary)
    return compacted
