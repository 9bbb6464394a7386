"""Many questions at a time to a running vLLM server, which is watched meanwhile.

Questions go to `/v1/completions` as token ids and come back as token ids, so nothing is tokenised again. The client repeats what
fails for a moment (429, 5xx, lost connections), waiting longer each time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from eyas.errors import EyasError
from eyas.extraction.answers import Answer
from eyas.extraction.responses import Answering, Question
from eyas.extraction.server import NEEDED, SHORT_S, Server, client_of, key_refused
from eyas.params import ResponseParams

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_RETRIES = 8  # of one request; the waits between them add up to about 40 s


def ask_server(server: Server, answering: Answering) -> None:
    """Have the server answer, many questions at a time; each answer is kept as soon as it is there.

    Raises:
        EyasError: the server hangs, is gone, refuses a question, or answers otherwise than vLLM would; run again to go on.
    """
    try:
        asyncio.run(_Asking(server, answering).all())
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, EyasError):
            raise error from None
        kept = f"{answering.asked} answers of this run are kept" if answering.asked else "nothing was answered yet"
        raise EyasError(f"{error}; {kept}, run again to go on") from None


class _Asking:
    """One round of questions over one client."""

    def __init__(self, server: Server, answering: Answering) -> None:
        self.server, self.answering = server, answering
        self.in_flight = 0
        self.changed = asyncio.Condition()

    async def all(self) -> None:
        async with client_of(self.server.root, self.server.timeout_s, _RETRIES) as client, asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(client))
            workers = [group.create_task(self._work(client)) for _ in range(self.server.concurrency)]
            await asyncio.gather(*workers)
            watch.cancel()

    async def _work(self, client: AsyncOpenAI) -> None:
        """Ask one question after the other, until none is left and none can come any more."""
        while True:
            async with self.changed:
                while (question := self.answering.next_question()) is None:
                    if not self.in_flight:
                        return
                    await self.changed.wait()
            self.in_flight += 1
            answer = await self._ask(client, question)
            self.in_flight -= 1
            self.answering.answered(question, answer)
            async with self.changed:
                self.changed.notify_all()

    async def _ask(self, client: AsyncOpenAI, question: Question) -> Answer:
        import openai

        params, root = self.answering.params, self.server.root
        try:
            # not `completions.create`: it looks at every token id by itself, half a second for a long prompt
            completion = await client.post(
                "/completions", cast_to=object, body=_body(self.server.model, question, params)
            )
        except openai.APITimeoutError as error:
            raise EyasError(
                f"{root} has not answered a question within {self.server.timeout_s:.0f} s, {_RETRIES + 1} times; it is too slow for "
                "machine.endpoint_concurrency and machine.endpoint_timeout_s"
            ) from error
        except openai.APIConnectionError as error:
            raise EyasError(
                f"{root} cannot be reached any more ({error.__cause__ or error}); look at its log"
            ) from error
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise EyasError(key_refused(root)) from None
            raise EyasError(f"{root} answers with status {error.status_code}: {error.response.text[:300]}") from error
        except ValueError as error:
            raise EyasError(f"{root} answers with something that is not JSON: {error}") from error
        return _answer(root, completion, question, params)

    async def _watch(self, client: AsyncOpenAI) -> None:
        """Notice a server that hangs: nothing finished for the longest wait, and no sign of life, or for twice as long."""
        longest, idle, answers = self.server.timeout_s, 0.0, 0
        quick = client.with_options(max_retries=0, timeout=min(SHORT_S, longest))
        while True:
            # counted in naps, so that time in which this process itself was busy is not held against the server
            await asyncio.sleep(nap := min(1.0, longest / 4))
            idle = idle + nap if self.in_flight and self.answering.asked == answers else 0.0
            answers = self.answering.asked
            if idle > 2 * longest:
                raise EyasError(
                    f"{self.server.root} answers /health, but has finished nothing for {idle:.0f} s; if it is only slow, raise "
                    "machine.endpoint_timeout_s or lower machine.endpoint_concurrency, else start it again"
                )
            if idle > longest and not await _healthy(quick, self.server.root):
                raise EyasError(
                    f"{self.server.root} hangs: it has finished nothing for {idle:.0f} s and does not answer /health; start it again"
                )


async def _healthy(client: AsyncOpenAI, root: str) -> bool:
    import openai

    try:
        await client.get(f"{root}/health", cast_to=object)
    except openai.OpenAIError:
        return False
    except ValueError:
        return True  # it says nothing with status 200
    return True


def _body(model: str, question: Question, params: ResponseParams) -> dict[str, Any]:
    """The request; what it does not say a server takes from the target's generation_config.json."""
    return {
        "model": model,
        "prompt": question.prompt_ids,
        "max_tokens": params.max_tokens,
        "temperature": 0.0 if question.greedy else params.temperature,
        "top_p": 1.0 if question.greedy else params.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": question.seed,
        "logprobs": 0,
        "return_token_ids": True,
    }


def _answer(root: str, completion: Any, question: Question, params: ResponseParams) -> Answer:
    """The answer of a response.

    Raises:
        EyasError: it lacks token ids or their log-probabilities, or answers another question than was asked.
    """
    try:
        choice = completion["choices"][0]
        ids, read = choice.get("token_ids"), choice.get("prompt_token_ids")
        logprobs = choice["logprobs"]["token_logprobs"] if choice.get("logprobs") else None
        reason = choice["finish_reason"]
    except (AttributeError, IndexError, KeyError, TypeError):
        raise EyasError(
            f"{root} answers /v1/completions with something that is not a completion; Eyas needs {NEEDED}"
        ) from None
    if ids is None or read is None:
        raise EyasError(f"{root} returns no token ids; Eyas needs {NEEDED}")
    if read != question.prompt_ids:
        raise EyasError(
            f"{root} read another prompt ({len(read)} tokens) than it was sent ({len(question.prompt_ids)}); it cuts or changes prompts"
        )
    if logprobs is None or len(logprobs) != len(ids) or None in logprobs:
        raise EyasError(
            f"{root} returns no log-probability for each token; Eyas needs {NEEDED} without --skip-tokenizer-init"
        )
    if reason not in ("stop", "length") or (reason == "length" and len(ids) < params.max_tokens):
        raise EyasError(
            f"{root} ended an answer after {len(ids)} of {params.max_tokens} tokens (finish_reason {reason}); it has a limit of its own"
        )
    return Answer(list(ids), [float(value) for value in logprobs], reason)
