"""Identity, split, benchmark prompts, near duplicates and caps: each alone."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.conversations.contamination import BenchmarkIndex
from eyas.conversations.identity import conversation_id, split_of
from eyas.conversations.near_duplicates import BANDED, HASHES, Sketcher, band_width, mark_copies
from eyas.conversations.rules import Conversation, Message
from eyas.conversations.selection import quotas
from eyas.conversations.shingles import words
from eyas.conversations.sorting import Flags
from tests.prepared import BENCHMARK

# --- identity and split -------------------------------------------------------------------------------------------


def chat(*texts: str) -> Conversation:
    return Conversation(tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)))


def test_the_id_is_of_the_content() -> None:
    # in the open, because a resumed run and an older data set are matched by it
    assert conversation_id(chat("Hi")) == hashlib.sha256(b'[["user","Hi"]]').hexdigest()
    assert len({conversation_id(c) for c in (chat("a"), chat("a", "b"), chat("a", "c"), chat("ab"))}) == 4


def test_the_id_holds_what_templates_look_at() -> None:
    plain = chat("Hi", "18 degrees.")
    question, answer = plain.messages
    call: dict[str, Any] = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    others = [
        replace(plain, tools=({"type": "function", "function": {"name": "weather"}},)),
        replace(plain, messages=(question, replace(answer, reasoning="Warm."))),
        replace(plain, messages=(question, replace(answer, tool_calls=(call,)))),
        replace(plain, messages=(question, replace(answer, tool_calls=({**call, "id": "1"},)))),
        replace(plain, messages=(question, replace(answer, name="weather"))),
    ]
    assert len({conversation_id(c) for c in (plain, *others)}) == 6


def test_cut_ends_at_a_turn_boundary() -> None:
    whole = chat("u1", "a1", "u2", "a2", "u3")
    assert [m.content for m in whole.cut(2).messages] == ["u1", "a1", "u2", "a2"]
    assert whole.cut(3) == whole
    bare = Conversation(tuple(Message("user", text) for text in ("u1", "u2", "u3")))
    assert [m.content for m in bare.cut(2).messages] == ["u1", "u2"]


def test_the_same_opening_is_on_the_same_side() -> None:
    for number in range(200):
        sides = {split_of(chat(opening, "x", str(number)), 0.5) for opening in (f"Why {number}?", f"why  {number}?\n")}
        assert len(sides) == 1


def test_the_share_is_kept_and_grows_in_one_direction() -> None:
    chats = [chat(f"Question {number}") for number in range(2000)]
    small = {c for c in chats if split_of(c, 0.1) == "validation"}
    large = {c for c in chats if split_of(c, 0.3) == "validation"}
    assert small < large
    assert 0.07 < len(small) / len(chats) < 0.13


# --- contamination ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        BENCHMARK,
        BENCHMARK.upper().replace(" ", "\n "),
        BENCHMARK.replace(",", "").replace(".", "!"),
        BENCHMARK.replace("please", "thanks"),
        f"You are an expert. Follow the instruction below with care and explain all steps.\n\n{BENCHMARK}\n\nAnswer:",
        "Python function that returns the n-th Fibonacci number without any recursion",
    ],
)
def test_benchmark_prompts_are_recognised(text: str) -> None:
    assert BenchmarkIndex([BENCHMARK, "Why?"]).contains(text)


@pytest.mark.parametrize(
    "text",
    [
        "Write a Python function that returns the sum of a list.",
        "Why not? Explain how a Fibonacci heap works.",
        "Why is the sky blue",
        "",
        "?!",
    ],
)
def test_other_prompts_are_not(text: str) -> None:
    assert not BenchmarkIndex([BENCHMARK, "Why?", "..."]).contains(text)


def test_unspaced_scripts_are_compared_by_character() -> None:
    prompt = "请写一个函数，返回第 n 个斐波那契数，不要使用递归。"
    assert words("Grüße, 日本の x_1!") == ["grüsse", "日", "本", "の", "x_1"]
    assert BenchmarkIndex([prompt]).contains(f"你是专家。{prompt}谢谢你！")
    assert not BenchmarkIndex([prompt]).contains("请写一个关于海港的故事。")


# --- near duplicates ----------------------------------------------------------------------------------------------


def jaccard(first: set[str], second: set[str]) -> float:
    return len(first & second) / len(first | second)


def copied(grams: list[set[str]], similarity: float) -> list[bool]:
    keys, sketches = Sketcher(similarity)(grams)
    bands = []
    for band in range(keys.shape[1]):
        rows = np.empty(len(grams), dtype=BANDED)
        rows["key"], rows["rank"], rows["sketch"] = keys[:, band], np.arange(len(grams)), sketches
        bands.append([rows])
    with tempfile.TemporaryDirectory() as name, Flags(Path(name) / "flags") as flags:
        mark_copies(bands, flags, Path(name), similarity, lambda _: None)
        return flags.read(0, len(grams)).tolist()


@pytest.mark.parametrize("similarity", [0.05, 0.5, 0.8, 0.9, 0.99])
def test_bands_miss_few_pairs(similarity: float) -> None:
    width = band_width(similarity)
    assert 1 - (1 - similarity**width) ** (HASHES // width) >= 0.99


def test_copies_are_found_and_others_are_not() -> None:
    generator = np.random.default_rng(0)
    grams, alike = [], []
    for number in range(400):
        whole = [f"{number} {place}" for place in range(100)]
        similarity = float(generator.choice([0.3, 0.6, 0.9, 0.96]))
        shared = round(200 * similarity / (1 + similarity))
        grams += [set(whole), {*whole[:shared], *(f"other {gram}" for gram in whole[shared:])}]
        alike += [False, similarity > 0.8]
    found = copied(grams, 0.8)
    assert not any(found[::2])
    assert sum(one != other for one, other in zip(found, alike, strict=True)) <= 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 12).map(str), min_size=1, max_size=10), max_size=30))
def test_every_copy_has_an_original_that_stays(grams: list[set[str]]) -> None:
    found = copied(grams, 0.7)
    for later, copy in enumerate(found):
        if copy:
            assert any(not found[earlier] and jaccard(grams[earlier], grams[later]) > 0.5 for earlier in range(later))
    # of equal sets only the first may stay
    stays = [frozenset(one) for one, copy in zip(grams, found, strict=True) if not copy]
    assert len(set(stays)) == len(stays)


# --- caps ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0.01, 100)), min_size=1, max_size=6),
    st.integers(1, 200),
)
def test_quotas_fill_the_cap_and_leave_no_source_out(sources: list[tuple[int, float]], cap: int) -> None:
    available, weights = [count for count, _ in sources], [weight for _, weight in sources]
    taken = quotas(available, weights, cap)
    assert sum(taken) == min(cap, sum(available))
    assert all(0 <= some <= all_ for some, all_ in zip(taken, available, strict=True))
    if cap >= sum(count > 0 for count in available):
        assert all(some > 0 for some, all_ in zip(taken, available, strict=True) if all_)


def test_quotas_follow_weight_and_size() -> None:
    assert quotas([600, 200], [1, 1], 400) == [300, 100]
    assert quotas([600, 200], [1, 3], 200) == [100, 100]
    assert quotas([600, 200], [1, 9], 400) == [200, 200]  # what the second cannot fill goes to the first
    assert quotas([5, 0, 5], [1, 1, 1], 100) == [5, 0, 5]
