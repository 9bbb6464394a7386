"""A head's training fed from a store, against the same training fed from batches that are in the GPU's memory already.

    python benchmarks/store/training.py FOLDER              on a GPU; needs 32 GB of room
    python benchmarks/store/training.py FOLDER --quick      a tiny head, to see that it works

The step is the project's own (`eyas.drafting`): training-time test of three depths, AdamW, bf16 autocast, float32 master weights,
random weights in the shape that a target gives its head, 8,192 tokens in rows of 1,024. It is fed

    memory                  from four batches that stay on the GPU
    none, lossless          from a store with this codec, by the project's data path; also after the page cache was emptied
    speculators             from one safetensors file a row, by speculators' own dataset, DataLoader and copy to the GPU

`waiting` is the share of the time in which the step had no batch. speculators' loader prefetches 48 batches; the steps that empty
them are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    LAYERS,
    ROW_TOKENS,
    SPECULATORS_PREFETCH,
    SPECULATORS_WORKERS,
    VOCABULARY,
    SyntheticRows,
    cores,
    drop_from_cache,
    note,
    prepare,
    print_table,
    sample_table,
    speculators_loader,
    store_spec,
    token_rows,
    write_report,
)
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig

from eyas.drafting.data import Batch
from eyas.drafting.feeding import Planned, device_batches
from eyas.drafting.forward import draft_states, trainable
from eyas.drafting.loss import head_loss
from eyas.drafting.planning import make_plan
from eyas.drafting.ranks import training_device
from eyas.store.batches import PackedBatches
from eyas.store.reader import StoreReader

_DEPTHS = 3
_IN_MEMORY = 4


@dataclass(frozen=True)
class Shape:
    """What a target gives its head."""

    hidden: int
    vocabulary: int
    draft_vocabulary: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "kimi-k2.5": Shape(7168, 163_840, 32_000, 12_288, 64, 64, 112),
    "qwen3-8b": Shape(4096, 151_936, 32_000, 12_288, 32, 8, 128),
    "tiny": Shape(64, VOCABULARY, 512, 128, 1, 1, 64),
}


def make_model(shape: Shape, device: torch.device, attention: str = "eager") -> Eagle3DraftModel:
    """A head as `eyas.drafting.heads.make_head` makes it, with random weights instead of a target's.

    ``attention`` is what speculators' own forward takes; the project's has its own.
    """
    decoder = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2 * ROW_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    decoder._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=shape.draft_vocabulary,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=list(LAYERS[:-1]),
    )
    torch.manual_seed(0)
    with device:
        model = Eagle3DraftModel(config).float()
    t2d_V = torch.arange(shape.vocabulary) < shape.draft_vocabulary
    model.load_vocab_mappings(t2d_V, torch.zeros(shape.draft_vocabulary, dtype=torch.long))
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.isfinite().all():  # speculators marks with NaN what a target has to give
                weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(0, 0.02)
    return model.to(device).train()


class Step:
    """One optimiser step, as in `eyas.drafting.training`."""

    def __init__(self, model: Eagle3DraftModel, device: torch.device) -> None:
        self._model, self._device = model, device
        self._optimizer = torch.optim.AdamW(trainable(model), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def __call__(self, planned: Planned) -> None:
        batch, plan = planned
        with torch.autocast(self._device.type, torch.bfloat16):
            states_KNH = draft_states(self._model, batch, plan, _DEPTHS)
            loss = head_loss(self._model, states_KNH, batch, plan, "kl_div", 1.0, True).loss
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable(self._model), 1.0).item()
        if not math.isfinite(loss.item()) or not math.isfinite(norm):
            raise RuntimeError(f"loss {loss.item()}, gradient norm {norm}")
        self._optimizer.step()


def timed_steps(batches: Iterator[Planned], step: Step, warm_up: int, count: int) -> dict[str, Any]:
    """Rate of ``count`` steps after ``warm_up`` uncounted ones."""
    first_batch_s = 0.0
    slots, seconds, waited = 0, [], []
    clock = time.perf_counter()
    for number in range(warm_up + count):
        began = clock
        planned = next(batches)
        arrived = time.perf_counter()
        step(planned)
        clock = time.perf_counter()
        if number == 0:
            first_batch_s = arrived - began
        if number >= warm_up:
            slots += sum(planned[0].lengths)
            seconds.append(clock - began)
            waited.append(arrived - began)
    return {
        "tokens_per_s": slots / sum(seconds),
        "waiting_share": sum(waited) / sum(seconds),
        "first_batch_s": first_batch_s,
        "step_seconds": [round(value, 5) for value in seconds],
    }


def speculators_batches(loader: Any, device: torch.device) -> Iterator[Planned]:
    """Its batches, copied as its trainer copies them, in the form that the project's step takes."""
    for loaded in loader:
        if loaded["error_records"]:
            raise RuntimeError("speculators' loader dropped a sample")
        there = {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in loaded.items()
        }
        documents = loaded["document_ids"][0]
        lengths = documents[documents >= 0].bincount().tolist()
        slots = sum(lengths)
        batch = Batch(
            there["input_ids"][0, :slots],
            there["hidden_states"][0, :slots],
            there["verifier_last_hidden_states"][0, :slots],
            loaded["loss_mask"][0, :slots].bool(),
            there["position_ids"][0, :slots],
            lengths,
            [],
        )
        yield batch, make_plan(batch, _DEPTHS)


