"""The target answers every user turn, each in the context of its own earlier answers.

Takes conversations; gives their turns as token ids exactly as generated, with the engine's log-probability of each
token (natural logarithm, of the unscaled distribution), so that extraction can prove itself on sampled text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eyas.conversations.loops import is_looped
from eyas.extraction.answers import AnswerLog, Turn, answer_key
from eyas.extraction.engine import generate
from eyas.params import ResponseParams
from eyas.templates.chat import ChatTemplate, Message, TemplateRefusal

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


@dataclass
class Dialogue:
    """A conversation on its way: the user's turns to come, and what has been said."""

    conversation_id: str
    split: str
    source: str
    kind: str  # "sampled", or "greedy_probe" for the self-check of extraction
    pending: list[Message]  # system and user turns that are still to be said
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    cut: bool = False  # no room was left in the context for the next answer
    refused: str | None = None  # the template's own words, where it does not take the conversation


@dataclass(frozen=True)
class Question:
    """What the target is to answer."""

    key: str
    prompt_ids: list[int]
    seed: int
    greedy: bool


def dialogue(conversation_id: str, split: str, source: str, kind: str, messages: Sequence[Message]) -> Dialogue:
    """A dialogue that keeps a conversation's system and user turns and forgets its given answers."""
    said = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "assistant"]
    return Dialogue(conversation_id, split, source, kind, said)


def _next_prompt(state: Dialogue, template: ChatTemplate) -> list[int]:
    while state.pending:
        state.messages.append(state.pending.pop(0))
        if state.messages[-1]["role"] == "user":
            break
    if not state.turns:
        return template.prompt_ids(state.messages)
    last = state.turns[-1]
    return template.next_prompt_ids(state.messages, last.prompt_ids, last.token_ids)


def _seed(params: ResponseParams, state: Dialogue) -> int:
    """A row's own seed, so that answers depend neither on the order of rows nor on which other rows there are."""
    return (int(state.conversation_id[:12], 16) + 1_000_003 * len(state.turns) + params.seed) % (1 << 31)


def answer(
    ask: Callable[[Sequence[Question]], None],
    log: AnswerLog,
    identity: dict[str, Any],
    template: ChatTemplate,
    dialogues: Sequence[Dialogue],
    params: ResponseParams,
    max_model_len: int,
) -> int:
    """Fill in the answers, one round for all first turns, one for all second turns, and so on; gives how many were asked for.

    A dialogue whose next answer would not fit into the context stops there, with ``cut`` set; one that the template does
    not take stops there with ``refused`` set. Answers given before are kept.

    Args:
        ask: has the target answer, and the same log keep it.
        log: answers of earlier runs, and of this one.
        identity: what decides all answers of the run.
        template: of the target.
        dialogues: filled in place.
        params: of the sampling.
        max_model_len: the context.
    """
    asked = 0
    open_dialogues = [d for d in dialogues if any(m["role"] == "user" for m in d.pending)]
    while open_dialogues:
        questions: list[tuple[Dialogue, Question]] = []
        for state in open_dialogues:
            try:
                prompt = _next_prompt(state, template)
            except TemplateRefusal as refusal:
                state.refused = str(refusal)
                state.messages.pop()
                state.pending.clear()
                continue
            if len(prompt) + params.max_tokens > max_model_len:
                state.messages.pop()
                state.pending.clear()
                state.cut = True
                continue
            greedy, seed = state.kind == "greedy_probe", _seed(params, state)
            questions.append((state, Question(answer_key(identity, prompt, seed, greedy), prompt, seed, greedy)))
        new = {question.key: question for _, question in questions if log.get(question.key) is None}
        if new:
            ask(list(new.values()))
            asked += len(new)
        for state, question in questions:
            turn = log.get(question.key)
            assert turn is not None
            state.turns.append(turn)
            state.messages.append({"role": "assistant", "content": template.decode(turn.token_ids)})
        open_dialogues = [d for d, _ in questions if any(m["role"] == "user" for m in d.pending)]
    return asked


def ask_engine(engine: LLM, params: ResponseParams, questions: Sequence[Question], log: AnswerLog) -> None:
    """Have vLLM answer; each answer is kept as soon as it is there."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            max_tokens=params.max_tokens,
            temperature=0.0 if question.greedy else params.temperature,
            top_p=1.0 if question.greedy else params.top_p,
            seed=question.seed,
            logprobs=0,
        )
        for question in questions
    ]

    def keep(index: int, output: RequestOutput) -> None:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        logprobs = [entry[i].logprob for entry, i in zip(completion.logprobs or [], ids, strict=True)]
        question = questions[index]
        log.add(question.key, Turn(question.prompt_ids, ids, logprobs, str(completion.finish_reason), is_looped(ids)))

    prompts = [question.prompt_ids for question in questions]
    generate(engine, prompts, sampling, description="answers", on_finished=keep)
