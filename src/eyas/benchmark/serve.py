"""One engine that waits for work, as a process of its own: ``python -m eyas.benchmark.serve REQUEST.json``.

A process an engine, because an engine cannot change k, and because vLLM's CPU build cannot start two engines in one process
reliably (its kernel registry is global). Commands come as JSON lines on standard input and answers go as JSON lines to what was
standard output; in between the process sleeps, so that others have the machine. `eyas.benchmark.process` starts it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.benchmark.acceptance import Counters, Trace, check_counters, check_trace, count
from eyas.benchmark.child import run_and_exit
from eyas.benchmark.prompts import Prompt
from eyas.console import quiet_engines
from eyas.extraction.engine import open_engine
from eyas.params import Machine, TargetParams
from eyas.process import die_with_parent

if TYPE_CHECKING:
    from vllm import LLM

Reply = Callable[[dict[str, Any]], None]
_WARM_UP_TOKENS = 16
_CANDIDATES = 20  # log-probabilities that vLLM gives at most by default


def _serve(
    engine: LLM, prompts: Sequence[Prompt], concurrency: int, max_tokens: int, reply: Reply | None
) -> tuple[list[Trace], list[float]]:
    """Answer prompts greedily, so many at a time, and record every step.

    Returns:
        A trace for each prompt, and the seconds of each step that only decoded, at full batch.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # DELTA gives the tokens of each step by themselves, which is what tells steps apart
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    traces = [Trace() for _ in prompts]
    handed = [0.0] * len(prompts)
    waiting = deque(enumerate(prompts))
    running = 0
    full_steps: list[float] = []
    before = time.perf_counter()
    while waiting or running:
        while waiting and running < concurrency:
            index, prompt = waiting.popleft()
            handed[index] = time.perf_counter()
            engine.llm_engine.add_request(str(index), {"prompt_token_ids": prompt.token_ids}, sampling)
            running += 1
        outputs = [output for output in engine.llm_engine.step() if output.outputs[0].token_ids or output.finished]
        if not outputs:  # the engine may hand tokens over one step late
            continue
        now = time.perf_counter()
        if len(outputs) == concurrency and all(traces[int(o.request_id)].step_tokens for o in outputs):
            full_steps.append(now - before)
        for output in outputs:
            completion, trace = output.outputs[0], traces[int(output.request_id)]
            trace.share_s += (now - before) / len(outputs)
            trace.last_s = now - handed[int(output.request_id)]
            if not trace.step_tokens:
                trace.first_s = trace.last_s
            trace.step_tokens.append(len(completion.token_ids))
            trace.token_ids.extend(completion.token_ids)
            if output.finished:
                running -= 1
                if completion.spec_decode_metrics is not None:
                    trace.drafted = list(completion.spec_decode_metrics.per_step_drafted)
                    trace.accepted = list(completion.spec_decode_metrics.per_step_accepted)
                if reply is not None:
                    reply({"finished": 1})
        before = now
    return traces, full_steps


def _warm_up(engine: LLM, prompts: Sequence[Prompt], concurrency: int, max_tokens: int) -> None:
    """Run every kernel once, at the batch size to come; prompts that say the same twice make n-grams draft at once."""
    twice = [Prompt(p.set, p.prompt_id, p.token_ids[-_WARM_UP_TOKENS:] * 2) for p in prompts]
    _serve(engine, twice, concurrency, min(_WARM_UP_TOKENS, max_tokens), None)


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


def _serve_set(engine: LLM, request: dict[str, Any], command: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """Serve the prompts of one set; gives wall time, step time and traces.

    Raises:
        EyasError: the engine's counters are not what its steps add up to.
    """
    prompts = [Prompt(**request["prompts"][i]) for i in command["prompts"]]
    name, positions = f"{request['name']}, {prompts[0].set}", request["k"]
    before = _reported(engine, positions)
    started = time.perf_counter()
    traces, full_steps = _serve(engine, prompts, command["concurrency"], request["max_tokens"], reply)
    seconds = time.perf_counter() - started
    for prompt, trace in zip(prompts, traces, strict=True):
        check_trace(trace, f"{name}, prompt {prompt.prompt_id}")
    check_counters(count(traces, positions), _reported(engine, positions) - before, name)
    step_s = statistics.median(full_steps) if full_steps else None
    return {"seconds": seconds, "step_s": step_s, "traces": [asdict(t) for t in traces]}


def _gaps(engine: LLM, cases: list[dict[str, Any]]) -> list[float]:
    """By how much the log-probability of the first token exceeds the second's, behind each text.

    Where the engine does not give the second's, because it is not among the most likely, the last of those stands for it.
    """
    from vllm import SamplingParams

    outputs = engine.generate(
        [{"prompt_token_ids": case["text"]} for case in cases],
        SamplingParams(temperature=0.0, max_tokens=1, logprobs=_CANDIDATES, detokenize=False),
        use_tqdm=False,
    )
    gaps = []
    for case, output in zip(cases, outputs, strict=True):
        given = {token: value.logprob for token, value in output.outputs[0].logprobs[0].items()}
        least = min(value for value in given.values() if math.isfinite(value))
        first, second = (given.get(token, least) for token in (case["own"], case["other"]))
        gaps.append(abs(first - second))
    return gaps


def _open(request: dict[str, Any]) -> LLM:
    options: dict[str, Any] = {}
    if request["speculative"] is not None:
        options = {"speculative_config": request["speculative"], "per_request_spec_decode_metrics": "detailed"}
    concurrency = request["concurrency"]
    engine = open_engine(
        Path(request["directory"]),
        TargetParams.model_validate(request["target"]),
        Machine.model_validate(request["machine"]),
        max_num_seqs=max(concurrency),
        **options,
    )
    prompts = [Prompt(**p) for p in request["prompts"]]
    for size in concurrency:
        _warm_up(engine, prompts[:size], size, request["max_tokens"])
    return engine


def _work(request: dict[str, Any], reply: Reply) -> None:
    """Start, then obey commands until there are no more."""
    # the engine's own processes must not read our commands
    with os.fdopen(os.dup(0), encoding="utf-8") as commands:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        engine = _open(request)
        reply({"done": {}})
        for line in commands:
            command = json.loads(line)
            if command["do"] == "serve":
                reply({"done": _serve_set(engine, request, command, reply)})
            else:
                reply({"done": {"gaps": _gaps(engine, command["cases"])}})


def main() -> None:
    """Read the request, start, obey. Exit status 0, or 1 with an error as the last reply."""
    die_with_parent()
    request = json.loads(Path(sys.argv[1]).read_text())
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as replies:

        def reply(message: dict[str, Any]) -> None:
            replies.write(json.dumps(message, allow_nan=False) + "\n")

        quiet_engines(Path(request["log"]))
        run_and_exit(lambda: _work(request, reply), lambda error: reply({"error": error}))


if __name__ == "__main__":
    main()