def measure(name: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    shape = SHAPES[name]
    rows = SyntheticRows(shape.hidden, arguments.rows)
    places = prepare(rows, arguments.folder, arguments.shard_mib)
    supervised_from = max(1, arguments.prompt_tokens)
    rows_by_key = token_rows(rows, store_spec(shape.hidden, "none", 1).fingerprint, supervised_from)
    warm_up, steps = arguments.warm_up, arguments.steps
    step = Step(make_model(shape, device), device)
    runs: dict[str, list[dict[str, Any]]] = {}

    def keep(variant: str, batches: Iterator[Planned], uncounted: int = warm_up) -> None:
        run = timed_steps(batches, step, uncounted, steps)
        runs.setdefault(variant, []).append(run)
        note(f"{name}, {variant}: {run['tokens_per_s']:,.0f} tokens/s, waiting {run['waiting_share']:.3f}")

    def open_store(stack: ExitStack, codec: str, epoch: int) -> Iterator[Planned]:
        reader = stack.enter_context(StoreReader(places[codec]))
        packed = PackedBatches(reader, reader.keys, arguments.tokens_per_step, 0, epoch)
        return stack.enter_context(device_batches(packed, rows_by_key, device, arguments.workers, _DEPTHS))

    with ExitStack() as stack:
        in_memory = list(itertools.islice(open_store(stack, "none", 0), _IN_MEMORY))
    for epoch in range(arguments.repeats):
        keep("memory", itertools.cycle(in_memory))
        for codec, cold in itertools.product(("none", "lossless"), (True, False)):
            if cold:
                drop_from_cache(places[codec])
            with ExitStack() as stack:
                keep(f"{codec}, cold" if cold else codec, open_store(stack, codec, epoch))
    keep("memory", itertools.cycle(in_memory))
    prefetched = arguments.loader_workers * SPECULATORS_PREFETCH
    batches_of_files = rows.count * ROW_TOKENS // arguments.tokens_per_step
    times = -(-(prefetched + warm_up + steps) // batches_of_files)
    table = sample_table(rows, places["samples"], supervised_from, times)
    loader = speculators_loader(
        table, places["samples"], shape.hidden, arguments.tokens_per_step, arguments.loader_workers
    )
    try:
        with closing(speculators_batches(loader, device)) as batches:
            keep("speculators", batches, prefetched + warm_up)
    except RuntimeError as error:  # such as too little shared memory for its workers; the other figures stand
        note(f"{name}, speculators: {error}")
    del loader, batches, in_memory  # its workers end with it
    if not arguments.keep:
        shutil.rmtree(places["samples"].parent)

    def median(variant: str, figure: str) -> float:
        return statistics.median(run[figure] for run in runs[variant])

    figures = ("tokens_per_s", "waiting_share", "first_batch_s")
    variants = {variant: {figure: median(variant, figure) for figure in figures} for variant in runs}
    for values in variants.values():
        values["of_memory"] = values["tokens_per_s"] / variants["memory"]["tokens_per_s"]
        values["gb_per_s"] = values["tokens_per_s"] * 2 * len(LAYERS) * shape.hidden / 1e9
    memory_gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {"shape": asdict(shape), "variants": variants, "runs": runs, "peak_gpu_gib": memory_gib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder on a disk with room")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["kimi-k2.5", "qwen3-8b"])
    parser.add_argument("--rows", type=int, default=192, help="rows of 1,024 tokens")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="tokens of a row that are not supervised")
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that are not counted")
    parser.add_argument(
        "--steps", type=int, default=16, help="steps that are; the last batches of an epoch are read by then"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--workers", type=int, default=min(12, max(1, cores() // 2)), help="processes that read a store"
    )
    parser.add_argument("--loader-workers", type=int, default=SPECULATORS_WORKERS)
    parser.add_argument("--shard-mib", type=int, default=512, help="size of a shard before compression")
    parser.add_argument(
        "--keep", action="store_true", help="leave the rows there, for another benchmark with this folder"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny head, few steps")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.rows, arguments.tokens_per_step = ["tiny"], 16, 1024
        arguments.warm_up, arguments.steps, arguments.loader_workers = 1, 4, 1
    if (arguments.warm_up + arguments.steps) * arguments.tokens_per_step > arguments.rows * ROW_TOKENS:
        parser.error("an epoch of so few rows has fewer steps")
    # as training has it; the variable is read when CUDA starts
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = training_device()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = {name: measure(name, arguments, device) for name in arguments.shapes}
    write_report(arguments.out, arguments.folder, {"workers": arguments.workers, "results": results})
    for name, result in results.items():
        print(f"\n{name}: {arguments.tokens_per_step} tokens a step, {_DEPTHS} depths")
        print_table(
            ("fed from", "tokens/s", "of memory", "waiting", "GB/s", "first batch s"),
            (
                [
                    variant,
                    values["tokens_per_s"],
                    values["of_memory"],
                    values["waiting_share"],
                    values["gb_per_s"],
                    values["first_batch_s"],
                ]
                for variant, values in result["variants"].items()
            ),
        )


if __name__ == "__main__":
    main()
