"""Extraction from token rows to a published store: record what is missing, prove it right, then publish.

Shape legend: T tokens, L layers, H hidden size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyas.console import Progress, console
from eyas.errors import EyasError
from eyas.extraction.form import TokenRow, check_form, check_rows, checked_row
from eyas.extraction.recorder import Recorder
from eyas.extraction.reference import affordable, reference_states
from eyas.extraction.selfcheck import (
    check_alone,
    check_greedy,
    check_reference,
    check_sampled,
)
from eyas.params import ExtractParams, TargetParams
from eyas.process import process_pool
from eyas.published import cached_stores
from eyas.store.format import StoreSpec, row_key
from eyas.store.spool import RowSpool
from eyas.store.writer import Sealer
from eyas.targets.head import load_head

NORM_CONVENTION = "final layer before the final norm"
ALONE = "alone/rows"  # a spool of its own: a row recorded alone has the key of the same row in a batch
_ALONE_ROWS = 2
_REFERENCE_ROWS = 4
_SAMPLED_SHARE = 6  # one new row in so many: what an addition costs follows its size
_LEAST_SAMPLED, _MOST_SAMPLED = 8, 64
_SPARE_BYTES = 256 << 20
_ROWS_A_TASK = 64


def store_spec(target: dict[str, Any], params: ExtractParams, engine_version: str) -> StoreSpec:
    """What the store will hold; its fingerprint changes with the target, the layers and the engine, not with the data.

    Raises:
        EyasError: a layer id that the target does not have.
    """
    beyond = [layer for layer in params.layers if not 0 <= layer <= target["num_layers"]]
    if beyond:
        raise EyasError(f"extract.layers: {beyond} not in 0..{target['num_layers']}, the target's layers")
    if params.layers[-1] != target["num_layers"]:
        raise EyasError(
            f"extract.layers: the last id must be {target['num_layers']} (after the target's last layer), "
            f"got {params.layers[-1]}"
        )
    identity = {
        name: target[name] for name in ("source", "revision", "dtype", "config_hash", "weights_hash", "architecture")
    } | {"norm_convention": NORM_CONVENTION, "engine": "vllm", "engine_version": engine_version}
    return StoreSpec(tuple(params.layers), target["hidden_size"], params.codec, identity, params.shard_mib)


def adopt_published(spool: RowSpool, profile: str) -> None:
    """Take over what the cache has of this and other profiles' stores; says why where this profile starts afresh."""
    for cached in cached_stores():
        with cached.view(spool.directory.parent) as store:
            try:
                reasons = spool.adopt(store)
            except EyasError as error:
                console.print(f"{cached.profile}'s earlier store is not reused: {error}", markup=False, soft_wrap=True)
                continue
        if reasons and cached.profile == profile:
            console.print(f"extraction starts afresh: {'; '.join(reasons)}", markup=False, soft_wrap=True)


def check_disk(folder: Path, new_tokens: int, spec: StoreSpec, workers: int) -> None:
    """Refuse to start what the disk cannot hold: the shards, uncompressed, the loose rows beside them, and room to spare.

    Raises:
        EyasError: too little room.
    """
    tokens_bytes = new_tokens * spec.row_bytes
    needed = tokens_bytes + min(tokens_bytes, (workers + 2) * (spec.shard_mib << 20)) + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EyasError(
            f"extraction of {new_tokens} tokens needs up to {needed / 2**30:.1f} GiB on {folder.absolute()}, "
            f"{free / 2**30:.1f} GiB are free; free some space or move the checkout to a larger disk"
        )


