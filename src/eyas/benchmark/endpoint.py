"""A running vLLM server, measured with a profile's prompts: acceptance from its Prometheus page, times from its stream.

Takes a `Server` and prompts; gives answers and counters. No step can be seen from here, so an acceptance length by target step is
not to be had; ``acceptance_length_drafted`` is the same figure as the stage's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.benchmark.acceptance import Counters
from eyas.benchmark.measures import rounded
from eyas.benchmark.prometheus import PageCounters, read_counters
from eyas.benchmark.prompts import Prompt
from eyas.console import Progress
from eyas.conversations.loops import is_looped
from eyas.errors import EyasError
from eyas.extraction.server import NEEDED, Server, client_of, key_refused

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_SETTLE_S = 10.0  # longest wait for the counters of the last step


@dataclass
class Streamed:
    """One answer, with the seconds from asking to its first and last tokens."""

    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(frozen=True)
class SetServed:
    """One set, answered."""

    prompts: list[Prompt]
    answers: list[Streamed]
    counters: PageCounters
    seconds: float


def serve_sets(
    server: Server, prompts: Sequence[Prompt], *, max_tokens: int, concurrency: int, k: int | None
) -> dict[str, SetServed]:
    """Have the server answer set by set, greedily, so many prompts at a time; one prompt is asked before, untimed.

    Args:
        server: from `open_server`.
        prompts: grouped by set.
        max_tokens: longest answer.
        concurrency: requests at a time.
        k: the number of draft tokens that the server must be serving with, if given.

    Raises:
        EyasError: the server fails, drafts another number of tokens, or something else used it meanwhile.
    """
    try:
        return asyncio.run(_serve_sets(server, prompts, max_tokens, concurrency, k))
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def _serve_sets(
    server: Server, prompts: Sequence[Prompt], max_tokens: int, concurrency: int, k: int | None
) -> dict[str, SetServed]:
    served: dict[str, SetServed] = {}
    async with client_of(server.root, server.timeout_s, 0) as client:
        with Progress("benchmark, server", len(prompts), "answers") as progress:
            before = await _page(client, server.root)
            if k is not None and before.positions != k:
                raise EyasError(
                    f"{server.root} drafts {before.positions} tokens a step, not {k}; start it with num_speculative_tokens {k}"
                )
            warm = await _ask(client, server, prompts[0], max_tokens)
            before = await _settled(client, server.root, before, [warm])
            for name in dict.fromkeys(p.set for p in prompts):
                some = [p for p in prompts if p.set == name]
                started = time.perf_counter()
                answers = await _ask_all(client, server, some, max_tokens, concurrency, progress)
                seconds = time.perf_counter() - started
                after = await _settled(client, server.root, before, answers)
                served[name], before = SetServed(some, answers, after - before, seconds), after
    return served


async def _page(client: AsyncOpenAI, root: str) -> PageCounters:
    import openai

    try:
        return read_counters(await client.get(f"{root}/metrics", cast_to=str), f"{root}/metrics")
    except openai.APIStatusError as error:
        raise EyasError(f"{root}/metrics answers with status {error.status_code}; nothing may hide it") from error
    except openai.APIConnectionError as error:
        raise EyasError(f"{root} cannot be reached any more ({error.__cause__ or error}); look at its log") from error


async def _settled(client: AsyncOpenAI, root: str, before: PageCounters, answers: Sequence[Streamed]) -> PageCounters:
    """The counters once they hold all the answers; they follow the stream by moments.

    Raises:
        EyasError: they hold something else.
    """
    tokens = sum(len(answer.token_ids) for answer in answers)
    patience = time.monotonic() + _SETTLE_S
    while True:
        page = await _page(client, root)
        counted = page - before if page.positions == before.positions else page
        if (counted.answers, counted.tokens) == (len(answers), tokens):
            return page
        if time.monotonic() > patience or counted.tokens > tokens or counted.answers > len(answers):
            raise EyasError(
                f"{root} counted {counted.answers} answers with {counted.tokens} tokens, {len(answers)} with {tokens} were asked for; something "
                "else uses the server, so its counters say nothing of these prompts: run again when it is idle"
            )
        await asyncio.sleep(0.1)


async def _ask_all(
    client: AsyncOpenAI,
    server: Server,
    prompts: Sequence[Prompt],
    max_tokens: int,
    concurrency: int,
    progress: Progress,
) -> list[Streamed]:
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt) -> Streamed:
        async with places:
            answer = await _ask(client, server, prompt, max_tokens)
            progress.advance()
            return answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt)) for prompt in prompts]
    return [task.result() for task in tasks]


async def _ask(client: AsyncOpenAI, server: Server, prompt: Prompt, max_tokens: int) -> Streamed:
    asked = time.perf_counter()
    answer = Streamed()
    async for token_ids in stream_steps(client, server, prompt.token_ids, max_tokens):
        answer.last_s = time.perf_counter() - asked
        answer.first_s = answer.first_s or answer.last_s
        answer.token_ids += token_ids
    return answer


async def stream_steps(
    client: AsyncOpenAI, server: Server, prompt_ids: Sequence[int], max_tokens: int
) -> AsyncIterator[list[int]]:
    """A greedy answer as the server streams it: the token ids of one step at a time, of several where it has fallen behind.

    Raises:
        EyasError: the server fails, or its answer has no token ids.
    """
    import openai

    answered = False
    try:
        stream = await client.completions.create(
            model=server.model,
            prompt=list(prompt_ids),
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
            # what is not said here a server takes from the target's generation_config.json
            extra_body={"return_token_ids": True, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
            top_p=1.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                token_ids: list[int] | None = (choice.model_extra or {}).get("token_ids")
                if token_ids:
                    answered = True
                    yield token_ids
    except openai.APIStatusError as error:
        if error.status_code in (401, 403):
            raise EyasError(key_refused(server.root)) from None
        raise EyasError(
            f"{server.root} answers with status {error.status_code}: {error.response.text[:300]}"
        ) from error
    except openai.APIError as error:
        raise EyasError(f"{server.root}: no whole answer ({error.__cause__ or error}); look at its log") from error
    if not answered:
        raise EyasError(f"{server.root}: an answer came without token ids; Eyas needs {NEEDED}")


def endpoint_metrics(served: SetServed, plain: dict[str, list[int]]) -> dict[str, Any]:
    """The figures of one set, named as in ``benchmark.json``.

    Args:
        served: the set.
        plain: plain decoding's answers by prompt id, as far as they are known.
    """
    spec: Counters = served.counters.speculation
    tokens = sum(len(a.token_ids) for a in served.answers)
    per_token = [(a.last_s - a.first_s) / (len(a.token_ids) - 1) for a in served.answers if len(a.token_ids) > 1]
    looped = sum(is_looped(a.token_ids) for a in served.answers)
    values: dict[str, Any] = {
        "output_tokens_per_s": tokens / served.seconds,
        "seconds": served.seconds,
        "looped": looped,
        "looped_share": looped / len(served.answers),
        **_percentiles("tpot", per_token),
        **_percentiles("ttft", [a.first_s for a in served.answers]),
    }
    if spec.drafted_steps:
        values |= {
            "acceptance_length_drafted": 1 + spec.accepted_tokens / spec.drafted_steps,
            "acceptance_by_position": {
                str(i): n / spec.drafted_steps for i, n in enumerate(spec.accepted_by_position, 1)
            },
            "waste": 1 - spec.accepted_tokens / spec.drafted_tokens,
            "draft_tokens_per_s": spec.drafted_tokens / served.seconds,
        }
    known = [
        (a, plain[p.prompt_id]) for p, a in zip(served.prompts, served.answers, strict=True) if p.prompt_id in plain
    ]
    if known:
        values["identical_share"] = sum(a.token_ids == own for a, own in known) / len(known)
    return rounded(values) | {
        "prompts": len(served.prompts),
        "tokens": tokens,
        "drafted_steps": spec.drafted_steps,
        "drafted_tokens": spec.drafted_tokens,
        "accepted_tokens": spec.accepted_tokens,
    }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_ms_p{p}": float(np.percentile(seconds, p)) * 1000 for p in (50, 90, 99)} if seconds else {}
