"""Answers by turn: seeds, contexts, ends. The engine's place is taken by a stand-in here alone; the pipeline test has vLLM."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eyas.extraction.answers import AnswerLog, Turn, answer_key
from eyas.extraction.responses import Dialogue, answer, ask_engine, dialogue
from eyas.params import ResponseParams
from eyas.templates.chat import ChatTemplate, Message
from eyas.templates.encoding import GeneratedTurn, encode_turns
from tests.tiny import END, VOCAB, make_tiny_target

PARAMS = ResponseParams(temperature=0.7, top_p=0.9, max_tokens=12, seed=5, greedy_probes=1)
CONTEXT = 512


@dataclass(frozen=True)
class Sampling:
    """The arguments of vLLM's `SamplingParams` that are used."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    logprobs: int


def varied(prompt: list[int], sampling: Sampling) -> list[int]:
    """An answer that follows from the prompt and, unless greedy, from the seed; every third one is cut by length."""
    source = random.Random(repr((prompt, sampling.seed if sampling.temperature else None)))
    ids = [source.randrange(3, VOCAB) for _ in range(sampling.max_tokens)]
    return ids if source.randrange(3) == 0 else [*ids[: source.randrange(1, 8)], END]


class Engine:
    """Answers the last request first and shows unfinished ones on the way, as an engine may."""

    def __init__(self, speak: Callable[[list[int], Sampling], list[int]] = varied) -> None:
        self.speak, self.llm_engine = speak, self
        self.waiting: list[tuple[str, list[int], Sampling]] = []
        self.asked: list[tuple[list[int], Sampling]] = []

    def add_request(self, request_id: str, prompt: dict[str, list[int]], sampling: Sampling) -> None:
        self.waiting.append((request_id, prompt["prompt_token_ids"], sampling))
        self.asked.append((prompt["prompt_token_ids"], sampling))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[SimpleNamespace]:
        request_id, prompt, sampling = self.waiting.pop()
        ids = self.speak(prompt, sampling)
        completion = SimpleNamespace(
            token_ids=tuple(ids),
            logprobs=[{i: SimpleNamespace(logprob=-i / 100), (i + 1): SimpleNamespace(logprob=-0.01)} for i in ids],
            finish_reason="stop" if ids[-1] == END else "length",
        )
        others = [SimpleNamespace(request_id=f"{r}-abc", finished=False) for r, _, _ in self.waiting]
        return [*others, SimpleNamespace(request_id=f"{request_id}-abc", finished=True, outputs=[completion])]