def record_missing(
    open_recorder: Callable[[], Recorder], work: Path, spec: StoreSpec, rows: Sequence[TokenRow], workers: int
) -> tuple[int, float]:
    """Record the rows that the scratch and its shards lack; the engine starts only if there are any.

    Args:
        open_recorder: starts the engine.
        work: scratch of this fingerprint.
        spec: of the store.
        rows: probes and rows to store, in the order of the store.
        workers: processes that write shards meanwhile.

    Returns:
        Tokens recorded now, and the seconds that it took, the engine's start aside.
    """
    spool, alone = RowSpool(work / "rows", spec), RowSpool(work / ALONE, spec)
    wanted = {row_key(spec.fingerprint, row.input_ids): row.input_ids for row in rows}
    missing = [wanted[key] for key in spool.missing(wanted)]
    single = {row_key(spec.fingerprint, row.input_ids): row.input_ids for row in _probes(rows)[:_ALONE_ROWS]}
    absent = alone.missing(single)
    if not missing and not absent:
        return 0, 0.0
    tokens = sum(map(len, missing))
    check_disk(work, tokens, spec, workers)
    with Sealer(spool, spec, stored_lengths(spec, rows), workers) as sealer:
        recorder = open_recorder()
        seconds = recorder.record(missing, "hidden states", before_each=sealer.wait_for_room)
    for ids in [single[key] for key in absent]:
        recorder.record([ids], "hidden states, alone", spool=ALONE)
    return tokens, seconds


def stored_lengths(spec: StoreSpec, rows: Sequence[TokenRow]) -> dict[str, int]:
    """Tokens by row key of the rows that go into the store, in its order; probe rows are for the self-check alone."""
    return {row_key(spec.fingerprint, row.input_ids): len(row.input_ids) for row in rows if not row.probe}


def self_check(
    directory: Path, target: TargetParams, work: Path, spec: StoreSpec, rows: Sequence[TokenRow], workers: int
) -> dict[str, Any]:
    """Every check of invariant 1 on what the spool holds; the result goes into the metrics.

    Args:
        directory: the target's.
        target: its parameters.
        work: scratch of this fingerprint.
        spec: of the store.
        rows: probes and rows to store.
        workers: processes that look at every new row.

    Raises:
        EyasError: a check failed; nothing has been published.
    """
    spool, alone = RowSpool(work / "rows", spec), RowSpool(work / ALONE, spec)
    head = load_head(directory)
    probes = [checked_row(spool, spec, row) for row in _probes(rows)]
    proven = {key for name in spool.published() for key in spool.sealed()[name].keys}
    recorded = [row for row in rows if not row.probe]
    unproven = [row for row in recorded if row_key(spec.fingerprint, row.input_ids) not in proven]
    _check_every(spool, spec, unproven, workers)
    # of answers that the data holds no engine has said how likely they are; the probes are answered in any case
    chosen = [r for r in unproven if r.generated] or [r for r in recorded if r.generated] or _probes(rows)
    count = min(max(len(chosen) // _SAMPLED_SHARE, _LEAST_SAMPLED), _MOST_SAMPLED)
    sampled = [checked_row(spool, spec, row) for row in chosen[:: max(1, len(chosen) // count)][:count]]
    check_form(probes, spec.layers)
    parity = check_greedy(probes, head, spec.layers, engine_rounds=target.dtype != "float32")
    singles = [alone.read(row_key(spec.fingerprint, row.input_ids))[1] for row in probes[:_ALONE_ROWS]]
    figures: dict[str, Any] = {
        "head_parity": parity.exact,
        "head_parity_ties": parity.with_ties,
        "head_parity_positions": parity.positions,
        "alone_difference": check_alone(probes[:_ALONE_ROWS], singles, spec.layers),
        "logprob_difference": check_sampled(sampled, head, spec.layers),
        "checked_rows": len(unproven) + len(probes),
    }
    if affordable(directory):
        reference = probes[:_REFERENCE_ROWS]
        ids = [row.input_ids.tolist() for row in reference]
        expected = reference_states(directory, ids, spec.layers, trust_remote_code=target.trust_remote_code)
        figures["reference_error"] = check_reference(reference, expected, spec.layers)
    return figures


def _check_every(spool: RowSpool, spec: StoreSpec, rows: Sequence[TokenRow], workers: int) -> None:
    pieces = [rows[start : start + _ROWS_A_TASK] for start in range(0, len(rows), _ROWS_A_TASK)]
    with Progress("checking rows", len(rows), "rows") as progress, process_pool(workers, check_rows) as pool:
        for future in [pool.submit(check_rows, spool, spec, piece) for piece in pieces]:
            progress.advance(future.result())


def _probes(rows: Sequence[TokenRow]) -> list[TokenRow]:
    return [row for row in rows if row.probe]
