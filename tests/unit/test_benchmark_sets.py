"""Benchmark sets in files, in the forms of the originals: read, kept out of training, and served by category."""

import gzip
import json
from pathlib import Path

import pytest

from eyas.benchmark.prompts import choose_prompts
from eyas.params import SourceParams
from eyas.tables import PROMPTS, read_table
from tests.prepared import prepare, questions, write

# two prompts each; the first is planted among the conversations to train on
SHAPES = {
    "mt_bench": [
        {
            "question_id": 81,
            "category": "writing",
            "turns": [
                "Compose a travel blog post about a trip to the northern islands, with its birds.",
                "Shorten it.",
            ],
            "reference": ["none", "none"],
        },
        {"question_id": 82, "category": "math", "turns": ["How far apart are two trains after an hour?", "And two?"]},
    ],
    "gsm8k": [
        {
            "question": "A falconer weighs nine birds each day, twice. How often in a week does she weigh?",
            "answer": "126",
        },
        {"question": "Six nests hold four eggs each and one holds two. How many eggs are there?", "answer": "26"},
    ],
    "human_eval": [
        {
            "task_id": "HumanEval/0",
            "prompt": 'def widest(wings: list[float]) -> float:\n    """Return the widest wing span of all birds."""\n',
            "entry_point": "widest",
            "canonical_solution": "    return max(wings)\n",
            "test": "assert True",
        },
        {"task_id": "HumanEval/1", "prompt": "def count_eggs(nests):\n", "entry_point": "x", "test": "x"},
    ],
    "spec_bench": [
        {
            "question_id": 161,
            "category": "summarization",
            "turns": ["Summarise the report on eagles at the coast in one line."],
        },
        {"question_id": 241, "category": "translation", "turns": ["Translate into German: the eyas sleeps."]},
    ],
    "sharegpt": [
        {
            "id": "a_0",
            "conversations": [
                {"from": "human", "value": "Please explain why young falcons are weighed every single morning."},
                {"from": "gpt", "value": "So that they fly back."},
            ],
        },
        {
            "id": "b_0",
            "conversations": [{"from": "human", "value": "What is a hood for?"}, {"from": "gpt", "value": "x"}],
        },
    ],
}


def opening(row: dict) -> str:
    if "conversations" in row:
        return str(row["conversations"][0]["value"])
    return str(row["turns"][0] if "turns" in row else row.get("question") or row["prompt"])


@pytest.mark.parametrize("packed", [False, True])
def test_files_of_the_originals_forms(inputs: Path, tmp_path: Path, packed: bool) -> None:
    sources = []
    for name, rows in SHAPES.items():
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file = inputs / (f"{name}.jsonl" + ".gz" * packed)
        file.write_bytes(gzip.compress(content) if packed else content)
        sources.append(SourceParams(source=str(file.relative_to(tmp_path)), cap=None))
    planted = [{"prompt": opening(rows[0])} for rows in SHAPES.values()]
    wrapped = [{"prompt": f"Answer with care, and explain it.\n\n{row['prompt']}"} for row in planted]
    chats = write(inputs, "chats.jsonl", [*questions(60), *planted, *wrapped])
    made = prepare((chats, None), benchmark_sets=sources)
    assert made.metrics["benchmark_prompts"] == dict.fromkeys(SHAPES, 2)
    assert made.metrics["reasons"] == {"benchmark_prompt": 2 * len(SHAPES)}
    assert not {row["prompt"] for row in planted} & made.openings

    (tmp_path / "prompts.parquet").write_bytes(made.files["prompts.parquet"])
    rows = read_table(tmp_path / "prompts.parquet", PROMPTS)
    served = choose_prompts(
        made.rows, rows, heldout=2, per_set=2, encode=lambda m: [ord(c) for c in m[-1]["content"]], longest=9999
    )
    first = {"".join(map(chr, p.token_ids)): p.category for p in served if p.set != "heldout"}
    assert {opening(row) for rows in SHAPES.values() for row in rows} == set(first)
    assert first[opening(SHAPES["spec_bench"][1])] == "translation"
    assert {p.category for p in served if p.set == "heldout"} == {chats}
