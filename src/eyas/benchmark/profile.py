"""`eyas profile`: times of decoding steps on this machine, where they go, and the acceptance length that speculation needs.

Takes a profile; gives a record that is plain JSON. No training is needed: a head with random weights takes as long as a trained one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eyas.benchmark.breakeven import BreakEven, StepTime, acceptance_length, step_time
from eyas.benchmark.child import ended
from eyas.benchmark.methods import EAGLE3, NGRAM, PLAIN, Method, methods
from eyas.console import console
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import Machine, Profile
from eyas.stage import installed_versions, machine_description, process_environment
from eyas.targets.resolve import read_config, resolve_target
from eyas.vocabulary import choose

STEPS, TRACE_STEPS = 24, 8
_ROOM = 8  # steps that a batch may need before the timed ones


def untrained_head(params: Profile, target: Path, directory: Path) -> None:
    """Write a head of the profile's shape into an existing directory, as the train stage would, but with random weights.

    Raises:
        EyasError: the target lacks a tensor that the head needs.
    """
    from eyas.drafting.heads import export, make_head  # seconds of imports

    full = read_config(target)
    vocab_size = (full.get("text_config") or full)["vocab_size"]
    # which tokens it may draft changes no step's time
    vocabulary = choose(np.zeros(vocab_size, dtype=np.int64), params.vocab.draft_vocab_size, [])
    head = make_head(
        params.draft,
        target,
        params.target.source,
        vocabulary,
        params.extract.layers,
        ttt_steps=params.train.ttt_steps,
        seed=0,
    )
    export(head, directory)


def engines(params: Profile, head: Path, k: Sequence[int]) -> list[Method]:
    """Plain decoding, n-gram and the head with each number of draft tokens, as the benchmark has them."""
    asked = {"num_speculative_tokens": list(k), "suffix": False, "references": []}
    return methods(params.benchmark.model_copy(update=asked), head)


def check_room(context_length: int, batch_sizes: Sequence[int], k: Sequence[int], max_model_len: int) -> None:
    """Refuse a context length that leaves no room for the timed steps, should every draft be accepted.

    Raises:
        EyasError: with the longest that fits.
    """
    longest = max_model_len - (STEPS + _ROOM + max(batch_sizes)) * (max(k) + 1)
    if context_length > longest:
        raise EyasError(
            f"--context-length {context_length} does not fit: with target.max_model_len {max_model_len}, batch size "
            f"{max(batch_sizes)} and k {max(k)} it is at most {max(0, longest)}"
        )


def _measure(method: Method, common: dict[str, Any], work: Path, log: Path, machine: Machine) -> dict[str, Any]:
    """Run one engine's process to its end."""
    request, result = work / f"{method.label}.request.json", work / f"{method.label}.result.json"
    traces = work / f"traces-{method.label}"
    method_log = log.with_suffix(f".{method.label}.log")
    write_json_atomic(
        request,
        common
        | {
            "label": method.label,
            "k": method.k,
            "speculative": method.speculative,
            # what n-grams add to a plain step is hardly any time at all
            "traces": None if method.name == NGRAM else str(traces.resolve()),
            "log": str(method_log),
        },
    )
    command = [sys.executable, "-m", "eyas.benchmark.timing", str(request), str(result)]
    environment = os.environ | process_environment(machine)
    status = subprocess.run(command, env=environment, stderr=console.file.fileno(), check=False).returncode
    answer: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {}
    shutil.rmtree(traces, ignore_errors=True)  # of a large target they are gigabytes
    if "error" in answer:
        raise EyasError(f"profile, {method.label}: {answer['error']} (engine log: {method_log})")
    if status != 0 or "batches" not in answer:
        raise EyasError(f"profile, {method.label}: its process {ended(status)}; engine log: {method_log}")
    return answer


def break_even(measured: dict[str, dict[str, Any]], batch_sizes: Sequence[int], k: Sequence[int]) -> list[BreakEven]:
    """A row for each k and batch size, from what the methods' processes measured.

    Raises:
        EyasError: plain decoding or the head has too few steps to tell.
    """

    def needed(label: str, size: int) -> StepTime:
        found = step_time(measured[label]["batches"][str(size)])
        if found is None:
            raise EyasError(f"profile, {label}: too few steps at batch size {size}; lower --context-length or the size")
        return found

    return [
        BreakEven(
            batch_size=size,
            k=tokens,
            plain=needed(PLAIN, size),
            verify=step_time(measured[f"{NGRAM}-k{tokens}"]["batches"][str(size)]),
            step=needed(f"{EAGLE3}-k{tokens}", size),
            acceptance_length=acceptance_length(measured[f"{EAGLE3}-k{tokens}"]["batches"][str(size)], size),
        )
        for tokens in k
        for size in batch_sizes
    ]


def measure(
    name: str, params: Profile, machine: Machine, *, batch_sizes: Sequence[int], k: Sequence[int], context_length: int
) -> dict[str, Any]:
    """Measure a profile's target on this machine, one engine after the other.

    Args:
        name: the profile's.
        params: its parameters.
        machine: placement.
        batch_sizes: sequences that decode together.
        k: draft tokens a step.
        context_length: tokens before each sequence's first own.

    Returns:
        ``rows`` (see `BreakEven`), ``where`` (by method and batch size, see `eyas.benchmark.trace`), and what they hold for.

    Raises:
        EyasError: no room for the steps, or an engine failed.
    """
    check_room(context_length, batch_sizes, k, params.target.max_model_len)
    target = resolve_target(params.target)
    full = read_config(target)
    log = Path(".work") / name / "logs" / "profile.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="profile-", dir=Path(".work") / name) as folder:
        head = Path(folder).resolve() / "head"
        head.mkdir()
        console.print("making a head of the profile's shape …")
        untrained_head(params, target, head)
        common = {
            "directory": str(target),
            "target": params.target.model_dump(mode="json"),
            "machine": machine.model_dump(mode="json"),
            "batch_sizes": sorted(batch_sizes),
            "context_length": context_length,
            "vocab_size": (full.get("text_config") or full)["vocab_size"],
            "steps": STEPS,
            "trace_steps": TRACE_STEPS,
        }
        measured = {}
        every = engines(params, head, k)
        for number, method in enumerate(every, 1):
            console.print(f"profile, engine {number} of {len(every)}: {method.label}")
            measured[method.label] = _measure(method, common, Path(folder), log, machine)
    return {
        "profile": name,
        "target": params.target.source,
        "dtype": params.target.dtype,
        "context_length": context_length,
        "rows": [asdict(row) for row in break_even(measured, sorted(batch_sizes), sorted(k))],
        "where": {label: answer["traced"] for label, answer in measured.items() if answer["traced"]},
        "machine": machine_description(),
        "placement": machine.model_dump(mode="json"),
        "versions": installed_versions(),
    }


def rows_of(record: dict[str, Any]) -> list[BreakEven]:
    """The rows of a record, also of one that was read from a file."""
    times = ("plain", "verify", "step")

    def fields(row: dict[str, Any]) -> dict[str, Any]:
        return row | {name: StepTime(**row[name]) for name in times if row[name] is not None}

    return [BreakEven(**fields(row)) for row in record["rows"]]
