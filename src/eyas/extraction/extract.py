"""Extraction from token rows to a published store: record what is missing, prove it right, then publish.

Shape legend: T tokens, L layers, H hidden size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import EyasError
from eyas.extraction.recorder import Recorder
from eyas.extraction.reference import affordable, reference_states
from eyas.extraction.selfcheck import (
    CheckedRow,
    check_alone,
    check_form,
    check_greedy,
    check_reference,
    check_sampled,
)
from eyas.params import ExtractParams, TargetParams
from eyas.store.format import StoreSpec, row_key
from eyas.store.writer import RowSpool
from eyas.targets.head import load_head

NORM_CONVENTION = "final layer before the final norm"
ALONE = "alone/rows"  # a spool of its own: a row recorded alone has the key of the same row in a batch
_ALONE_ROWS = 2
_REFERENCE_ROWS = 8
_SAMPLED_ROWS = 64
_SPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class TokenRow:
    """What extraction needs of a row of the tokens table."""

    name: str
    probe: bool
    input_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]


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


def check_disk(folder: Path, new_tokens: int, spec: StoreSpec) -> None:
    """Refuse to start what the disk cannot hold: the spool and the shards, uncompressed, and some room to spare.

    Raises:
        EyasError: too little room.
    """
    needed = 2 * new_tokens * len(spec.layers) * spec.hidden_size * 2 + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EyasError(
            f"extraction of {new_tokens} tokens needs up to {needed / 2**30:.1f} GiB on {folder.absolute()}, "
            f"{free / 2**30:.1f} GiB are free; free some space or move the checkout to a larger disk"
        )


def record_missing(
    open_recorder: Callable[[], Recorder], work: Path, spec: StoreSpec, rows: Sequence[TokenRow]
) -> tuple[int, float]:
    """Record the rows that the scratch and its shards lack; the engine starts only if there are any.

    Returns:
        Tokens recorded now, and the seconds that it took, the engine's start aside.
    """
    spool, alone = RowSpool(work / "rows", spec), RowSpool(work / ALONE, spec)
    wanted = {row_key(spec.fingerprint, row.input_ids): row.input_ids for row in rows}
    missing = {key: ids for key, ids in wanted.items() if not spool.has(key)}
    single = [r.input_ids for r in _probes(rows)[:_ALONE_ROWS]]
    single = [ids for ids in single if not alone.has(row_key(spec.fingerprint, ids))]
    if not missing and not single:
        return 0, 0.0
    tokens = sum(map(len, missing.values()))
    check_disk(work, tokens, spec)
    recorder = open_recorder()
    seconds = recorder.record(list(missing.values()), "hidden states")
    for ids in single:
        recorder.record([ids], "hidden states, alone", spool=ALONE)
    return tokens, seconds


def self_check(
    directory: Path, target: TargetParams, work: Path, spec: StoreSpec, rows: Sequence[TokenRow]
) -> dict[str, Any]:
    """Every check of invariant 1 on what the spool holds; the result goes into the metrics.

    Raises:
        EyasError: a check failed; nothing has been published.
    """
    spool, alone = RowSpool(work / "rows", spec), RowSpool(work / ALONE, spec)
    head = load_head(directory)
    probes = [_checked(spool, spec, row) for row in _probes(rows)]
    proven = {key for name in spool.published() for key in spool.sealed()[name].keys}
    recorded = [row for row in rows if not row.probe]
    unproven = [row for row in recorded if row_key(spec.fingerprint, row.input_ids) not in proven]
    for row in unproven:
        check_form([_checked(spool, spec, row)], spec.layers)
    chosen = unproven or recorded
    sampled = [_checked(spool, spec, row) for row in chosen[:: max(1, len(chosen) // _SAMPLED_ROWS)][:_SAMPLED_ROWS]]
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


def _probes(rows: Sequence[TokenRow]) -> list[TokenRow]:
    return [row for row in rows if row.probe]


def _checked(spool: RowSpool, spec: StoreSpec, row: TokenRow) -> CheckedRow:
    input_ids, hidden_TLH = spool.read(row_key(spec.fingerprint, row.input_ids))
    return CheckedRow(
        row.name, input_ids, np.asarray(row.loss_mask), np.asarray(row.logprobs, dtype=np.float32), hidden_TLH
    )
