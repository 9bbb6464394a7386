"""A real vLLM server and the engine in a process, on the same greedy prompts: the same answers and the same counts.

The target is the tiny one; n-grams draft, then an EAGLE-3 head. One server and one engine start for each, which takes minutes.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from eyas.benchmark.acceptance import count
from eyas.benchmark.endpoint import endpoint_metrics, serve_sets
from eyas.benchmark.methods import Method
from eyas.benchmark.process import EngineProcess, Setting
from eyas.benchmark.prompts import Prompt
from eyas.cli import app
from eyas.drafting.heads import export, make_head
from eyas.errors import EyasError
from eyas.extraction.server import open_server
from eyas.files import write_json_atomic
from eyas.params import DraftParams, Machine, TargetParams
from eyas.stage import process_environment
from eyas.tables import CONVERSATIONS, PROMPTS, write_table
from eyas.targets.resolve import describe_target
from eyas.vocabulary import choose
from tests.real_server import free_port, running
from tests.tiny import VOCAB, make_tiny_target, tiny_profile

K, MAX_TOKENS, CONCURRENCY = 2, 24, 4
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target") / "tiny"
    make_tiny_target(directory)
    return directory


def some_prompts() -> list[Prompt]:
    chosen = random.Random(0)
    prompts = []
    for index in range(10):
        pattern = [chosen.randrange(3, VOCAB) for _ in range(8)]
        prompts.append(Prompt("ab"[index >= 6], f"p{index}", (pattern * 3)[: 12 + index]))
    return prompts


@pytest.fixture(scope="module", params=["ngram", "eagle3"])
def drafter(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM is told; the head is not trained, and guesses a token now and then."""
    if request.param == "ngram":
        return NGRAM
    head = tmp_path_factory.mktemp("head")
    vocabulary = choose(np.zeros(VOCAB, dtype=np.int64), None, [0])
    export(make_head(DraftParams(), target, "tiny", vocabulary, [1, 2, 3, 4], ttt_steps=K, seed=0), head)
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": K}


@pytest.fixture(scope="module")
def server(target: Path, drafter: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "128"]
    command += ["--enforce-eager", "--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--seed", "0"]
    command += ["--max-num-seqs", str(CONCURRENCY), "--speculative-config", json.dumps(drafter)]
    environment = os.environ | process_environment(Machine(cpu_kv_cache_gib=1))
    with running(command, port, tmp_path_factory.mktemp("server"), environment) as url:
        yield url


def test_the_server_s_counts_are_the_engine_s(
    target: Path, server: str, drafter: dict[str, Any], tmp_path: Path
) -> None:
    params = TargetParams.model_validate({"source": str(target), "dtype": "float32", "max_model_len": 128})
    machine, prompts = Machine(cpu_kv_cache_gib=1), some_prompts()
    opened = open_server(server, machine, params, target)
    asked = {"max_tokens": MAX_TOKENS, "concurrency": CONCURRENCY}
    served = serve_sets(opened, prompts, k=K, **asked)
    with pytest.raises(EyasError, match="drafts 2 tokens a step, not 5"):
        serve_sets(opened, prompts, k=5, **asked)

    os.environ.update(process_environment(machine))
    setting = Setting(target, params, machine, prompts, MAX_TOKENS, [CONCURRENCY], tmp_path, tmp_path / "engine.log")
    with EngineProcess(Method(drafter["method"], K, drafter), setting) as engine:
        engine.wait()
        accepted = 0
        for name, of_server in served.items():
            index = [i for i, p in enumerate(prompts) if p.set == name]
            traces = engine.serve(index, CONCURRENCY, lambda: None).traces
            assert [a.token_ids for a in of_server.answers] == [t.token_ids for t in traces]
            assert asdict(of_server.counters.speculation) == asdict(count(traces, K))
            assert of_server.counters.speculation.drafted_steps > 0
            accepted += of_server.counters.speculation.accepted_tokens
            figures = endpoint_metrics(
                of_server, {p.prompt_id: t.token_ids for p, t in zip(of_server.prompts, traces, strict=True)}
            )
            assert figures["identical_share"] == 1.0
            assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"]
        assert accepted > 0
        # the same token against itself, and against another
        text = prompts[0].token_ids
        own = engine.serve([0], 1, lambda: None).traces[0].token_ids[0]
        gaps = engine.gaps(
            [{"text": text, "own": own, "other": own}, {"text": text, "own": own, "other": (own + 1) % VOCAB}]
        )
        assert gaps[0] == 0.0
        assert gaps[1] > 0.01


def test_the_command_measures_a_profile_s_prompts(
    target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = tiny_profile(str(target))
    Path("params.yaml").write_text(json.dumps({"active": ["tiny"], "profiles": {"tiny": profile}}))
    data = Path("data") / "tiny"
    write_json_atomic(data / "target.json", describe_target(TargetParams.model_validate(profile["target"]), target))
    said = ["Why do eagles fly", "What is a hood", "How many days has a week", "Who weighs the bird", "Say 1, 2, 3"]
    rows = [
        {
            "conversation_id": f"c{i}",
            "split": "validation",
            "source": "chats",
            "messages": json.dumps([{"role": "user", "content": text}]),
            "tools": "[]",
        }
        for i, text in enumerate(said)
    ]
    write_table(data / "conversations" / "conversations.parquet", rows, CONVERSATIONS)
    birds = [
        {"set": "birds", "prompt_id": f"b{i}", "category": "x", "turns": [text[::-1]]} for i, text in enumerate(said)
    ]
    write_table(data / "conversations" / "prompts.parquet", birds, PROMPTS)
    asked = CliRunner().invoke(
        app, ["benchmark", "--endpoint", server, "--profile", "tiny", "--name", "mine", "--k", str(K)]
    )
    assert asked.exit_code == 0, asked.output
    assert "mine: k = 2, 4 prompts at a time" in asked.output
    written = json.loads((Path(".work") / "tiny" / "endpoint" / "mine.json").read_text())
    assert {name: figures["prompts"] for name, figures in written["sets"].items()} == {"heldout": 5, "birds": 2}
    assert written["sets"]["heldout"]["output_tokens_per_s"] > 0
    refused = CliRunner().invoke(app, ["benchmark", "--endpoint", server, "--profile", "tiny", "--name", "../x"])
    assert refused.exit_code == 1
