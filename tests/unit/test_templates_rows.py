"""From responses to token rows: what is cut, left out and refused is counted, and memory or workers change no byte."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import Machine, Profile, load_profile
from eyas.stage import Stage
from eyas.tables import RESPONSES, TOKENS, read_batches, read_table, table_writer, write_table
from eyas.targets.resolve import describe_target
from eyas.templates.chat import ChatTemplate
from eyas.templates.rows import Encoded, Encoding, encode_batches, encode_responses
from stages.encode import run
from tests.tiny import END

QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


def kept(number: int, *contents: str, split: str = "train") -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {
        "conversation_id": f"{number:064x}",
        "split": split,
        "source": "test",
        "kind": "kept",
        "messages": json.dumps(messages),
        "tools": "[]",
        "turns": [],
    }


def generated(number: int, *turns: tuple[int, list[int], list[int]], kind: str = "sampled") -> dict[str, Any]:
    return kept(number) | {
        "kind": kind,
        "turns": [
            {
                "shared": shared,
                "prompt_ids": prompt,
                "token_ids": answer,
                "logprobs": [-0.5] * len(answer),
                "finish_reason": "stop",
                "looped": False,
            }
            for shared, prompt, answer in turns
        ],
    }


def test_rows_of_both_kinds(tiny_target: Path) -> None:
    encoded = encode_responses(
        [
            kept(1, QUESTION, ANSWER, "Thanks.", "Welcome."),
            generated(2, (0, [1, 10], [20, END]), (4, [11], [21, END])),
            generated(3, (0, [1, 10], [20, END]), kind="greedy_probe"),
        ],
        Encoding(4096, tiny_target),
    )
    rows = encoded.table.to_pylist()
    first, second, probe = rows
    assert [row["kind"] for row in rows] == ["kept", "sampled", "greedy_probe"]
    assert first["turns"] == 2
    assert [math.isnan(p) for p in first["logprobs"]] == first["loss_mask"]
    assert second["input_ids"] == [1, 10, 20, END, 11, 21, END]
    assert second["loss_mask"] == [False, False, True, True, False, True, True]
    assert encoded.counts == {
        "rows": 3,
        "turns": 5,
        "tokens": len(first["input_ids"]) + 7 + 4,
        "supervised_tokens": sum(first["loss_mask"]) + 4 + 2,
        "cut_rows": 0,
        "tokens_if_one_row_per_turn": sum(
            t.length
            for t in ChatTemplate(tiny_target).answered_turns(
                json.loads(kept(1, QUESTION, ANSWER, "Thanks.", "Welcome.")["messages"])
            )
        )
        + 4
        + 7
        + 4,
        "train_rows": 2,
    }
    assert encoded.longest == len(first["input_ids"])
    assert len(probe["input_ids"]) == 4


def test_what_is_too_long_is_cut_or_left_out(tiny_target: Path) -> None:
    template = ChatTemplate(tiny_target)
    row = kept(1, QUESTION, ANSWER, "Thanks.", "Welcome.")
    first, second = (turn.length for turn in template.answered_turns(json.loads(row["messages"])))
    cut = encode_responses([row], Encoding(second - 1, tiny_target))
    assert (cut.counts["cut_rows"], cut.counts["turns"], cut.longest) == (1, 1, first)
    out = encode_responses([row], Encoding(first - 1, tiny_target))
    assert (out.counts["left_out_too_long"], len(out.table)) == (1, 0)
    assert out.rejected == [
        {"conversation_id": f"{1:064x}", "reason": f"its shortest turn needs {first} tokens of {first - 1}"}
    ]


def test_what_the_template_refuses_is_set_aside(tiny_target: Path) -> None:
    row = kept(1) | {"messages": json.dumps([{"role": "user", "content": "Hi"}]), "tools": '[{"type": "function"}]'}
    row["messages"] = json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}])
    encoded = encode_responses([row, kept(2, QUESTION, ANSWER)], Encoding(4096, tiny_target))
    assert encoded.counts["refused_by_template"] == 1
    assert encoded.rejected == [
        {"conversation_id": f"{1:064x}", "reason": "the template does not write tool definitions"}
    ]
    assert [r["conversation_id"] for r in encoded.table.to_pylist()] == [f"{2:064x}"]


def test_kept_answers_need_a_target() -> None:
    with pytest.raises(EyasError, match=r"responses\.mode must be `keep`"):
        encode_responses([kept(1, QUESTION, ANSWER)], Encoding(4096))


def test_no_number_of_workers_and_no_batch_changes_a_byte(tiny_target: Path, tmp_path: Path) -> None:
    done: list[int] = []

    def encode(responses: Path, workers: int, batch: int) -> bytes:
        path = tmp_path / "tokens.parquet"
        batches = read_batches(responses, RESPONSES, batch)
        with table_writer(path, TOKENS) as add:
            for encoded in encode_batches(batches, Encoding(4096, tiny_target), workers, done.append):
                assert isinstance(encoded, Encoded)
                add(encoded.table)
        return path.read_bytes()

    of_target, of_data = tmp_path / "target.parquet", tmp_path / "data.parquet"
    write_table(of_target, [generated(i, (0, [1, i], [20 + i, END])) for i in range(60)], RESPONSES)
    write_table(of_data, [kept(i, f"{QUESTION} {i}", ANSWER) for i in range(60)], RESPONSES)
    assert encode(of_target, 1, 60) == encode(of_target, 1, 7) == encode(of_target, 2, 7)
    assert encode(of_data, 1, 60) == encode(of_data, 1, 7)
    assert sum(done) == 5 * 60


@pytest.mark.parametrize("mode", ["regenerate", "keep"])
def test_the_stage(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    profile = load_profile("smoke").model_dump()
    profile["target"] |= {"source": str(tiny_target), "max_model_len": 64}
    profile["responses"] |= {"mode": mode}
    stage = Stage("encode", "smoke", Profile.model_validate(profile), Machine())
    monkeypatch.chdir(tmp_path)
    write_json_atomic(stage.data / "target.json", describe_target(stage.params.target, tiny_target))
    long = kept(3, QUESTION, ANSWER, f"{QUESTION} " * 20, ANSWER)
    rows = [kept(2, QUESTION, ANSWER, split="validation"), long, kept(4, f"{QUESTION} " * 30, ANSWER)]
    rows = [generated(1, (0, [1, 10], [20, END])), *(rows if mode == "keep" else [])]
    write_table(stage.data / "responses" / "responses.parquet", rows, RESPONSES)
    run(stage)
    metrics = json.loads((stage.metrics / "encode.json").read_text())
    table = read_table(stage.data / "tokens" / "tokens.parquet", TOKENS)
    rejected = (stage.data / "tokens" / "rejected.jsonl").read_text().splitlines()
    assert metrics["rows"] == len(table) == (3 if mode == "keep" else 1)
    assert metrics["tokens"] == sum(len(row["input_ids"]) for row in table) == metrics["tokens_if_one_row_per_turn"]
    assert metrics["supervised_share"] == sum(sum(row["loss_mask"]) for row in table) / metrics["tokens"]
    assert metrics["longest_row"] == max(len(row["input_ids"]) for row in table)
    counts = [metrics[name] for name in ("cut_rows", "left_out_too_long", "refused_by_template", "validation_rows")]
    assert counts == ([1, 1, 0, 1] if mode == "keep" else [0, 0, 0, 0])
    assert [json.loads(line)["conversation_id"] for line in rejected] == ([f"{4:064x}"] if mode == "keep" else [])


def test_nothing_to_train_on_is_an_error(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("encode", "smoke", load_profile("smoke"), Machine())
    monkeypatch.chdir(tmp_path)
    write_table(stage.data / "responses" / "responses.parquet", [generated(1)], RESPONSES)
    with pytest.raises(EyasError, match="no conversation has an answer that fits"):
        run(stage)
    assert not (stage.data / "tokens").exists()


def test_eight_turns_cost_what_the_conversation_is_long(tiny_target: Path) -> None:
    contents = [f"{QUESTION} {ANSWER} {ANSWER} {i}." for i in range(16)]
    encoded = encode_responses([kept(1, *contents)], Encoding(100_000, tiny_target))
    template = ChatTemplate(tiny_target)
    messages = json.loads(kept(1, *contents)["messages"])
    length = len(template.encode(template.render(messages, generation_prompt=False)))
    assert len(encoded.table) == 1
    assert encoded.counts["turns"] == 8
    assert encoded.counts["tokens"] <= 1.05 * length  # 1.00
    assert 4 <= encoded.counts["tokens_if_one_row_per_turn"] / length <= 5  # 4.5
    supervised = sum(len(turn.token_ids) for turn in template.answered_turns(messages))
    assert encoded.counts["supervised_tokens"] == supervised
