"""The longer training's steps on a tiny target: texts, states, a training for each setting, and the head out of its parts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.drafting.long_run import main
from benchmarks.drafting.long_text import EXTRA, LONG, SMOKE, VALIDATION, Row, load_rows, save_rows
from tests.tiny import END, START, VOCAB, make_tiny_target

_SETTINGS = [
    {"name": "few", "vocab": 64, "train": {"epochs": 1, "tokens_per_step": 128, "autocast": "float32"}},
    {
        "name": "more",
        "data": "long",
        "share": 0.5,
        "keep": True,
        "vocab": 64,
        "train": {"epochs": 2, "tokens_per_step": 128, "autocast": "float32"},
    },
]


def make_inputs(path: Path) -> None:
    """Rows of two splits and prompts, as the step `prompts` writes them, of random tokens."""
    choose = random.Random(0)

    def ids(count: int) -> list[int]:
        return [choose.randrange(3, VOCAB) for _ in range(count)]

    rows = [
        Row(group, n, ids(30), [i > 9 for i in range(30)]) for n, group in enumerate([SMOKE] * 8 + [VALIDATION] * 4)
    ]
    rows += [Row(group, 12 + n, ids(5 + n), []) for n, group in enumerate([EXTRA] * 4 + [LONG] * 8)]
    more = {"kept_out": [], "opening": [START], "rest": [END, START], "ends": [END], "special": [0, 1, 2]}
    save_rows(path, rows, more)


def test_all_steps(tmp_path: Path) -> None:
    target, inputs, rows = make_tiny_target(tmp_path / "target"), tmp_path / "inputs.npz", tmp_path / "rows.npz"
    make_inputs(inputs)
    work, results = tmp_path / "work", tmp_path / "results"
    main(["generate", *map(str, (target, inputs, rows)), "--tokens", "100", "--batch", "4", "--max-tokens", "16"])
    made, figures = load_rows(rows)
    assert figures["generated_tokens"] >= 100
    assert all(len(row.ids) == len(row.mask) for row in made)
    assert [row.group for row in made].count(SMOKE) == 8
    sizes = ["--batch-tokens", "64", "--shard-mib", "1", "--workers", "1"]
    main(["extract", *map(str, (target, rows, work)), "--layers", "1", "2", "3", "4", *sizes])
    for _ in range(2):  # the second finds all done
        main(["train", *map(str, (target, inputs, rows, work, results)), json.dumps(_SETTINGS), "--workers", "1"])
    records = [json.loads(line) for line in (results / "results-0.jsonl").open()]
    assert [record["name"] for record in records] == ["few", "more"]
    assert 1 <= records[1]["extra"]["length"] <= 4
    main(["assemble", str(results), "more", str(tmp_path / "head"), "--target", str(target)])
    head, part = load_file(tmp_path / "head" / "model.safetensors"), load_file(results / "head-more-0.safetensors")
    assert torch.equal(head["fc.weight"], part["fc.weight"])
    assert torch.equal(head["d2t"] + torch.arange(64), part["target_ids"].long())
