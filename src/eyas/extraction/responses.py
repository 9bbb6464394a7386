"""The target answers every assistant turn, each in the context of its own earlier answers.

`Answering` deals out questions and takes answers; whichever engine answers is kept busy, since a conversation's next question is
there as soon as its last answer is. Answers are token ids exactly as generated, with the engine's log-probability of each token
(natural logarithm, of the unscaled distribution), so that extraction can prove itself on sampled text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyas.extraction.answers import Answer, AnswerLog, answer_key
from eyas.extraction.dialogues import Dialogue
from eyas.params import ResponseParams
from eyas.templates.chat import ChatTemplate, TemplateRefusal

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

_OPEN_DIALOGUES = 4096  # held in memory at a time
_REQUESTS = 1024  # handed to the engine in the process at a time; it queues what its batch does not hold


@dataclass(frozen=True)
class Question:
    """What the target is to answer."""

    key: str
    prompt_ids: list[int]
    seed: int
    greedy: bool


class Answering:
    """Dialogues under way: deals out their questions, takes the answers, gives out what is done in the order of the source."""

    def __init__(
        self,
        dialogues: Iterator[Dialogue],
        done: Callable[[Dialogue], None],
        over: Callable[[Dialogue], object],
        log: AnswerLog,
        identity: dict[str, Any],
        template: ChatTemplate,
        params: ResponseParams,
        max_model_len: int,
    ) -> None:
        """Start with nothing asked.

        Args:
            dialogues: the source; read as needed, so that memory does not grow with their number.
            done: called with each dialogue that is over, in the order of the source.
            over: called with each, as soon as it is over.
            log: answers of earlier runs, and of this one.
            identity: what decides all answers of the run.
            template: of the target.
            params: of the sampling.
            max_model_len: the context; a dialogue whose next answer might not fit stops, with ``cut`` set.
        """
        self._dialogues, self._done, self._over, self._log, self._identity = dialogues, done, over, log, identity
        self._template, self.params, self._max_model_len = template, params, max_model_len
        self._open: deque[Dialogue] = deque()
        self._ready: deque[Question] = deque()
        self._waiting: dict[str, list[Dialogue]] = {}
        self.asked = 0  # questions that were not in the log

    def next_question(self) -> Question | None:
        """What to ask now; None where every dialogue that is open waits for an answer, or all are done."""
        while not self._ready:
            if len(self._open) >= _OPEN_DIALOGUES or (state := next(self._dialogues, None)) is None:
                return None
            self._open.append(state)
            self._advance(state)
            self._give_out()
        return self._ready.popleft()

    def answered(self, question: Question, answer: Answer) -> None:
        """Keep an answer and go on with the dialogues that waited for it."""
        self._log.add(question.key, answer)
        self.asked += 1
        for state in self._waiting.pop(question.key):
            self._take(state, question.prompt_ids, answer)
            self._advance(state)
        self._give_out()

    def _give_out(self) -> None:
        while self._open and self._open[0].over:
            self._done(self._open.popleft())

    def _advance(self, state: Dialogue) -> None:
        self._go_on(state)
        if state.over:
            self._over(state)

    def _go_on(self, state: Dialogue) -> None:
        """Take the answers that the log has, up to one that it lacks."""
        while not state.over:
            prompt = self._prompt(state)
            if prompt is None:
                state.end()
                return
            seed = _seed(self.params, state)
            key = answer_key(self._identity, prompt, seed, state.greedy)
            answer = self._log.get(key)
            if answer is None:
                if key not in self._waiting:
                    self._ready.append(Question(key, prompt, seed, state.greedy))
                self._waiting.setdefault(key, []).append(state)
                return
            self._take(state, prompt, answer)

    def _prompt(self, state: Dialogue) -> list[int] | None:
        """What the target is to read next; None where the dialogue ends here."""
        if not state.say():
            return None
        try:
            prompt = state.prompt(self._template)
        except TemplateRefusal as refusal:
            state.refused = str(refusal)
            return None
        if len(prompt) + self.params.max_tokens > self._max_model_len:
            state.cut = True
            return None
        return prompt

    def _take(self, state: Dialogue, prompt: list[int], answer: Answer) -> None:
        state.answered(prompt, answer, self._template, drop_looped=self.params.drop_looped)


def _seed(params: ResponseParams, state: Dialogue) -> int:
    """A row's own seed, so that answers depend neither on the order of rows nor on which other rows there are."""
    return (int(state.conversation_id[:12], 16) + 1_000_003 * len(state.turns) + params.seed) % (1 << 31)


def ask_engine(open_engine: Callable[[], LLM], answering: Answering) -> None:
    """Have vLLM in this process answer; it starts only if there is a question that the log has no answer to."""
    engine: LLMEngine | None = None
    in_flight: dict[str, Question] = {}
    number = 0
    while True:
        while len(in_flight) < _REQUESTS and (question := answering.next_question()) is not None:
            engine = engine or open_engine().llm_engine
            engine.add_request(str(number), {"prompt_token_ids": question.prompt_ids}, _sampling(answering, question))
            in_flight[str(number)] = question
            number += 1
        if engine is None or not in_flight:
            return
        for output in engine.step():
            if output.finished:
                completion = output.outputs[0]
                ids = list(completion.token_ids)
                logprobs = [entry[i].logprob for entry, i in zip(completion.logprobs or [], ids, strict=True)]
                asked = in_flight.pop(output.request_id.split("-")[0])
                answering.answered(asked, Answer(ids, logprobs, str(completion.finish_reason)))


def _sampling(answering: Answering, question: Question) -> Any:
    from vllm import SamplingParams

    params = answering.params
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=0.0 if question.greedy else params.temperature,
        top_p=1.0 if question.greedy else params.top_p,
        seed=question.seed,
        logprobs=0,
    )
