"""In-process vLLM: one way to start it, for answering, recording and serving.

Takes a target's directory, `TargetParams` and `Machine`; gives a `vllm.LLM`. Start it once a stage: a start costs
half a minute of imports.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.console import Progress, console
from eyas.errors import EyasError
from eyas.params import Machine, TargetParams
from eyas.stage import on_cpu_engine

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

_WINDOW = 512


def open_engine(
    directory: Path,
    target: TargetParams,
    machine: Machine,
    *,
    max_num_seqs: int | None = None,
    **options: Any,
) -> LLM:
    """Start vLLM on a target.

    Args:
        directory: the target's local directory.
        target: compute type, context length, whether its code may run.
        machine: placement.
        max_num_seqs: sequences in a batch; the machine's own number if not given.
        options: further `vllm.LLM` arguments (``speculative_config``, ``kv_transfer_config``, …).

    Raises:
        EyasError: the engine did not start; its own words are in the stage's log.
    """
    console.print("starting vLLM …")
    started = time.monotonic()
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": str(directory),
        "dtype": target.dtype,
        "max_model_len": target.max_model_len,
        "trust_remote_code": target.trust_remote_code,
        "max_num_seqs": max_num_seqs or machine.max_num_seqs,
        "max_num_batched_tokens": max(machine.max_num_batched_tokens, target.max_model_len),
        "tensor_parallel_size": machine.tensor_parallel_size,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        # torch.compile on a CPU costs two more minutes of start for nothing
        "enforce_eager": on_cpu_engine(),
    }
    if on_cpu_engine():
        # vLLM's CPU build crashes where a seeded request's prefill is cut in two ("CPU Generator does not use offset")
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = machine.gpu_memory_utilization
    try:
        engine = LLM(**(arguments | options))
    except Exception as error:
        raise EyasError(f"vLLM did not start on {directory}: {type(error).__name__}: {error}") from error
    console.print(f"vLLM ready after {time.monotonic() - started:.0f} s")
    return engine


def generate(
    engine: LLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    description: str,
    before_each: Callable[[], None] | None = None,
) -> list[RequestOutput]:
    """Run prompts of token ids to their end and return the outputs in the order of the prompts.

    Args:
        engine: from `open_engine`.
        prompts: token ids.
        sampling: for each prompt.
        description: for the progress bar.
        before_each: called before a prompt is handed over, and may wait; the engine then has a bounded number of prompts at a time.
    """
    waiting = deque(enumerate(zip(prompts, sampling, strict=True)))
    window = len(prompts) if before_each is None else _WINDOW
    with Progress(description, len(prompts), "prompts") as progress:
        finished: dict[int, RequestOutput] = {}
        while len(finished) < len(prompts):
            while waiting and len(prompts) - len(waiting) - len(finished) < window:
                if before_each is not None:
                    before_each()
                index, (prompt, params) = waiting.popleft()
                engine.llm_engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
            for output in engine.llm_engine.step():
                if output.finished:
                    index = int(output.request_id.split("-")[0])
                    finished[index] = output
                    progress.advance()
    return [finished[index] for index in range(len(prompts))]
