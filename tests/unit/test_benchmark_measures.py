"""The numbers and words of the benchmark, from handmade traces."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.benchmark.acceptance import Trace
from eyas.benchmark.losslessness import Difference, difference_rows, find_differences, first_difference
from eyas.benchmark.measures import Noises, by_category, measure
from eyas.benchmark.payoff import advice, best_measured, modelled_k, speed_sentence
from eyas.benchmark.prompts import HELDOUT, Prompt
from eyas.benchmark.results import (
    View,
    acceptance_csv,
    benchmark_metrics,
    noises,
    output_rows,
    speed_verdicts,
    verdicts,
)
from eyas.benchmark.runs import Cell, Repeat, Served
from eyas.benchmark.summary import print_summary
from eyas.errors import EyasError
from eyas.metrics import leaves
from eyas.tables import OUTPUTS, read_table, write_table

NO_NOISE = Noises(None, None)


def timed(trace: Trace, share_s: float, first_s: float = 0.1) -> Trace:
    return replace(trace, first_s=first_s, last_s=first_s + share_s, share_s=share_s)


def plain_trace(tokens: list[int]) -> Trace:
    return Trace(tokens, [1] * len(tokens))


def served(seconds: float, traces: list[Trace], name: str = HELDOUT, repeats: int = 1) -> Served:
    """The same steps each time, a little faster or slower."""
    prompts = [Prompt(name, f"p{i}", [1, 2], "ab"[i % 2]) for i in range(len(traces))]
    again = []
    for repeat in range(repeats):
        wall = seconds * (1 + 0.01 * repeat)
        again.append(Repeat(wall, [timed(t, wall / len(traces)) for t in traces], wall / 10))
    return Served(prompts, again)


FIRST, SECOND = list(range(10)), list(range(20, 27))
PLAIN = [plain_trace(FIRST), plain_trace(SECOND)]
# 4 and 3 target steps for 9 and 6 tokens; the second answer goes another way at token 5
EAGLE3 = [
    Trace(FIRST, [1, 4, 1, 1, 3], [3, 3, 3], [3, 0, 2]),
    Trace([*SECOND[:5], 9, 9], [1, 3, 1, 2], [3] * 3, [2, 0, 1]),
]
TRACES = {"plain": (2.0, PLAIN), "ngram": (4.0, PLAIN), "eagle3": (3.0, EAGLE3)}


def view(repeats: int = 1) -> View:
    runs = {}
    for method, (seconds, traces) in TRACES.items():
        k = 0 if method == "plain" else 3
        for concurrency in (2, 1):
            runs[Cell(method, k, concurrency, HELDOUT)] = served(seconds * concurrency, traces, repeats=repeats)
        runs[Cell(method, k, 2, "birds")] = served(1.0, traces[:1], "birds", repeats)
    return View(runs, list(TRACES), 3, 2)


def numbers(repeats: int = 1) -> dict:
    seen = view(repeats)
    return benchmark_metrics(seen, find_differences(seen.runs), "float32", interleaved=True)


def test_head() -> None:
    m = measure(served(3.0, EAGLE3), served(2.0, PLAIN), 3, NO_NOISE)
    assert m["acceptance_length"] == round(15 / 7, 6)
    assert 2.0 <= m["acceptance_length_low"] <= m["acceptance_length"] <= m["acceptance_length_high"] <= 2.25
    assert (m["tokens"], m["target_steps"], m["drafted_steps"]) == (17, 7, 6)
    assert (m["drafted_tokens"], m["accepted_tokens"]) == (18, 8)
    assert m["acceptance_by_position"] == {"1": round(4 / 6, 6), "2": 0.5, "3": round(1 / 6, 6)}
    assert m["acceptance_by_position_all_steps"] == {"1": round(4 / 7, 6), "2": round(3 / 7, 6), "3": round(1 / 7, 6)}
    assert m["acceptance_by_position_conditional"] == {"1": round(4 / 6, 6), "2": 0.75, "3": round(1 / 3, 6)}
    assert m["acceptance_length_drafted"] == round(1 + 8 / 6, 6)
    assert (m["waste"], m["draft_tokens_per_s"]) == (round(10 / 18, 6), 6.0)
    assert m["output_tokens_per_s"] == round(17 / 3, 6)
    assert m["speedup"] == round(2 / 3, 6)
    assert m["step_cost"] == round((3.0 / 7) / (2.0 / 15), 6)
    assert m["identical_share"] == 0.5


def test_plain_is_one_by_definition() -> None:
    plain = served(2.0, PLAIN)
    m = measure(plain, plain, 0, NO_NOISE)
    assert [m[f"acceptance_length{end}"] for end in ("", "_low", "_high")] == [1.0, 1.0, 1.0]
    assert (m["speedup"], m["step_cost"], m["identical_share"], m["looped_share"]) == (1.0, 1.0, 1.0, 0.0)
    assert m["acceptance_by_position"] == m["acceptance_by_position_conditional"] == {}
    assert "waste" not in m


def test_latency_by_prompt_and_repeat() -> None:
    m = measure(served(2.0, PLAIN), served(2.0, PLAIN), 0, NO_NOISE)
    # one second each, for 9 and 6 tokens behind the first
    assert m["tpot_ms_p50"] == round((1000 / 9 + 1000 / 6) / 2, 6)
    assert m["ttft_ms_p50"] == m["ttft_ms_p99"] == 100.0
    assert m["tpot_ms_p50_low"] <= m["tpot_ms_p50"] <= m["tpot_ms_p50_high"] <= m["tpot_ms_p99"] + 1
    assert m["step_ms_p50"] == 200.0


def test_conditional_asks_only_steps_that_drafted_so_far() -> None:
    short = Trace(list(range(6)), [1, 2, 3], [1, 2], [1, 2])
    m = measure(served(1.0, [short, short]), served(1.0, [short, short]), 3, NO_NOISE)
    assert m["acceptance_by_position"] == {"1": 1.0, "2": 0.5, "3": 0.0}
    assert m["acceptance_by_position_conditional"] == {"1": 1.0, "2": 1.0}


def test_loops_are_counted_and_left_out() -> None:
    loop = Trace([5] * 21, [1, *[4] * 5], [3] * 5, [3] * 5)
    mixed = served(1.0, [EAGLE3[0], loop])
    m = measure(mixed, mixed, 3, NO_NOISE)
    assert (m["looped"], m["looped_share"]) == (1, 0.5)
    assert m["acceptance_length"] == round(29 / 9, 6)
    assert m["acceptance_length_without_loops"] == 2.25
    only = served(1.0, [loop, loop])
    assert "acceptance_length_without_loops" not in measure(only, only, 3, NO_NOISE)


def test_no_step_at_all_is_an_error() -> None:
    empty = served(1.0, [plain_trace([1])])
    with pytest.raises(EyasError, match=r"benchmark\.max_tokens"):
        measure(empty, empty, 3, NO_NOISE)


def test_speed_has_an_interval_from_two_repeats_on() -> None:
    assert "speedup_low" not in numbers(1)["eagle3"]
    m = numbers(3)["eagle3"]
    assert m["speedup_low"] <= m["speedup"] <= m["speedup_high"] < 1  # drift that hits all alike is no noise
    assert m["output_tokens_per_s_low"] < m["output_tokens_per_s"] < m["output_tokens_per_s_high"]
    assert "speedup_low" not in numbers(3)["plain"]
    assert speed_verdicts(view(1))["eagle3 against plain"] == "not distinguishable"
    assert speed_verdicts(view(3)) == {"eagle3 against plain": "worse", "eagle3 against ngram": "better"}


def test_noise_is_pooled_over_cells() -> None:
    noise = noises(view(3).runs)
    assert noise.speed is not None
    assert noise.speedup is not None
    assert (noise.speed.freedom, noise.speedup.freedom) == (18, 12)
    assert noise.speed.sd == pytest.approx(0.01, rel=0.02)
    assert noise.speedup.sd == pytest.approx(0.0, abs=1e-9)  # drift that hits all methods alike is none


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_differences_and_ties() -> None:
    found = find_differences(view().runs)
    assert [(d.method, d.k, d.concurrency, d.set, d.prompt_id, d.position) for d in found] == [
        ("eagle3", 3, 2, HELDOUT, "p1", 5),
        ("eagle3", 3, 1, HELDOUT, "p1", 5),
    ]
    assert (found[0].text, found[0].own, found[0].other) == ([1, 2, *SECOND[:5]], 25, 9)
    close, far = replace(found[0], gap=0.01), replace(found[0], gap=1.0)
    assert [d.tied("float32") for d in (close, far, found[0])] == [False, False, False]
    assert [d.tied("bfloat16") for d in (close, far, found[0])] == [True, False, False]
    rows = difference_rows([close], "auto")
    assert rows[0]["tied"]
    json.dumps(rows, allow_nan=False)
    seen = view()
    metrics = benchmark_metrics(seen, [close, far], "bfloat16", interleaved=True)
    assert (metrics["eagle3"]["differences"], metrics["eagle3"]["differences_tied"]) == (2, 1)
    assert metrics["ngram"]["differences"] == 0


def test_an_answer_that_ends_earlier_has_no_tie() -> None:
    runs = {
        Cell("plain", 0, 1, HELDOUT): served(1.0, [plain_trace(FIRST)]),
        Cell("ngram", 3, 1, HELDOUT): served(1.0, [plain_trace(FIRST[:4])]),
    }
    (found,) = find_differences(runs)
    assert (found.position, found.own, found.other) == (4, 4, None)
    assert not found.tied("bfloat16")


def test_metrics_have_the_agreed_shape() -> None:
    metrics = numbers(2)
    assert set(metrics) == {"plain", "ngram", "eagle3", "sets", "categories", "grid", "interleaved", "repeats"}
    assert set(metrics["sets"]) == {"birds"}
    assert set(metrics["sets"]["birds"]) == {"plain", "ngram", "eagle3"}
    assert {m: {k: list(loads) for k, loads in ks.items()} for m, ks in metrics["grid"].items()} == {
        "plain": {"k0": ["c2", "c1"]},
        "ngram": {"k3": ["c2", "c1"]},
        "eagle3": {"k3": ["c2", "c1"]},
    }
    assert metrics["categories"][HELDOUT]["a"]["eagle3"]["acceptance_length"] == 2.25
    assert all(isinstance(value, int | float) for _, value in leaves(metrics))
    json.dumps(metrics, allow_nan=False)
    assert acceptance_csv(metrics, view()).splitlines() == [
        "position,ngram,eagle3",
        "1,0.0,0.666667",
        "2,0.0,0.5",
        "3,0.0,0.166667",
    ]


def test_one_category_is_none() -> None:
    assert by_category(served(1.0, PLAIN[:1])) == {}
    assert by_category(served(1.0, PLAIN))["a"]["prompts"] == 1


def test_outputs_in_the_order_of_serving_and_without_times(tmp_path: Path) -> None:
    rows = output_rows(view())
    assert [(r["method"], r["set"], r["prompt_id"]) for r in rows[:3]] == [
        ("plain", HELDOUT, "p0"),
        ("plain", HELDOUT, "p1"),
        ("plain", "birds", "p0"),
    ]
    assert rows[-1] == {
        "method": "eagle3",
        "set": "birds",
        "prompt_id": "p0",
        "token_ids": FIRST,
        "step_tokens": [1, 4, 1, 1, 3],
        "drafted": [3, 3, 3],
        "accepted": [3, 0, 2],
    }
    write_table(tmp_path / "outputs.parquet", rows, OUTPUTS)
    assert read_table(tmp_path / "outputs.parquet", OUTPUTS) == rows
    assert output_rows(view(3)) == rows


def test_words() -> None:
    seen, metrics = view(2), numbers(2)
    assert verdicts(seen) == {"eagle3 against plain": "better", "eagle3 against ngram": "better"}
    slow = speed_sentence("eagle3", metrics["eagle3"])
    assert "slows serving down" in slow
    assert "0.67x" in slow
    assert "yields 2.14 tokens" in slow
    assert "pays from an acceptance length of 3.21" in slow
    assert "slows" not in speed_sentence("eagle3", metrics["eagle3"] | {"speedup": 1.2})
    unsure = speed_sentence("eagle3", metrics["eagle3"] | {"speedup_low": 0.5, "speedup_high": 1.1})
    assert "slows" not in unsure
    assert "0.67x (0.50 to 1.10) as fast as plain decoding on this machine, which may be noise" in unsure
    told = advice(seen, metrics)
    assert [sentence.split()[0] for sentence in told] == ["eagle3", "ngram"]
    rows = difference_rows(find_differences(seen.runs), "float32")
    print_summary(metrics, seen.methods, verdicts(seen), speed_verdicts(seen), rows, told)


def cell(speedup: float, length: float, shares: list[float]) -> dict:
    return {
        "speedup": speedup,
        "acceptance_length": length,
        "step_cost": length / speedup,
        "acceptance_by_position": {str(i): share for i, share in enumerate(shares, 1)},
    }


def test_where_it_pays_by_measured_cells() -> None:
    grid = {"k3": {"c8": cell(0.8, 1.5, [0.3, 0.15, 0.05]), "c1": cell(1.2, 1.5, [0.3, 0.15, 0.05])}}
    assert best_measured(grid).concurrency == 1
    seen, metrics = view(), numbers()
    metrics["grid"]["eagle3"] = grid
    assert "with k = 3 at a batch of 1 it does (1.20x, measured)" in advice(seen, metrics)[0]


def test_where_it_pays_by_the_model() -> None:
    """Nearly all acceptance is at position 1, and a step costs 1 + 0.2 k: k = 1 pays where k = 3 does not."""
    grid = {"k3": {"c8": cell(1.52 / 1.6, 1.52, [0.5, 0.02, 0.0])}}
    best = modelled_k(grid, 8)
    assert (best.k, best.speedup) == (1, pytest.approx(1.5 / 1.2))
    seen, metrics = view(), numbers()
    metrics["grid"]["eagle3"] = grid
    assert "modelled from the step's cost, k = 1 at a batch of 8 would give 1.25x" in advice(seen, metrics)[0]


def test_where_nothing_pays() -> None:
    seen, metrics = view(), numbers()
    metrics["grid"]["eagle3"] = {"k2": {"c8": cell(0.4, 1.2, [0.1, 0.1])}}
    said = advice(seen, metrics)[0]
    assert "no measured k and batch size pays" in said
    assert "a batch size of 1 was not measured" in said


def test_a_measured_cost_of_another_k_is_part_of_the_model() -> None:
    grid = {"k1": {"c1": cell(1.4 / 2.0, 1.4, [0.4])}, "k3": {"c1": cell(1.6 / 2.2, 1.6, [0.4, 0.1, 0.1])}}
    # between the measured costs 2.0 and 2.2, k = 2 costs 2.1
    assert modelled_k(grid, 1).speedup == pytest.approx(max(1.4 / 2.0, 1.5 / 2.1, 1.6 / 2.2))


def test_difference_without_a_gap_is_told() -> None:
    row = difference_rows([Difference("ngram", 3, 8, "x", "p", 4, [1], 2, None)], "float32")
    metrics = numbers()
    print_summary(metrics, list(TRACES), verdicts(view()), speed_verdicts(view()), row, [])
