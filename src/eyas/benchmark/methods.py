"""The methods that are compared, each served in a process of its own, with the same engine settings and prompts.

Takes prompts, parameters and the draft head's directory; gives what each prompt's steps did, by method and set.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.benchmark.acceptance import Trace
from eyas.benchmark.prompts import Prompt
from eyas.console import console
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import BenchmarkParams, Machine, TargetParams

PLAIN, NGRAM, EAGLE3 = "plain", "ngram", "eagle3"
METHODS = (PLAIN, NGRAM, EAGLE3)


@dataclass(frozen=True)
class Served:
    """One set served by one method.

    Attributes:
        seconds: wall time from the first prompt to the last token, prefills included, warm-up and start excluded.
        prompts: what was served, in order.
        traces: what each prompt's steps did, in the same order.
    """

    seconds: float
    prompts: list[Prompt]
    traces: list[Trace]


def speculative_configs(params: BenchmarkParams, head: Path) -> dict[str, dict[str, Any] | None]:
    """vLLM's ``speculative_config`` of each method, in the order in which they run."""
    tokens = params.num_speculative_tokens
    return {
        PLAIN: None,
        NGRAM: {
            "method": "ngram",
            "num_speculative_tokens": tokens,
            "prompt_lookup_min": params.ngram_lookup_min,
            "prompt_lookup_max": params.ngram_lookup_max,
        },
        EAGLE3: {"method": "eagle3", "model": str(head), "num_speculative_tokens": tokens},
    }


def run_process(request: Path, result: Path, log: Path, method: str) -> dict[str, Any]:
    """Run one method's process to its end; its progress shows on our console, its engine's words go to its log.

    Raises:
        EyasError: what the process itself said, or its exit status with the log's name.
    """
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "eyas.benchmark.serve", str(request), str(result)]
    status = subprocess.run(command, stderr=console.file.fileno(), check=False).returncode
    answer: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {}
    if "error" in answer:
        raise EyasError(f"benchmark, {method}: {answer['error']} (engine log: {log})")
    if status != 0 or "sets" not in answer:
        reason = f"was killed by signal {-status} (out of memory?)" if status < 0 else f"failed with status {status}"
        raise EyasError(f"benchmark, {method}: its process {reason}; engine log: {log}")
    return answer


def serve_methods(
    directory: Path,
    head: Path,
    prompts: Sequence[Prompt],
    *,
    target: TargetParams,
    params: BenchmarkParams,
    machine: Machine,
    work: Path,
    log: Path,
) -> dict[str, dict[str, Served]]:
    """Serve all prompts with every method, one method after the other.

    Args:
        directory: the target's directory.
        head: the draft head's checkpoint.
        prompts: grouped by set.
        target: compute type and context length.
        params: how many tokens are drafted, how long answers are, how many prompts at once.
        machine: placement.
        work: scratch for requests and results.
        log: the stage's log; a method's engine writes beside it, to ``<log's stem>.<method>.log``.

    Returns:
        `Served` by method and set.

    Raises:
        EyasError: no draft head there, or a method's process failed.
    """
    if not (head / "config.json").is_file():
        raise EyasError(f"{head}: no draft head there (config.json is missing); run the train stage first")
    served: dict[str, dict[str, Served]] = {}
    for method, speculative in speculative_configs(params, head).items():
        console.print(f"benchmark, {method} …")
        request, result = work / f"{method}.request.json", work / f"{method}.result.json"
        method_log = log.with_suffix(f".{method}.log")
        write_json_atomic(
            request,
            {
                "method": method,
                "speculative": speculative,
                "num_speculative_tokens": params.num_speculative_tokens,
                "max_tokens": params.max_tokens,
                "concurrency": params.concurrency,
                "directory": str(directory),
                "target": target.model_dump(mode="json"),
                "machine": machine.model_dump(mode="json"),
                "prompts": [asdict(p) for p in prompts],
                "log": str(method_log),
            },
        )
        answer = run_process(request, result, method_log, method)
        served[method] = {
            name: Served(
                content["seconds"], [p for p in prompts if p.set == name], [Trace(**t) for t in content["traces"]]
            )
            for name, content in answer["sets"].items()
        }
    return served
