"""Where the time of decoding goes: events of a torch profiler trace, sorted into classes by name.

Takes a Chrome trace as vLLM's profiler writes it; gives seconds by class. With a GPU its kernels are counted and the host
is the time in which no kernel runs; on a CPU operators are counted by self time and the host is the time outside them.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eyas.errors import EyasError

COMMUNICATION, ATTENTION, MATMUL, SAMPLING, OTHER, HOST = (
    "communication",
    "attention",
    "experts, MLP, projections",
    "sampling",
    "norm, rope, copies, other",
    "host",
)
CLASSES = (COMMUNICATION, ATTENTION, MATMUL, SAMPLING, OTHER, HOST)
# the first that fits wins: `fused_add_rms_norm` after an all-reduce is communication, a rotary kernel is no attention
_RULES = (
    (
        COMMUNICATION,
        r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|multimem|c10d::"
        r"|oneshot|twoshot|deep_?ep|nvshmem|pplx|shm_allreduce|sendrecv|lamport",
    ),
    (OTHER, r"rotary|rope|reshape_and_cache|concat_and_cache|layer_?norm|rms_?norm|silu_and_mul|act_and_mul|quant_fp8"),
    (SAMPLING, r"argmax|top_?k_?top_?p|topp|sampl|multinomial|rejection|gumbel|exponential_|penalt|apply_bad_words"),
    (
        MATMUL,
        r"moe|expert|grouped_topk|topk_?gating|topksoftmax|topk_softmax",
    ),
    (
        ATTENTION,
        r"attention|attn|flash_?fwd|flash::|fmha|mla|paged|flashinfer.*(decode|prefill)|merge_states"
        r"|splitkv|split_kv|flash_?decod",
    ),
    (
        MATMUL,
        r"gemm|gemv|matmul|cutlass|cublas|marlin|nvjet|xmma|machete|aten::(mm|addmm|bmm|baddbmm|linear)\b|mkldnn|onednn|wvsplitk",
    ),
    (SAMPLING, r"aten::(sort|topk|softmax|_softmax|log_softmax|_log_softmax)\b|radixsort|topk"),
)
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _RULES)


def classify(name: str) -> str:
    """The class of a kernel's or operator's name; `OTHER` where no rule fits."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) spans, in their unit."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def kernel_times(events: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds by class of GPU events; where kernels overlap, each counts in full."""
    times = dict.fromkeys(CLASSES, 0.0)
    for event in events:
        times[classify(event["name"])] += event["dur"]
    return times


def operator_times(events: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of self time by class; an operator that no rule names belongs to the one that called it."""
    times = dict.fromkeys(CLASSES, 0.0)
    for thread in {(e["pid"], e["tid"]) for e in events}:
        of_thread = [e for e in events if (e["pid"], e["tid"]) == thread]
        open_calls: list[tuple[float, str]] = []
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])):
            while open_calls and open_calls[-1][0] <= event["ts"]:
                open_calls.pop()
            kind = classify(event["name"])
            if open_calls:
                caller = open_calls[-1][1]
                kind = caller if kind == OTHER else kind
                times[caller] -= event["dur"]
            times[kind] += event["dur"]
            open_calls.append((event["ts"] + event["dur"], kind))
    return times


def read_trace(file: Path, wall: float) -> dict[str, Any]:
    """Seconds by class of one trace.

    Args:
        file: ``*.json`` or ``*.json.gz``.
        wall: seconds that the traced steps took.

    Raises:
        EyasError: not a trace, or nothing was recorded in it.
    """
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        events = [e for e in json.loads(content)["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise EyasError(f"{file}: not a torch profiler trace ({type(error).__name__}: {error})") from None
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    counted = device or [e for e in events if e.get("cat") == "cpu_op"]
    if not counted:
        raise EyasError(f"{file}: no kernel and no operator in this trace")
    times = kernel_times(device) if device else operator_times(counted)
    busy = busy_seconds((e["ts"], e["ts"] + e["dur"]) for e in counted) / 1e6
    seconds = {kind: value / 1e6 for kind, value in times.items()}
    seconds[HOST] = max(0.0, wall - busy)
    totals: dict[str, float] = {}
    for event in counted if device else []:
        totals[event["name"]] = totals.get(event["name"], 0.0) + event["dur"] / 1e6
    top = sorted(totals.items(), key=lambda item: -item[1])[:12]
    return {"device": "gpu" if device else "cpu", "wall": wall, "seconds": seconds, "kernels": dict(top)}
