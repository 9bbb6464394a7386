"""The numbers of ``benchmark.json`` from handmade traces, and what is said of them."""

import json
from pathlib import Path

import pytest

from eyas.benchmark.acceptance import Trace
from eyas.benchmark.measures import (
    acceptance_csv,
    benchmark_metrics,
    differences,
    first_difference,
    measure,
    output_rows,
    verdicts,
)
from eyas.benchmark.methods import Served, run_process, serve_methods, speculative_configs
from eyas.benchmark.prompts import HELDOUT, Prompt
from eyas.benchmark.summary import print_summary, speed_sentence
from eyas.errors import EyasError
from eyas.params import BenchmarkParams, Machine, TargetParams

PARAMS = BenchmarkParams.model_validate(
    {"max_tokens": 10, "concurrency": 2, "heldout_prompts": 2, "prompts_per_set": 1}
)


def plain_trace(tokens: list[int]) -> Trace:
    return Trace(tokens, [1] * len(tokens))


def served(seconds: float, traces: list[Trace], name: str = HELDOUT) -> Served:
    return Served(seconds, [Prompt(name, f"p{i}", [1, 2]) for i in range(len(traces))], traces)


FIRST, SECOND = list(range(10)), list(range(20, 27))
PLAIN = served(2.0, [plain_trace(FIRST), plain_trace(SECOND)])
NGRAM = served(4.0, [plain_trace(FIRST), plain_trace(SECOND)])
# 4 and 3 target steps for 9 and 6 tokens; the second answer goes another way at token 5
EAGLE3 = served(
    3.0,
    [Trace(FIRST, [1, 4, 1, 1, 3], [3, 3, 3], [3, 0, 2]), Trace([*SECOND[:5], 9, 9], [1, 3, 1, 2], [3] * 3, [2, 0, 1])],
)
RUNS = {
    method: {HELDOUT: heldout, "birds": served(1.0, heldout.traces[:1], "birds")}
    for method, heldout in {"plain": PLAIN, "ngram": NGRAM, "eagle3": EAGLE3}.items()
}


def test_head() -> None:
    m = measure(EAGLE3, PLAIN, 3)
    assert m["acceptance_length"] == round(15 / 7, 6)
    assert 2.0 <= m["acceptance_length_low"] <= m["acceptance_length"] <= m["acceptance_length_high"] <= 2.25
    assert (m["tokens"], m["target_steps"], m["drafted_steps"]) == (17, 7, 6)
    assert (m["drafted_tokens"], m["accepted_tokens"]) == (18, 8)
    assert m["acceptance_by_position"] == {"1": round(4 / 6, 6), "2": 0.5, "3": round(1 / 6, 6)}
    assert m["acceptance_by_position_all_steps"] == {"1": round(4 / 7, 6), "2": round(3 / 7, 6), "3": round(1 / 7, 6)}
    assert m["output_tokens_per_s"] == round(17 / 3, 6)
    assert m["speedup"] == round(2 / 3, 6)
    assert m["step_cost"] == round((3.0 / 7) / (2.0 / 15), 6)
    assert m["identical_share"] == 0.5


def test_plain_is_one_by_definition() -> None:
    m = measure(PLAIN, PLAIN, 3)
    assert [m[f"acceptance_length{end}"] for end in ("", "_low", "_high")] == [1.0, 1.0, 1.0]
    assert (m["speedup"], m["step_cost"], m["identical_share"], m["looped_share"]) == (1.0, 1.0, 1.0, 0.0)
    assert m["acceptance_by_position"] == {}


def test_loops_are_counted_and_left_out() -> None:
    loop = Trace([5] * 21, [1, *[4] * 5], [3] * 5, [3] * 5)
    mixed = served(1.0, [EAGLE3.traces[0], loop])
    m = measure(mixed, mixed, 3)
    assert m["looped_share"] == 0.5
    assert m["acceptance_length"] == round(29 / 9, 6)
    assert m["acceptance_length_without_loops"] == 2.25
    only = served(1.0, [loop, loop])
    assert "acceptance_length_without_loops" not in measure(only, only, 3)


def test_no_step_at_all_is_an_error() -> None:
    with pytest.raises(EyasError, match=r"benchmark\.max_tokens"):
        measure(served(1.0, [plain_trace([1])]), served(1.0, [plain_trace([1])]), 3)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert differences(RUNS) == [{"method": "eagle3", "set": HELDOUT, "prompt_id": "p1", "position": 5}]


def test_metrics_have_the_agreed_shape() -> None:
    metrics = benchmark_metrics(RUNS, 3)
    assert set(metrics) == {"plain", "ngram", "eagle3", "sets"}
    assert set(metrics["sets"]) == {"birds"}
    assert set(metrics["sets"]["birds"]) == {"plain", "ngram", "eagle3"}
    json.dumps(metrics, allow_nan=False)
    assert acceptance_csv(metrics, 3).splitlines() == [
        "position,ngram,eagle3",
        "1,0.0,0.666667",
        "2,0.0,0.5",
        "3,0.0,0.166667",
    ]


def test_outputs_in_the_order_of_serving() -> None:
    rows = output_rows(RUNS)
    assert [(r["method"], r["set"], r["prompt_id"]) for r in rows[:3]] == [
        ("plain", HELDOUT, "p0"),
        ("plain", HELDOUT, "p1"),
        ("plain", "birds", "p0"),
    ]
    assert rows[-1]["token_ids"] == FIRST


def test_words() -> None:
    metrics = benchmark_metrics(RUNS, 3)
    assert verdicts(RUNS) == {"eagle3 against plain": "better", "eagle3 against ngram": "better"}
    slow = speed_sentence("eagle3", metrics["eagle3"])
    assert "slows serving down" in slow
    assert "0.67x" in slow
    assert "yields 2.14 tokens" in slow
    assert "pays from an acceptance length of 3.21" in slow
    assert "slows" not in speed_sentence("eagle3", metrics["eagle3"] | {"speedup": 1.2})
    print_summary(metrics, verdicts(RUNS), differences(RUNS))


def test_methods() -> None:
    assert speculative_configs(PARAMS, Path("head")) == {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "eagle3": {"method": "eagle3", "model": "head", "num_speculative_tokens": 3},
    }


def test_a_missing_head_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="train stage"):
        serve_methods(
            tmp_path,
            tmp_path / "draft_head",
            PLAIN.prompts,
            target=TargetParams.model_validate({"source": "x", "max_model_len": 64}),
            params=PARAMS,
            machine=Machine(),
            work=tmp_path,
            log=tmp_path / "benchmark.log",
        )


def test_a_failing_process_is_named_with_its_log(tmp_path: Path) -> None:
    """A real process, given a request that breaks it before any engine starts."""
    request, log = tmp_path / "ngram.request.json", tmp_path / "benchmark.ngram.log"
    request.write_text(json.dumps({"method": "ngram", "log": str(log)}))
    with pytest.raises(EyasError, match=r"benchmark, ngram: .*status 1.*benchmark\.ngram\.log"):
        run_process(request, tmp_path / "result.json", log, "ngram")
    assert "KeyError" in log.read_text()
