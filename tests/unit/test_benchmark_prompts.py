"""Which prompts are served does not depend on chance, order or how many others there are."""

import json
import random
from collections.abc import Sequence

import pytest

from eyas.benchmark.prompts import HELDOUT, choose, choose_prompts, first_turn
from eyas.errors import EyasError

Message = dict[str, str]


def encode(messages: Sequence[Message]) -> list[int]:
    return [ord(c) for m in messages for c in m["content"]]


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


CANDIDATES = {f"id{i}": user(f"text {i}") for i in range(50)}
GOLDEN = ["id42", "id8", "id26", "id22"]


def ids(count: int, candidates: dict[str, list[Message]], set_name: str = "birds") -> list[str]:
    return [p.prompt_id for p in choose(set_name, candidates, count, encode, 100)]


def test_the_same_prompts_in_any_order() -> None:
    shuffled = list(CANDIDATES.items())
    random.Random(0).shuffle(shuffled)
    assert ids(8, CANDIDATES) == ids(8, dict(shuffled))


def test_these_very_prompts() -> None:
    """A golden value: another choice would make numbers incomparable with earlier ones."""
    assert ids(4, CANDIDATES) == GOLDEN


def test_asking_for_more_exchanges_none() -> None:
    assert ids(20, CANDIDATES)[:8] == ids(8, CANDIDATES)


def test_more_candidates_exchange_few() -> None:
    more = CANDIDATES | {f"new{i}": user("x") for i in range(5)}
    assert [i for i in ids(55, more) if not i.startswith("new")] == ids(50, CANDIDATES)


def test_sets_choose_apart() -> None:
    assert ids(8, CANDIDATES) != ids(8, CANDIDATES, "eagles")


def test_prompts_without_room_are_passed_over() -> None:
    chosen = choose("birds", CANDIDATES | {"long": user("x" * 101)}, 60, encode, 100)
    assert len(chosen) == 50
    assert all(len(p.token_ids) <= 100 for p in chosen)


def test_first_turn_keeps_the_system_message() -> None:
    system, question = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}
    rest = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q2"}]
    assert first_turn([system, question, *rest]) == [system, question]
    assert first_turn([system]) == []


def rows() -> list[dict[str, str]]:
    return [
        {
            "conversation_id": f"c{i}",
            "split": "validation" if i % 2 else "train",
            "messages": json.dumps([*user(f"held {i}"), {"role": "assistant", "content": "a"}]),
        }
        for i in range(10)
    ]


def test_only_validation_is_served_and_sets_follow() -> None:
    sets = [{"set": name, "prompt_id": f"{name}/{i}", "turns": ["one", "two"]} for name in "ba" for i in range(3)]
    prompts = choose_prompts(rows(), sets, heldout=4, per_set=2, encode=encode, longest=50)
    assert [p.set for p in prompts] == [HELDOUT] * 4 + ["a"] * 2 + ["b"] * 2
    assert {p.prompt_id for p in prompts[:4]} <= {f"c{i}" for i in range(1, 10, 2)}
    assert prompts[4].token_ids == encode(user("one"))


def test_no_sets_at_all() -> None:
    sets = [{"set": "a", "prompt_id": "a/0", "turns": ["one"]}]
    assert {p.set for p in choose_prompts(rows(), sets, heldout=2, per_set=0, encode=encode, longest=50)} == {HELDOUT}


def test_clear_errors() -> None:
    with pytest.raises(EyasError, match="validation_share"):
        choose_prompts(rows(), [], heldout=4, per_set=0, encode=encode, longest=2)
    named = [{"set": HELDOUT, "prompt_id": "x", "turns": ["one"]}]
    with pytest.raises(EyasError, match="rename"):
        choose_prompts(rows(), named, heldout=4, per_set=1, encode=encode, longest=50)
