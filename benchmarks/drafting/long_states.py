"""Hidden states of rows of tokens, recorded into the project's store.

Takes the target's folder and a file of rows (`benchmarks.drafting.long_text`); gives ``FOLDER/store``: the states by transformers in
float32, on a GPU if there is one, rounded to bfloat16 and written by the project's own spool and sealer.

Shape legend: B rows, T tokens, L layers, H hidden.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.drafting.long_text import load_rows
from benchmarks.store.common import note
from eyas.drafting.ranks import training_device
from eyas.errors import EyasError
from eyas.extraction.reference import entering_states, reference_states
from eyas.params import TargetParams
from eyas.store.format import StoreSpec, row_key
from eyas.store.reader import StoreReader
from eyas.store.spool import RowSpool
from eyas.store.writer import Sealer, publish
from eyas.targets.resolve import describe_target, text_config

_CHUNK_ROWS = 4096
_WRITERS = 8
_COMPARED_ROWS, _MOST_OFF = 2, 1e-2


def extract(
    target: Path,
    rows: Path,
    folder: Path,
    *,
    layers: Sequence[int],
    codec: str,
    shard_mib: int,
    batch_tokens: int,
    workers: int,
) -> None:
    """Float32 states of all rows, rounded to bfloat16, by the project's writer; two rows are compared with `reference_states`.

    Args:
        target: the target's folder.
        rows: the file of rows.
        folder: gets ``store``: bits uint16 [T, L, H] of each row.
        layers: layer ids to record.
        codec: the store's.
        shard_mib: the store's.
        batch_tokens: most tokens in a pass of the target, padding included.
        workers: processes that write shards.

    Raises:
        EyasError: the stored states are not the target's.
    """
    from transformers import AutoModelForCausalLM

    device = training_device()
    torch.set_float32_matmul_precision("highest")
    described = describe_target(TargetParams(source=str(target), max_model_len=1024), target)
    identity = {"engine": "transformers", "dtype": "float32", "weights_hash": described["weights_hash"]}
    spec = StoreSpec(tuple(layers), text_config(target).hidden_size, codec, identity, shard_mib)
    shuffled = load_rows(rows)[0]
    random.Random(0).shuffle(shuffled)  # so that any part of the rows is like the whole
    by_key = {row_key(spec.fingerprint, row.ids): row.ids for row in shuffled}
    lengths = {key: len(ids) for key, ids in by_key.items()}
    decoder = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).get_decoder().to(device).eval()
    spool, began, done = RowSpool(folder / "work" / "rows", spec), time.monotonic(), 0
    keys, tokens = list(by_key), sum(lengths.values())
    note(f"{len(keys)} rows, {tokens:,} tokens, {tokens * spec.row_bytes / 1e9:.1f} GB of states")
    with Sealer(spool, spec, lengths, workers) as sealer, ThreadPoolExecutor(_WRITERS) as pool:
        pending: list[Future[Any]] = []
        for first in range(0, len(keys), _CHUNK_ROWS):
            for batch in _batches(keys[first : first + _CHUNK_ROWS], lengths, batch_tokens):
                width = lengths[batch[-1]]
                # padded behind: no position sees what comes after it
                ids_BT = torch.tensor([by_key[key] + [0] * (width - lengths[key]) for key in batch], device=device)
                states_BTLH = entering_states(decoder, spec.layers, ids_BT)
                bits_BTLH = states_BTLH.bfloat16().view(torch.int16).cpu().numpy().view(np.uint16)
                for future in pending:
                    future.result()
                pending = [
                    pool.submit(spool.write, np.array(by_key[key], np.int32), bits_TLH[: lengths[key]])
                    for key, bits_TLH in zip(batch, bits_BTLH, strict=True)
                ]
                sealer.wait_for_room()
            done += sum(map(lengths.__getitem__, keys[first : first + _CHUNK_ROWS]))
            note(f"{done:,} of {tokens:,} tokens, {done / (time.monotonic() - began):,.0f} tokens/s")
        for future in pending:
            future.result()
    publish(spool, folder / "store", spec, keys, workers)
    seconds = time.monotonic() - began
    _compare(target, folder / "store", {key: by_key[key] for key in keys[:_COMPARED_ROWS]})
    note(f"{tokens:,} tokens stored in {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s")


def _batches(keys: Sequence[str], lengths: dict[str, int], most: int) -> Iterator[list[str]]:
    """Keys by length, so many that padded to the longest they have at most so many tokens."""
    batch: list[str] = []
    for key in sorted(keys, key=lengths.__getitem__):
        if batch and lengths[key] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(key)
    yield batch


def _compare(target: Path, store: Path, by_key: dict[str, list[int]]) -> None:
    with StoreReader(store) as reader:
        for key, ids in by_key.items():
            stored_TLH = torch.from_numpy(reader.read(key).hidden_TLH.view(np.int16)).view(torch.bfloat16).float()
            (wanted_TLH,) = reference_states(target, [ids], reader.spec.layers, trust_remote_code=False)
            off = float((stored_TLH - wanted_TLH).norm() / wanted_TLH.norm())
            note(f"row {key[:8]}: differs from the reference by {off:.1e} of the norm (rounding alone: 2e-3)")
            if off > _MOST_OFF:
                raise EyasError("the stored states are not the target's")
