"""The stage `respond` as it runs, against a server that answers the same to the same question."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import Machine, load_profile
from eyas.stage import Stage
from eyas.tables import CONVERSATIONS, RESPONSES, read_table, write_table
from eyas.targets.resolve import describe_target
from eyas.templates.encoding import whole_turns
from stages.respond import run
from tests.tiny import END, make_tiny_target
from tests.vllm_server import FakeServer, completion, words

ROOT = Path(__file__).resolve().parents[2]


def conversation(number: int) -> dict[str, Any]:
    users = [f"Question {number}: what is {number} and {turn}?" for turn in range(1 + number % 3)]
    messages = [
        m for text in users for m in ({"role": "user", "content": text}, {"role": "assistant", "content": "No."})
    ]
    if number % 5 == 0:
        messages.pop()  # an answer that the data lacks
    return {
        "conversation_id": f"{number:08x}" * 8,
        "split": "validation" if number % 10 == 3 else "train",
        "source": "test",
        "messages": json.dumps(messages),
        "tools": "[]",
    }


@pytest.fixture
def checkout(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the stage runs, with 90 conversations of one to three turns."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "params.yaml").read_text().replace("bundled:smollm2-135m", str(tiny_target))
    Path("params.yaml").write_text(text.replace("max_tokens: 80", "max_tokens: 12"))
    write_json_atomic(Path("data/smoke/target.json"), describe_target(load_profile("smoke").target, tiny_target))
    table = Path("data/smoke/conversations/conversations.parquet")
    write_table(table, [conversation(number) for number in range(90)], CONVERSATIONS)
    return tmp_path


def stage(fake: FakeServer, **responses: Any) -> Stage:
    params = load_profile("smoke")
    changed = params.responses.model_copy(update=responses)
    machine = Machine(endpoint=fake.url, endpoint_concurrency=4)
    return Stage("respond", "smoke", params.model_copy(update={"responses": changed}), machine)


def rows() -> list[dict[str, Any]]:
    return read_table(Path("data/smoke/responses/responses.parquet"), RESPONSES)


def metrics() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path("metrics/smoke/respond.json").read_text())
    return values


def served(checkout: Path) -> FakeServer:
    return FakeServer(root=load_profile("smoke").target.source, max_model_len=1024)


def test_a_killed_run_goes_on_to_the_same_bytes(checkout: Path) -> None:
    with served(checkout) as fake:
        run(stage(fake))
        asked = len(fake.asked)
        plain = {path.name: path.read_bytes() for path in Path("data/smoke/responses").iterdir()}
        Path(".work").rename("plain.work")
        Path("data/smoke/responses").rename("plain.responses")
        fake.asked.clear()
        Path("machine.yaml").write_text(f"endpoint: {fake.url}\nendpoint_concurrency: 4\n")
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        fake.delay_s = 0.01
        child = subprocess.Popen([sys.executable, "-m", "stages.respond", "smoke"], env=environment)
        while len(fake.asked) < 80 and child.poll() is None:
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert not Path("data/smoke/responses").exists()
        (log,) = Path(".work/smoke/respond").glob("*.jsonl")
        log.write_bytes(log.read_bytes()[:-30])  # a line that the kill cut short
        fake.delay_s = 0.0
        run(stage(fake))
        in_flight_and_torn = 4 + 1
        assert asked < len(fake.asked) <= asked + in_flight_and_torn
    assert {path.name: path.read_bytes() for path in Path("data/smoke/responses").iterdir()} == plain
    assert [path.name for path in Path("data/smoke").iterdir() if path.name.startswith(".")] == []


def test_every_conversation_is_answered(checkout: Path) -> None:
    with served(checkout) as fake:
        run(stage(fake, greedy_probes=3))
        run(stage(fake, greedy_probes=3))
        assert metrics()["answered_turns"] == 0
    answers = {
        (tuple(body["prompt"]), body["seed"] if body["temperature"] else None): words(body) for body in fake.asked
    }
    table = rows()
    assert [row["conversation_id"] for row in table[:90]] == [f"{number:08x}" * 8 for number in range(90)]
    assert [(row["kind"], row["split"]) for row in table[90:]] == [("greedy_probe", "validation")] * 3
    for row in table:
        for turn in whole_turns(row["turns"]):
            seeds = [seed for prompt, seed in answers if list(prompt) == list(turn.prompt_ids)]
            assert turn.token_ids in [answers[tuple(turn.prompt_ids), seed] for seed in seeds]
            assert turn.logprobs == pytest.approx([-i / 100 for i in turn.token_ids])
    turns = [turn for row in table for turn in row["turns"]]
    figures = metrics()
    assert (figures["conversations"], figures["greedy_probes"], figures["turns"]) == (90, 3, len(turns))
    assert figures["tokens"] == sum(len(turn["token_ids"]) for turn in turns)
    assert figures["finished_share"] == sum(turn["token_ids"][-1] == END for turn in turns) / len(turns)


def test_the_datas_answers_are_kept(checkout: Path) -> None:
    with served(checkout) as fake:
        run(stage(fake, mode="keep", greedy_probes=2))
        probed = metrics()
    table = rows()
    assert [row["kind"] for row in table[-3:]] == ["kept", "greedy_probe", "greedy_probe"]
    kept = {row["conversation_id"]: row for row in table[:-2]}
    for number in range(90):
        given = conversation(number)
        messages = json.loads(given["messages"])
        if number % 5 == 0:
            messages.pop()
        if messages:
            row = kept.pop(given["conversation_id"])
            assert (json.loads(row["messages"]), row["turns"]) == (messages, [])
    assert not kept
    assert probed["answered_turns"] == len(fake.asked) == sum(len(row["turns"]) for row in table[-2:])
    assert (probed["conversations"], probed["kept_conversations"], probed["without_answer"]) == (90, 84, 6)


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ({"max_tokens": 1010}, r"90 have no room for an answer in target\.max_model_len"),
        ({"temperature": 0.0}, r"answers loop \(responses\.drop_looped\)"),
    ],
)
def test_nothing_left_is_an_error(checkout: Path, responses: dict[str, Any], message: str) -> None:
    def loop(handler: Any, body: dict[str, Any], number: int) -> bool:
        handler.reply(completion(body, [7] * body["max_tokens"]))
        return True

    with served(checkout) as fake:
        fake.misbehave = loop
        with pytest.raises(EyasError, match="no conversation got an answer; .*" + message):
            run(stage(fake, **responses))
    assert not Path("data/smoke/responses").exists()


def test_what_the_template_refuses_is_set_aside(tmp_path: Path, checkout: Path) -> None:
    refusing = (
        "{% if messages | length > 1 %}{{ raise_exception('One turn at most') }}{% endif %}{{ messages[0].content }}"
    )
    directory = make_tiny_target(tmp_path / "target", chat_template=refusing)
    described = load_profile("smoke").target.model_copy(update={"source": str(directory)})
    write_json_atomic(Path("data/smoke/target.json"), describe_target(described, directory))
    with FakeServer(root=str(directory), max_model_len=1024) as fake:
        begun = stage(fake)
        begun.params = begun.params.model_copy(update={"target": described})
        run(begun)
    assert metrics()["refused_by_template"] == 60 + 5  # five of the eight probes
    lines = [json.loads(line) for line in Path("data/smoke/responses/rejected.jsonl").read_text().splitlines()]
    assert len(lines) == 60 + 5  # five of the eight probes
    assert lines[0] == {"conversation_id": "00000001" * 8, "turn": 1, "reason": "One turn at most"}
    assert {len(row["turns"]) for row in rows()} == {1}
