"""One method's serving, as a process of its own: ``python -m eyas.benchmark.serve REQUEST.json RESULT.json``.

A process a method, because vLLM's CPU build cannot start two engines in one process reliably (its kernel registry is
global), and because no method then inherits another's memory. `eyas.benchmark.methods` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.benchmark.acceptance import Counters, Trace, check_counters, check_trace, count
from eyas.benchmark.prompts import Prompt
from eyas.console import Progress, console, quiet_engines
from eyas.errors import EyasError
from eyas.extraction.engine import open_engine
from eyas.files import write_json_atomic
from eyas.params import Machine, TargetParams
from eyas.process import die_with_parent

if TYPE_CHECKING:
    from vllm import LLM

_WARM_UP_TOKENS = 16


def _serve(engine: LLM, prompts: list[Prompt], max_tokens: int, progress: Progress | None) -> list[Trace]:
    """Answer prompts greedily and record every step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # DELTA gives the tokens of each step by themselves, which is what tells steps apart
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    traces = {str(index): Trace() for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        engine.llm_engine.add_request(str(index), {"prompt_token_ids": prompt.token_ids}, sampling)
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            completion, trace = output.outputs[0], traces[output.request_id]
            trace.step_tokens.append(len(completion.token_ids))
            trace.token_ids.extend(completion.token_ids)
            if output.finished:
                if completion.spec_decode_metrics is not None:
                    trace.drafted = list(completion.spec_decode_metrics.per_step_drafted)
                    trace.accepted = list(completion.spec_decode_metrics.per_step_accepted)
                if progress is not None:
                    progress.advance()
    return list(traces.values())


def _warm_up(engine: LLM, prompts: list[Prompt], max_tokens: int) -> None:
    """Run every kernel once, at the batch size to come; prompts that say the same twice make n-grams draft at once."""
    twice = [Prompt(p.set, p.prompt_id, p.token_ids[-_WARM_UP_TOKENS:] * 2) for p in prompts]
    _serve(engine, twice, min(_WARM_UP_TOKENS, max_tokens), None)


def _reported(engine: LLM, positions: int) -> Counters:
    """vLLM's own counters, since its start."""
    values = {m.name: m for m in engine.get_metrics() if m.name.startswith("vllm:spec_decode_num_")}
    if not values:  # plain decoding has none
        return Counters(0, 0, 0, [0] * positions)
    return Counters(
        values["vllm:spec_decode_num_drafts"].value,
        values["vllm:spec_decode_num_draft_tokens"].value,
        values["vllm:spec_decode_num_accepted_tokens"].value,
        list(values["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    )


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Serve every set of a request, one after the other; gives seconds and traces by set.

    Raises:
        EyasError: the engine did not start, or its counters are not what its steps add up to.
    """
    method, speculative, positions = request["method"], request["speculative"], request["num_speculative_tokens"]
    options: dict[str, Any] = {}
    if speculative is not None:
        options = {"speculative_config": speculative, "per_request_spec_decode_metrics": "detailed"}
    engine = open_engine(
        Path(request["directory"]),
        TargetParams.model_validate(request["target"]),
        Machine.model_validate(request["machine"]),
        max_num_seqs=request["concurrency"],
        **options,
    )
    prompts = [Prompt(**p) for p in request["prompts"]]
    _warm_up(engine, prompts[: request["concurrency"]], request["max_tokens"])
    sets = {}
    with Progress(f"benchmark, {method}", len(prompts), "prompts") as progress:
        for name in dict.fromkeys(p.set for p in prompts):
            of_set = [p for p in prompts if p.set == name]
            before = _reported(engine, positions)
            started = time.perf_counter()
            traces = _serve(engine, of_set, request["max_tokens"], progress)
            seconds = time.perf_counter() - started
            for prompt, trace in zip(of_set, traces, strict=True):
                check_trace(trace, f"{method}, {name}, prompt {prompt.prompt_id}")
            check_counters(count(traces, positions), _reported(engine, positions) - before, f"{method}, {name}")
            sets[name] = {"seconds": seconds, "traces": [asdict(t) for t in traces]}
    return sets


def main() -> None:
    """Read the request, serve, write the result: the sets, or an error's text. Exit status 0 or 1."""
    die_with_parent()
    request_file, result_file = map(Path, sys.argv[1:])
    request = json.loads(request_file.read_text())
    quiet_engines(Path(request["log"]))
    status = 0
    try:
        write_json_atomic(result_file, {"sets": _run(request)})
    except EyasError as error:
        write_json_atomic(result_file, {"error": str(error)})
        status = 1
    except Exception:
        traceback.print_exc()  # into the log, which the parent names
        status = 1
    console.file.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an engine's threads and processes may keep a normal exit waiting


if __name__ == "__main__":
    main()
