"""The interval covers the truth as often as it says; the verdict is paired by prompt."""

import numpy as np
import pytest

from eyas.benchmark import statistics
from eyas.benchmark.statistics import interval, ratio, verdict
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
