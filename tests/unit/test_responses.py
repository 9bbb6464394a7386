"""Answers by turn: seeds, contexts, ends. The engine's place is taken by a stand-in here alone; the pipeline test has vLLM."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.extraction.answers import Answer, AnswerLog, answer_key
from eyas.extraction.dialogues import KEPT, PROBE, Dialogue, dialogue
from eyas.extraction.responses import Answering, ask_engine
from eyas.extraction.tally import Tally
from eyas.params import ResponseParams
from eyas.templates.chat import ChatTemplate, Message
from eyas.templates.encoding import encode_turns, whole_turns
from tests.tiny import END, VOCAB, make_tiny_target

PARAMS = ResponseParams(temperature=0.7, top_p=0.9, max_tokens=12, seed=5, greedy_probes=1, drop_looped=True)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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


def begin(number: int, messages: list[Message], kind: str = "sampled", tools: Any = ()) -> Dialogue:
    row = {"conversation_id": f"{number:02x}" * 32, "split": "train", "source": "test"}
    return dialogue(row, kind, messages, list(tools))


def make(number: int, *turns: str, kind: str = "sampled") -> Dialogue:
    return begin(number, said(*turns), kind)


def several() -> list[Dialogue]:
    return [
        make(0xA1, "user: Hello!", "assistant: dropped", "user: How are you?", "user: And now?"),
        make(0xB2, "system: Be brief.", "user: What is the capital of France?"),
        make(0xC3, "user: Hello!", "user: How are you?"),
        make(0xD4, "user: Write a short poem.", kind=PROBE),
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
    done: list[Dialogue] = []
    with TemporaryDirectory() as folder:
        answers = AnswerLog(log or Path(folder) / "answers.jsonl")
        over: list[Dialogue] = []
        identity = {"seed": params.seed}
        answering = Answering(iter(dialogues), done.append, over.append, answers, identity, chat, params, context)
        ask_engine(lambda: engine, answering)
        answers.close()
    assert sorted(map(id, over)) == sorted(map(id, done)), "each once"
    assert [id(state) for state in done] == [id(state) for state in dialogues], "in the order of the source"
    assert all(state.over and not state.pending for state in done)
    return answering.asked


def answered(
    chat: ChatTemplate, dialogues: list[Dialogue], params: ResponseParams = PARAMS, engine: Engine | None = None
) -> dict[str, Dialogue]:
    answer_all(engine or Engine(), chat, dialogues, params)
    return {state.conversation_id: state for state in dialogues}


def test_a_dialogue_forgets_the_given_answers() -> None:
    given = said("system: Be brief.", "user: A", "assistant: no", "user: B", "assistant: no")
    state = make(0xAB, *(f"{m['role']}: {m['content']}" for m in given))
    assert list(state.pending) == said("system: Be brief.", "user: A", "user: B")
    assert (state.split, state.source, state.messages, state.turns) == ("train", "test", [], [])


def test_every_user_turn_is_answered_in_its_own_context(chat: ChatTemplate) -> None:
    states = answered(chat, several())
    for before in several():
        state = states[before.conversation_id]
        users = [m for m in before.pending if m["role"] == "user"]
        assert len(state.turns) == len(users)
        assert not state.cut
        assert [m for m in state.messages if m["role"] != "assistant"] == list(before.pending)
        answers = [m["content"] for m in state.messages if m["role"] == "assistant"]
        assert answers == [chat.decode(turn.token_ids) for turn in state.turns]
        assert state.messages[-1]["role"] == "assistant"
        first_system = len(state.messages) > 2 and state.messages[0]["role"] == "system"
        assert state.turns[0].prompt_ids == chat.prompt_ids(state.messages[: 2 if first_system else 1])
    turns = whole_turns([vars(turn) for turn in states["a1" * 32].turns])
    assert [row.turns for row in encode_turns(turns)] == [3]
    assert [turn.prompt_ids for turn in turns] == [
        whole[: len(turn.prompt_ids)] for turn in turns for whole in [encode_turns(turns)[0].input_ids]
    ]


def test_turns_are_stored_without_repetition(chat: ChatTemplate) -> None:
    states = answered(chat, several())
    for state in states.values():
        (first, *later), length = state.turns, 0
        assert first.shared == 0
        for turn in state.turns:
            assert turn.shared == length
            length += len(turn.prompt_ids) + len(turn.token_ids)
        assert later or len(state.turns) == 1


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
    greedy = [s for prompt, s in engine.asked if "short poem" in chat.decode(prompt)]
    assert [(s.temperature, s.top_p) for s in greedy] == [(0.0, 1.0)]
    assert {(s.temperature, s.top_p, s.max_tokens) for _, s in engine.asked if s not in greedy} == {(0.7, 0.9, 12)}
    assert {s.logprobs for _, s in engine.asked} == {0}


def test_no_room_for_the_next_answer_cuts_the_dialogue(chat: ChatTemplate) -> None:
    states = [make(0xA1, "user: Hi", f"user: {'word ' * 600}", "user: Bye"), make(0xB2, "user: Hi", "user: Bye")]
    engine = Engine()
    cut, whole = answered(chat, states, engine=engine).values()
    assert (cut.cut, len(cut.turns)) == (True, 1)
    assert [m["role"] for m in cut.messages] == ["user", "assistant"]
    assert (whole.cut, len(whole.turns)) == (False, 2)
    assert len(engine.asked) == 3


def test_the_context_is_filled_to_the_last_token(chat: ChatTemplate) -> None:
    state = make(0xA1, "user: Hello!")
    room = len(chat.prompt_ids(list(state.pending))) + PARAMS.max_tokens
    for length, turns in ((room, 1), (room - 1, 0)):
        copy = deepcopy(state)
        answer_all(Engine(), chat, [copy], context=length)
        assert (len(copy.turns), copy.cut) == (turns, turns == 0)


def loop_on(word: str, chat: ChatTemplate) -> Engine:
    """Answers with a loop whatever ends with a prompt that holds the word."""
    return Engine(
        lambda prompt, sampling: (
            [7] * sampling.max_tokens if word in chat.decode(prompt[-24:]) else varied(prompt, sampling)
        )
    )


def test_a_conversation_ends_before_an_answer_that_loops(chat: ChatTemplate) -> None:
    turns = ("user: Hello!", "user: Write a poem about the sea.", "user: Yes.", "user: Go on.")
    states = [make(0xA1, *turns), make(0xB2, *turns, kind=PROBE), make(0xC3, *turns[:1]), make(0xD4, *turns[1:])]
    first, probe, short, none = answered(chat, states, engine=loop_on("poem", chat)).values()
    assert [len(s.turns) for s in (first, probe, short, none)] == [1, 4, 1, 0]
    assert [(s.looped, s.dropped) for s in (first, probe, short, none)] == [(1, 3), (1, 0), (0, 0), (1, 3)]
    assert [turn.looped for turn in probe.turns] == [False, True, False, False]
    assert [m["role"] for m in first.messages] == ["user", "assistant"]
    tally = Tally()
    for state in states:
        tally.add(state)
    metrics = tally.metrics()
    assert (metrics["conversations"], metrics["greedy_probes"], tally.rows) == (3, 1, 2)
    assert (metrics["looped_turns"], metrics["dropped_turns"], metrics["turns"]) == (3, 6, 6)
    assert metrics["looped_share"] == 3 / 8


def test_loops_are_kept_and_flagged_if_asked_for(chat: ChatTemplate) -> None:
    params = PARAMS.model_copy(update={"drop_looped": False})
    states = [make(0xA1, "user: Hello!", "user: Write a poem.", "user: Yes.")]
    (state,) = answered(chat, states, params, loop_on("poem", chat)).values()
    assert [turn.looped for turn in state.turns] == [False, True, False]
    assert (state.looped, state.dropped) == (1, 0)


def tool_conversation() -> list[Message]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    return [
        {"role": "user", "content": "Add 2 and 3, and 2 and 3."},
        {"role": "assistant", "content": "", "tool_calls": [call | {"id": "1"}, call | {"id": "2"}]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "tool", "content": "5", "tool_call_id": "2"},
        {"role": "assistant", "content": "Both are 5."},
        {"role": "user", "content": "Once more."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def test_tool_turns_are_replayed_from_the_data(tmp_path: Path) -> None:
    chat = ChatTemplate(make_tiny_target(tmp_path / "target", chat_template=TOOL_TEMPLATE))
    given = tool_conversation()
    engine = Engine()
    (state,) = answered(chat, [begin(0xA1, given, tools=TOOLS)], engine=engine).values()
    first, second, third = whole_turns([vars(turn) for turn in state.turns])
    assert first.prompt_ids == chat.prompt_ids(given[:1], TOOLS)
    # the answer in place of the calls is one to train on; history goes on with the data's calls and their results
    assert second.prompt_ids == chat.prompt_ids(given[:4], TOOLS)
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    own = state.messages[4]
    assert state.messages[:4] == given[:4] and own == chat.parse_answer(second.token_ids)
    assert third.prompt_ids[: len(second.prompt_ids) + len(second.token_ids)] == [*second.prompt_ids, *second.token_ids]
    assert state.messages[5:] == [given[5], chat.parse_answer(third.token_ids)]
    rows = encode_turns([first, second, third])
    assert [row.turns for row in rows] == [1, 2]
    assert state.turns[1].shared >= len(first.prompt_ids)


@pytest.fixture(scope="module")
def two_chats(tmp_path_factory: pytest.TempPathFactory) -> list[ChatTemplate]:
    """One template that writes earlier turns as they were, and one that shortens earlier answers."""
    folder = tmp_path_factory.mktemp("targets")
    last_only = "{{ m.content if m.role != 'assistant' or loop.last else m.content[:3] }}"
    return [
        ChatTemplate(make_tiny_target(folder / str(number), chat_template=template))
        for number, template in enumerate([TOOL_TEMPLATE, TOOL_TEMPLATE.replace("{{ m.content }}", last_only)])
    ]


WORDS = st.sampled_from(["", "A", "And now?", "The sea is wide.", "1, 2, 3"])
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
}


@st.composite
def tool_dialogues(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": "S"}] * draw(st.integers(0, 1))
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        for _ in range(draw(st.integers(0, 2))):
            messages += [CALL, *[{"role": "tool", "content": draw(WORDS)}] * draw(st.integers(1, 2))]
        messages.append({"role": "assistant", "content": "No."})
    return messages[: len(messages) - draw(st.integers(0, 1))]


@given(st.lists(tool_dialogues(), min_size=1, max_size=2), st.booleans())
@settings(max_examples=25)
def test_prompts_are_those_that_were_asked(two_chats: list[ChatTemplate], given_: list[Any], rewriting: bool) -> None:
    engine, chat = Engine(), two_chats[rewriting]
    states = [begin(number, messages, tools=TOOLS) for number, messages in enumerate(given_)]
    answer_all(engine, chat, states, PARAMS.model_copy(update={"drop_looped": False}), context=4096)
    asked = [prompt for prompt, _ in engine.asked]
    for state, messages in zip(states, given_, strict=True):
        turns = whole_turns([vars(turn) for turn in state.turns])
        assert all(list(turn.prompt_ids) in asked for turn in turns)
        places = [n for n, m in enumerate(messages, 1) if m["role"] in ("user", "tool")]
        assert len(turns) == sum(n == len(messages) or messages[n]["role"] == "assistant" for n in places)
        # what the data says is said, in its order; only assistant turns that no result follows are the target's
        theirs = [
            m
            for m, after in zip(messages, [*messages[1:], CALL], strict=True)
            if m["role"] != "assistant" or after["role"] == "tool"
        ]
        assert [m for m in state.messages if m in theirs] == theirs
        stored = sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in state.turns)
        assert stored <= sum(turn.length for turn in turns)
        if not rewriting and CALL not in messages:
            assert stored == turns[-1].length


def test_a_cut_after_tool_results_leaves_whole_turns(tmp_path: Path) -> None:
    chat = ChatTemplate(make_tiny_target(tmp_path / "target", chat_template=TOOL_TEMPLATE))
    given = tool_conversation()
    given[3]["content"] = "word " * 600
    (state,) = answered(chat, [begin(0xA1, given, tools=TOOLS)]).values()
    assert (state.cut, len(state.turns)) == (True, 1)
    assert state.messages == given[:2]


def test_kept_conversations_are_not_asked(chat: ChatTemplate) -> None:
    engine = Engine()
    whole = said("user: A", "assistant: one", "user: B", "assistant: two")
    states = [
        begin(0xA1, whole, KEPT),
        begin(0xB2, [*whole, *said("user: C")], KEPT),
        begin(0xC3, said("system: S", "user: A"), KEPT),
        make(0xD4, "user: Hello!", kind=PROBE),
    ]
    kept, trimmed, none, probe = answered(chat, states, engine=engine).values()
    assert (kept.messages, trimmed.messages, none.messages) == (whole, whole, [])
    assert [len(s.turns) for s in (kept, trimmed, none, probe)] == [0, 0, 0, 1]
    assert len(engine.asked) == 1
    tally = Tally()
    for state in states:
        tally.add(state)
    metrics = tally.metrics()
    assert (metrics["conversations"], metrics["kept_conversations"], metrics["without_answer"]) == (3, 2, 1)
    assert tally.rows == 2


def test_what_is_said_a_thousand_times_is_asked_once(chat: ChatTemplate) -> None:
    engine = Engine()
    states = [make(n, "user: Hello!", "user: And now?", kind="greedy") for n in range(250)]
    states += [make(n, "user: Hello!", kind=PROBE) for n in range(3)]
    answer_all(engine, chat, states)
    assert len(engine.asked) == 2
    assert len({tuple(state.turns[1].token_ids) for state in states[:250]}) == 1


def test_no_engine_starts_where_nothing_is_to_be_asked(chat: ChatTemplate, tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    assert answer_all(Engine(), chat, several(), log=log) == 9
    answers = AnswerLog(log)
    done: list[Dialogue] = []
    answering = Answering(
        iter(several()), done.append, lambda _: None, answers, {"seed": PARAMS.seed}, chat, PARAMS, CONTEXT
    )
    ask_engine(lambda: pytest.fail("the engine starts"), answering)
    assert [len(state.turns) for state in done] == [3, 1, 2, 1, 2]


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
    taken = begin(0xAA, [user])
    refused = begin(0xBB, [{"role": "system", "content": "Be brief."}, user])
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
        log.add(key, Answer([5 + number, END], [-0.1, -1e-9], "stop"))
    log.close()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"[6,2]", b"[7,2]"))
    again = AnswerLog(path)
    assert [again.get(key) is None for key in keys] == [False, True, False]
    turn = again.get(keys[2])
    assert turn is not None and turn.logprobs == [-0.1, -1e-9]
    assert len({answer_key({}, [1], 0, greedy) for greedy in (True, False)}) == 2
    assert answer_key({}, [1], 0, True) == answer_key({}, [1], 9, True)
