"""The interval covers the truth as often as it says; the verdict is paired by prompt."""

import json
from pathlib import Path

import numpy as np
import pytest

from eyas.benchmark import statistics
from eyas.benchmark.statistics import (
    Noise,
    against,
    interval,
    median_interval,
    noise_of,
    noisy_interval,
    ratio,
    verdict,
)
from eyas.errors import EyasError


def simulated(generator: np.random.Generator, prompts: int, shift: float = 0.0) -> list[tuple[int, int]]:
    """Prompts whose acceptance rates and lengths differ, as real ones do (mean acceptance length 1.6 + 3 * shift)."""
    steps = generator.integers(15, 64, prompts)
    rates = generator.beta(2.0, 8.0, prompts) + shift
    return [(int(s + generator.binomial(3 * s, r)), int(s)) for s, r in zip(steps, rates, strict=True)]


@pytest.mark.parametrize("prompts", [8, 32])
def test_interval_covers_the_truth(prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """95 % within three standard errors of 300 trials (of 1,000 trials 93.3 % at 8 prompts, 95.1 % at 32)."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    generator = np.random.default_rng(1)
    trials = 300
    covered = 0
    for _ in range(trials):
        low, high = interval(simulated(generator, prompts))
        covered += low <= 1.6 <= high
    assert 0.91 <= covered / trials <= 0.99


def test_interval_is_seeded_and_holds_the_ratio() -> None:
    counts = simulated(np.random.default_rng(2), 20)
    low, high = interval(counts)
    assert (low, high) == interval(counts)
    assert low < ratio(counts) < high


def test_interval_narrows_with_prompts() -> None:
    generator = np.random.default_rng(3)
    widths = [high - low for low, high in (interval(simulated(generator, n)) for n in (10, 100, 1000))]
    assert widths[0] > widths[1] > widths[2]


def test_plain_decoding_and_single_prompts_have_no_width() -> None:
    assert interval([(30, 30), (12, 12), (50, 50)]) == (1.0, 1.0)
    assert interval([(30, 20)]) == (1.5, 1.5)


def test_prompts_without_a_step_say_nothing() -> None:
    counts = simulated(np.random.default_rng(4), 10)
    assert interval([*counts, (0, 0)]) == interval(counts)
    assert ratio([*counts, (0, 0)]) == ratio(counts)
    with pytest.raises(EyasError, match=r"benchmark\.max_tokens"):
        interval([(0, 0)])


def test_verdict_in_both_directions() -> None:
    generator = np.random.default_rng(5)
    worse, better = simulated(generator, 32), simulated(generator, 32, shift=0.3)
    assert verdict(better, worse) == "better"
    assert verdict(worse, better) == "worse"
    assert verdict(worse, worse) == "not distinguishable"


def test_verdict_is_paired() -> None:
    """A small gain on every prompt is seen although prompts differ by far more than the gain."""
    base = simulated(np.random.default_rng(6), 40)
    slightly_better = [(t + round(0.06 * s), s) for t, s in base]
    low, high = interval(base)
    assert low < ratio(slightly_better) < high
    assert verdict(slightly_better, base) == "better"


def test_verdict_on_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    generator = np.random.default_rng(7)
    decided = 0
    for _ in range(100):
        decided += verdict(simulated(generator, 32), simulated(generator, 32)) != "not distinguishable"
    assert decided / 100 <= 0.09


def test_verdict_needs_the_same_prompts() -> None:
    with pytest.raises(EyasError, match="same prompts"):
        verdict([(3, 2)], [(3, 2), (4, 2)])
    assert verdict([(9, 3)], [(3, 3)]) == "not distinguishable"


def test_noise_needs_two_repeats_and_is_pooled() -> None:
    assert noise_of([[3.0], [4.0]]) is None
    generator = np.random.default_rng(8)
    rows = [list(rate * np.exp(generator.normal(0, 0.05, 3))) for rate in generator.uniform(10, 1000, 200)]
    noise = noise_of(rows)
    assert noise is not None
    assert (noise.freedom, noise.repeats) == (400, 3)
    assert noise.sd == pytest.approx(0.05, rel=0.1)


def test_speed_s_interval_widens_with_noise() -> None:
    tokens, seconds = [50.0] * 16, list(np.random.default_rng(9).uniform(0.9, 1.1, 16))

    def ends(noise: Noise | None) -> tuple[float, float] | None:
        return noisy_interval((tokens, seconds), lambda t, s: t / s, noise)

    assert ends(None) is None
    quiet, loud, unsure = (ends(n) for n in (Noise(0.001, 20, 3), Noise(0.1, 20, 3), Noise(0.1, 2, 3)))
    assert quiet is not None
    assert loud is not None
    assert unsure is not None
    assert quiet[1] - quiet[0] < loud[1] - loud[0] < unsure[1] - unsure[0]
    assert quiet[0] < sum(tokens) / sum(seconds) < quiet[1]


def test_median_s_interval() -> None:
    values = list(np.random.default_rng(10).exponential(1.0, 40))
    low, high = median_interval(values)
    assert low < float(np.median(values)) < high
    assert median_interval([3.0]) == (3.0, 3.0)


def test_words_of_an_interval() -> None:
    assert [against(ends, 1.0) for ends in ((1.1, 1.2), (0.8, 0.9), (0.9, 1.1), None)] == [
        "better",
        "worse",
        "not distinguishable",
        "not distinguishable",
    ]


RUN = json.loads((Path(__file__).parent / "benchmark_run.json").read_text())
"""A real run (smoke profile, k = 3, 8 prompts at a time, on a busy machine): by method, set and repeat, wall seconds; and by prompt
emitted tokens, target steps, tokens of the answer, seconds of its own."""


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_acceptance_of_real_runs_is_covered(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 24 prompts are drawn from a real one; 95 % of their intervals hold what all prompts together have."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    prompts = np.asarray(RUN[method]["heldout"][0]["prompts"])
    truth = float(prompts[:, 0].sum() / prompts[:, 1].sum())
    generator = np.random.default_rng(11)
    trials = 300
    covered = 0
    for _ in range(trials):
        drawn = prompts[generator.integers(0, len(prompts), 24)]
        low, high = interval([(int(t), int(s)) for t, s, *_ in drawn])
        covered += low <= truth <= high
    assert covered / trials >= 0.91  # 95 % less three standard errors


def rates(method: str, name: str) -> list[float]:
    """Output tokens/s of a set in each repeat."""
    return [sum(p[2] for p in repeat["prompts"]) / repeat["seconds"] for repeat in RUN[method][name]]


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_speed_of_a_repeat_run_is_covered(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is repeated with the differences between repeats that it really had: 95 % of the intervals hold the speed-up of two more."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    cells = [(m, name) for m in ("ngram", "eagle3") for name in RUN[m]]
    logs = {cell: np.log(np.asarray(rates(*cell)) / np.asarray(rates("plain", cell[1]))) for cell in cells}
    halves = np.concatenate([(pair - pair.mean()) * 2**0.5 for pair in logs.values()])
    columns = [
        [sum(RUN[name]["heldout"][i]["prompts"][p][column] for i in (0, 1)) for p in range(32)]
        for name in (method, "plain")
        for column in (2, 3)
    ]
    generator = np.random.default_rng(12)
    trials = 300
    covered = 0
    for _ in range(trials):
        repeats = {cell: np.exp(pair.mean() + generator.choice(halves, 4)) for cell, pair in logs.items()}
        noise = noise_of([list(row[:2]) for row in repeats.values()])
        ours = repeats[method, "heldout"]
        # the prompts' own times, as fast or slow as the two repeats were
        scale = float(np.exp(np.log(ours[:2]).mean() - logs[method, "heldout"].mean()))
        ends = noisy_interval(columns, lambda t, s, plain_t, plain_s: t / s * plain_s / plain_t * scale, noise)  # noqa: B023
        assert ends is not None
        covered += ends[0] <= np.exp(np.log(ours[2:]).mean()) <= ends[1]
    assert covered / trials >= 0.91
