"""Times the steps of one way to decode, as a process of its own: ``python -m eyas.benchmark.timing REQUEST.json RESULT.json``.

`eyas.benchmark.profile` starts it. A step's time is the interval between two returns of ``llm_engine.step()`` that carry
tokens of every sequence of the batch, so neither prefill nor a batch that is not full is counted. What a step costs depends
on how many tokens it drafts and verifies, not on how many of them are accepted.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.benchmark.child import run_and_exit
from eyas.benchmark.trace import read_trace
from eyas.console import Progress, quiet_engines
from eyas.errors import EyasError
from eyas.extraction.engine import open_engine
from eyas.files import write_json_atomic
from eyas.params import Machine, TargetParams
from eyas.process import die_with_parent

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

_PERIOD = 48
_WARM_STEPS = 3
_MOST = 3  # times the wanted steps, where n-grams do not draft in each
_ENOUGH = 0.9  # of k tokens in every sequence: with eight sequences the n-grams of one or another often end early


def repeated_prompt(vocab_size: int, length: int, seed: int) -> list[int]:
    """Random tokens, said again and again: n-grams then draft in most steps, and no two sequences are alike."""
    chosen = random.Random(seed)
    pattern = [chosen.randrange(vocab_size // 10, vocab_size * 9 // 10) for _ in range(min(_PERIOD, length // 2))]
    return (pattern * (length // len(pattern) + 1))[:length]


class DraftedTokens:
    """Counts what each engine step drafted; ``last`` is the number of draft tokens that the last step verified.

    vLLM's record of a request has no entry for a step without drafts, so it cannot tell which step an entry belongs to. What its
    scheduler reports with each step can.
    """

    def __init__(self, core: LLMEngine) -> None:
        self.last = 0
        manager = core.logger_manager
        if manager is None:
            raise EyasError("vLLM keeps no statistics (disable_log_stats); steps cannot be told apart")
        record = manager.record

        def counted(*args: Any, **kwargs: Any) -> None:
            stats = kwargs.get("scheduler_stats") or (args[0] if args else None)
            drafts = stats.spec_decoding_stats if stats is not None else None
            self.last += drafts.num_draft_tokens if drafts is not None else 0
            record(*args, **kwargs)

        manager.record = counted

    def step(self, core: LLMEngine) -> list[Any]:
        """One engine step; afterwards ``last`` is its own."""
        self.last = 0
        outputs: list[Any] = core.step()
        return outputs


def _batch(
    engine: LLM, drafted: DraftedTokens, name: str, size: int, request: dict[str, Any], trace: bool = False
) -> dict[str, Any]:
    """Decode one batch; gives seconds of each timed step, tokens of all sequences in it, and whether they drafted (nearly) k each.

    Args:
        engine: the engine.
        drafted: the engine's counter.
        name: no two batches of an engine may have the same.
        size: sequences.
        request: what `main` was asked for.
        trace: record the timed steps with the engine's profiler; all steps then count.

    Raises:
        EyasError: too few steps with the whole batch.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    k, steps = request["k"], request["trace_steps"] if trace else request["steps"]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["target"]["max_model_len"] - request["context_length"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    core = engine.llm_engine
    names = [f"{name}-{index}" for index in range(size)]
    for index, of_sequence in enumerate(names):
        prompt = repeated_prompt(request["vocab_size"], request["context_length"], 1000 * size + index)
        core.add_request(of_sequence, {"prompt_token_ids": prompt}, sampling)
    seconds: list[float] = []
    tokens: list[int] = []
    whole: list[bool] = []
    warm, profiling, last = 0, False, time.perf_counter()
    try:
        while core.has_unfinished_requests():
            outputs = [o for o in drafted.step(core) if o.outputs[0].token_ids]
            now = time.perf_counter()
            if not outputs:  # the engine may hand tokens over one step late
                continue
            if any(o.finished for o in outputs):
                break
            every = len(outputs) == size
            if every and warm > _WARM_STEPS:
                seconds.append(now - last)
                tokens.append(sum(len(o.outputs[0].token_ids) for o in outputs))
                whole.append(drafted.last >= _ENOUGH * size * k)
            # a step after one without the whole batch would hold a part of that one's prefill
            warm = warm + 1 if every else 0
            if sum(whole) >= steps or len(whole) >= _MOST * steps or (trace and len(whole) >= steps):
                break
            if trace and warm == _WARM_STEPS + 1:
                engine.start_profile()
                profiling = True
            last = time.perf_counter()
    finally:
        if profiling:
            engine.stop_profile()
        core.abort_request(names)
    if len(seconds) < steps // 2:
        raise EyasError(
            f"batch size {size}: only {len(seconds)} steps with the whole batch, {steps} are wanted; "
            "lower --context-length or --batch-sizes, or give vLLM more memory for its KV cache (machine.yaml)"
        )
    return {"seconds": seconds, "tokens": tokens, "drafted_all": whole}


def _run(request: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if request["speculative"] is not None:
        options["speculative_config"] = request["speculative"]
    traces = request["traces"]
    if traces:
        options["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": traces,
            "torch_profiler_with_stack": False,
        }
    sizes: list[int] = request["batch_sizes"]
    engine = open_engine(
        Path(request["directory"]),
        TargetParams.model_validate(request["target"]),
        Machine.model_validate(request["machine"]),
        max_num_seqs=max(sizes),
        **options,
    )
    drafted = DraftedTokens(engine.llm_engine)
    _batch(engine, drafted, "warm-up", max(sizes), request | {"steps": 4})
    answer: dict[str, Any] = {"batches": {}, "traced": {}}
    traced = list(dict.fromkeys([min(sizes), max(sizes)])) if traces else []
    with Progress(f"profile, {request['label']}", len(sizes) + len(traced), "batches") as progress:
        for size in sizes:
            answer["batches"][str(size)] = _batch(engine, drafted, f"timed-{size}", size, request)
            progress.advance()
        for size in traced:
            before = set(Path(traces).glob("*.json*"))
            wall = sum(_batch(engine, drafted, f"traced-{size}", size, request, trace=True)["seconds"])
            answer["traced"][str(size)] = read_trace(_first_rank(Path(traces), before), wall)
            progress.advance()
    return answer


def _first_rank(directory: Path, before: set[Path]) -> Path:
    """The trace of the first worker among the new ones; the front end's own is none.

    Raises:
        EyasError: there is none.
    """
    new = sorted(f for f in set(directory.glob("*.json*")) - before if "async_llm" not in f.name)
    if not new:
        raise EyasError(f"{directory}: vLLM's profiler wrote no trace")
    return new[0]


def main() -> None:
    """Read the request, measure, write the result or an error's text. Exit status 0 or 1."""
    die_with_parent()
    request_file, result_file = map(Path, sys.argv[1:])
    request = json.loads(request_file.read_text())
    quiet_engines(Path(request["log"]))
    run_and_exit(
        lambda: write_json_atomic(result_file, _run(request)),
        lambda error: write_json_atomic(result_file, {"error": error}),
    )


if __name__ == "__main__":
    main()