@pytest.fixture(autouse=True)
def _sampling_params(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in: Any = ModuleType("vllm")  # importing the real one takes longer than all these tests
    stand_in.SamplingParams = Sampling
    monkeypatch.setitem(sys.modules, "vllm", stand_in)


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> ChatTemplate:
    return ChatTemplate(tiny_target)


def said(*turns: str) -> list[Message]:
    return [{"role": role, "content": content} for role, content in (turn.split(": ", 1) for turn in turns)]


def make(number: int, *turns: str, kind: str = "sampled") -> Dialogue:
    return dialogue(f"{number:02x}" * 32, "train", "test", kind, said(*turns))


def several() -> list[Dialogue]:
    return [
        make(0xA1, "user: Hello!", "assistant: dropped", "user: How are you?", "user: And now?"),
        make(0xB2, "system: Be brief.", "user: What is the capital of France?"),
        make(0xC3, "user: Hello!", "user: How are you?"),
        make(0xD4, "user: Write a short poem.", kind="greedy_probe"),
        make(0xE5, "user: Hello!", "assistant: dropped", "system: Now in French.", "user: How are you?"),
    ]


def answer_all(
    engine: Any,
    chat: ChatTemplate,
    dialogues: list[Dialogue],
    params: ResponseParams = PARAMS,
    context: int = CONTEXT,
    log: Path | None = None,
) -> int:
    with TemporaryDirectory() as folder:
        answers = AnswerLog(log or Path(folder) / "answers.jsonl")
        ask = partial(ask_engine, engine, params, log=answers)
        asked = answer(ask, answers, {"seed": params.seed}, chat, dialogues, params, context)
        answers.close()
    return asked


def answered(
    chat: ChatTemplate, dialogues: list[Dialogue], params: ResponseParams = PARAMS, engine: Engine | None = None
) -> dict[str, Dialogue]:
    answer_all(engine or Engine(), chat, dialogues, params)
    return {state.conversation_id: state for state in dialogues}


def test_a_dialogue_keeps_system_and_user_turns_only() -> None:
    given = said("system: Be brief.", "user: A", "assistant: no", "user: B", "assistant: no")
    state = dialogue("ab", "validation", "file", "sampled", [m | {"extra": "x"} for m in given])
    assert state.pending == said("system: Be brief.", "user: A", "user: B")
    assert (state.split, state.source, state.messages, state.turns) == ("validation", "file", [], [])


def test_every_user_turn_is_answered_in_its_own_context(chat: ChatTemplate) -> None:
    states = answered(chat, several())
    for before in several():
        state = states[before.conversation_id]
        users = [m for m in before.pending if m["role"] == "user"]
        assert len(state.turns) == len(users)
        assert not state.pending
        assert not state.cut
        assert [m for m in state.messages if m["role"] != "assistant"] == before.pending
        answers = [m["content"] for m in state.messages if m["role"] == "assistant"]
        assert answers == [chat.decode(turn.token_ids) for turn in state.turns]
        assert state.messages[-1]["role"] == "assistant"
        first_system = len(state.messages) > 2 and state.messages[0]["role"] == "system"
        assert state.turns[0].prompt_ids == chat.prompt_ids(state.messages[: 2 if first_system else 1])
    turns = states["a1" * 32].turns
    generated = [GeneratedTurn(t.prompt_ids, t.token_ids, t.logprobs) for t in turns]
    assert [row.turns for row in encode_turns(generated)] == [3]


def test_log_probabilities_are_the_chosen_tokens(chat: ChatTemplate) -> None:
    for state in answered(chat, several()).values():
        for turn in state.turns:
            assert turn.logprobs == [-i / 100 for i in turn.token_ids]
            assert turn.finish_reason == ("stop" if turn.token_ids[-1] == END else "length")


def test_answers_depend_neither_on_order_nor_on_other_rows(chat: ChatTemplate) -> None:
    expected = answered(chat, several())
    assert answered(chat, several()[::-1]) == expected
    for state in several():
        assert answered(chat, [state])[state.conversation_id] == expected[state.conversation_id]


def test_seeds_differ_by_row_turn_and_parameter(chat: ChatTemplate) -> None:
    engine = Engine()
    answered(chat, several(), engine=engine)
    seeds = [sampling.seed for _, sampling in engine.asked]
    assert len(set(seeds)) == len(seeds) == 9
    assert all(0 <= seed < 2**31 for seed in seeds)
    other = Engine()
    answered(chat, several(), PARAMS.model_copy(update={"seed": 6}), other)
    assert not {sampling.seed for _, sampling in other.asked} & set(seeds)


def test_probes_are_greedy_and_the_others_are_not(chat: ChatTemplate) -> None:
    engine = Engine()
    answered(chat, several(), engine=engine)
    greedy = [s for prompt, s in engine.asked if "short poem" in chat._tokenizer.decode(prompt)]
    assert [(s.temperature, s.top_p) for s in greedy] == [(0.0, 1.0)]
    assert {(s.temperature, s.top_p, s.max_tokens) for _, s in engine.asked if s not in greedy} == {(0.7, 0.9, 12)}
    assert {s.logprobs for _, s in engine.asked} == {0}


def test_no_room_for_the_next_answer_cuts_the_dialogue(chat: ChatTemplate) -> None:
    states = [make(0xA1, "user: Hi", f"user: {'word ' * 600}", "user: Bye"), make(0xB2, "user: Hi", "user: Bye")]
    engine = Engine()
    cut, whole = answered(chat, states, engine=engine).values()
    assert (cut.cut, len(cut.turns), cut.pending) == (True, 1, [])
    assert [m["role"] for m in cut.messages] == ["user", "assistant"]
    assert (whole.cut, len(whole.turns)) == (False, 2)
    assert len(engine.asked) == 3


def test_the_context_is_filled_to_the_last_token(chat: ChatTemplate) -> None:
    state = make(0xA1, "user: Hello!")
    room = len(chat.prompt_ids(state.pending)) + PARAMS.max_tokens
    for length, turns in ((room, 1), (room - 1, 0)):
        copy = deepcopy(state)
        answer_all(Engine(), chat, [copy], context=length)
        assert (len(copy.turns), copy.cut) == (turns, turns == 0)


def test_loops_are_flagged(chat: ChatTemplate) -> None:
    engine = Engine(lambda prompt, sampling: [7] * sampling.max_tokens)
    (state,) = answered(chat, [make(0xA1, "user: Hello!")], engine=engine).values()
    assert state.turns[0].looped
    assert not answered(chat, several())["b2" * 32].turns[0].looped


def test_a_dialogue_without_user_turns_asks_nothing(chat: ChatTemplate) -> None:
    engine = Engine()
    (state,) = answered(chat, [make(0xA1, "system: Be brief.")], engine=engine).values()
    assert (state.turns, engine.asked) == ([], [])


def test_a_conversation_that_the_template_refuses_is_set_aside_alone(tmp_path: Path) -> None:
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(make_tiny_target(tmp_path / "target", chat_template=refusing))
    user = {"role": "user", "content": "Hello"}
    taken = dialogue("a" * 32, "train", "s", "sampled", [user])
    refused = dialogue("b" * 32, "train", "s", "sampled", [{"role": "system", "content": "Be brief."}, user])
    answer_all(Engine(), template, [taken, refused])
    assert len(taken.turns) == 1 and taken.refused is None
    assert refused.turns == [] and refused.refused == "System role not supported"


class Killed(Exception):
    """The process ends here."""


def test_a_killed_run_goes_on_with_the_answers_that_it_had(chat: ChatTemplate, tmp_path: Path) -> None:
    expected = answered(chat, several())
    log, asked = tmp_path / "answers.jsonl", []
    for kills in range(1, 20):
        left = 2

        def speak(prompt: list[int], sampling: Sampling) -> list[int]:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return varied(prompt, sampling)

        states = several()
        engine = Engine(speak)
        try:
            answer_all(engine, chat, states, log=log)
        except Killed:
            asked.append(kills)
            with log.open("ab") as stream:  # a line that the kill cut short
                stream.write(b"0" * 70)
            continue
        break
    assert len(asked) == 4  # 9 answers, two a run
    assert {state.conversation_id: state for state in states} == expected
    nobody = Engine(lambda prompt, sampling: [])
    assert answer_all(nobody, chat, several(), log=log) == 0
    assert nobody.asked == []


def test_added_conversations_are_all_that_is_asked(chat: ChatTemplate, tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    assert answer_all(Engine(), chat, several(), log=log) == 9
    more = [make(0xF6, "user: Hello again!"), *several()]
    assert answer_all(Engine(), chat, more, log=log) == 1
    assert answer_all(Engine(), chat, several(), PARAMS.model_copy(update={"seed": 6}), log=log) > 5


def test_a_damaged_line_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    log = AnswerLog(path)
    keys = [answer_key({}, [number], 0, False) for number in range(3)]
    for number, key in enumerate(keys):
        log.add(key, Turn([number], [5, END], [-0.1, -1e-9], "stop", False))
    log.close()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"[1]", b"[7]"))
    again = AnswerLog(path)
    assert [again.get(key) is None for key in keys] == [False, True, False]
    turn = again.get(keys[2])
    assert turn is not None and turn.logprobs == [-0.1, -1e-9]
    assert len({answer_key({}, [1], 0, greedy) for greedy in (True, False)}) == 2
    assert answer_key({}, [1], 0, True) == answer_key({}, [1], 9, True)
