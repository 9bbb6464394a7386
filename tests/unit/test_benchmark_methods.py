"""What is told to vLLM, who serves when, and what is said when an engine's process fails."""

import json
import sys
from pathlib import Path

import pytest

from eyas.benchmark.methods import EAGLE3, Method, method_names, methods
from eyas.benchmark.process import EngineProcess, Setting
from eyas.benchmark.prometheus import read_counters
from eyas.benchmark.prompts import HELDOUT, Prompt
from eyas.benchmark.rounds import _cells, engines_at_a_time, sharing
from eyas.errors import EyasError
from eyas.params import BenchmarkParams, Machine, TargetParams

BASE = {"max_tokens": 10, "concurrency": [4, 1], "heldout_prompts": 2, "prompts_per_set": 1}


def params(**more: object) -> BenchmarkParams:
    return BenchmarkParams.model_validate(BASE | more)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    return tmp_path / "head"


def setting(tmp_path: Path, machine: Machine | None = None) -> Setting:
    prompts = [Prompt(HELDOUT, "a", [1]), Prompt(HELDOUT, "b", [1]), Prompt("birds", "c", [1])]
    target = TargetParams.model_validate({"source": "x", "max_model_len": 64})
    return Setting(tmp_path, target, machine or Machine(), prompts, 8, [4, 1], tmp_path, tmp_path / "benchmark.log")


def test_every_method_with_every_k(head: Path) -> None:
    found = methods(params(num_speculative_tokens=[3, 5]), head)
    assert [m.label for m in found] == ["plain", "ngram-k3", "ngram-k5", "eagle3-k3", "eagle3-k5"]
    assert found[1].speculative == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    assert found[-1].speculative == {"method": "eagle3", "model": str(head), "num_speculative_tokens": 5}


def test_references_are_resolved_as_targets_are(head: Path) -> None:
    given = params(references=[{"name": "published", "source": str(head), "method": "eagle"}])
    assert method_names(given) == ["plain", "ngram", "published", "eagle3"]
    assert methods(given, head)[2].speculative == {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    with pytest.raises(EyasError, match=r"benchmark\.references, gone: /nowhere/at/all: no such directory"):
        methods(params(references=[{"name": "gone", "source": "/nowhere/at/all"}]), head)


def test_suffix_decoding_wants_its_package(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    with pytest.raises(EyasError, match="needs the package arctic-inference"):
        methods(params(suffix=True), head)


def test_a_missing_head_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="train stage"):
        methods(params(), tmp_path / "draft_head")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_speculative_tokens": [3, 3]}, "distinct"),
        ({"num_speculative_tokens": []}, "at least 1"),
        ({"concurrency": [0]}, "greater than or equal to 1"),
        ({"concurrency": 8}, "valid list"),
        ({"references": [{"name": "ngram", "source": "x"}]}, "name of something else"),
        ({"references": [{"name": "sets", "source": "x"}]}, "name of something else"),
        ({"references": [{"name": "A b", "source": "x"}]}, "pattern"),
        ({"ngram_lookup_min": 5}, "ngram_lookup_max"),
    ],
)
def test_wrong_parameters(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        params(**wrong)


def test_benchmark_sets_are_served_at_the_main_k_and_concurrency(tmp_path: Path) -> None:
    head3, head5 = Method(EAGLE3, 3, {}), Method(EAGLE3, 5, {})
    assert [(c.concurrency, c.set, index) for c, index in _cells(head3, setting(tmp_path), 3)] == [
        (4, HELDOUT, [0, 1]),
        (1, HELDOUT, [0, 1]),
        (4, "birds", [2]),
    ]
    assert [(c.concurrency, c.set) for c, _ in _cells(head5, setting(tmp_path), 3)] == [(4, HELDOUT), (1, HELDOUT)]


def test_how_many_engines_live_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.benchmark.rounds.on_cpu_engine", lambda: True)
    assert engines_at_a_time(setting(tmp_path), 5) == 5
    assert engines_at_a_time(setting(tmp_path, Machine(benchmark_engines=2)), 5) == 2
    assert sharing(setting(tmp_path), 5) == setting(tmp_path)
    monkeypatch.setattr("eyas.benchmark.rounds.on_cpu_engine", lambda: False)
    assert engines_at_a_time(setting(tmp_path), 5) == 1
    assert engines_at_a_time(setting(tmp_path, Machine(benchmark_engines=8)), 5) == 5
    assert sharing(setting(tmp_path), 3).machine.gpu_memory_utilization == pytest.approx(0.3)


def test_a_failing_process_is_named_with_its_log(tmp_path: Path) -> None:
    """A real process, given a target that breaks it before any engine starts."""
    broken = setting(tmp_path).__class__(**{**setting(tmp_path).__dict__, "concurrency": []})
    with (
        EngineProcess(Method("ngram", 2, None), broken) as engine,
        pytest.raises(EyasError, match=r"benchmark, ngram-k2: .*status 1.*benchmark\.ngram-k2\.log"),
    ):
        engine.wait()
    assert "ValueError" in (tmp_path / "benchmark.ngram-k2.log").read_text()
    assert json.loads((tmp_path / "ngram-k2.request.json").read_text())["k"] == 2


PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 0.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.2e+03
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 4.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
"""


def test_counters_of_a_server_s_page() -> None:
    found = read_counters(PAGE, "here")
    assert (found.positions, found.answers, found.tokens) == (3, 7, 1200)
    assert (found.speculation.drafted_steps, found.speculation.drafted_tokens) == (12, 36)
    assert found.speculation.accepted_by_position == [6, 3, 0]
    assert (found - found).speculation.accepted_by_position == [0, 0, 0]
    plain = read_counters("vllm:generation_tokens_total 5\nvllm:request_success_total 1\n", "here")
    assert (plain.positions, plain.speculation.drafted_steps) == (0, 0)
    with pytest.raises(EyasError, match="here: no vLLM counters"):
        read_counters("<html>", "here")
