"""Is the head better, and how sure are we: the answer in words.

Takes `Results`; gives a `Verdict` and the extraction checks. On the held-out prompts "better" is the benchmark's word, which
pairs the methods by prompt; on the other sets it needs two 95% intervals that do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eyas.report.results import Comparison, Extraction, Method, Results

_SPEED_NOISE = 0.03  # where speed was measured once and has no interval, a smaller difference is not called one
_LOOPS_WORTH_A_WORD = 0.05


@dataclass(frozen=True)
class Verdict:
    """A headline, and the sentences that carry it."""

    tone: Literal["good", "mixed", "bad"]
    headline: str
    acceptance: str
    speed: str
    cautions: list[str]


@dataclass(frozen=True)
class Check:
    """One figure of the extraction self-check against its threshold."""

    name: str
    meaning: str
    value: float
    threshold: float
    at_least: bool

    @property
    def passed(self) -> bool:
        """Whether the figure is on the right side of its threshold."""
        return self.value >= self.threshold if self.at_least else self.value <= self.threshold


def extraction_checks(extract: Extraction) -> list[Check]:
    """The three figures that show that the recorded hidden states are the target's own."""
    return [
        Check(
            "head_parity",
            "the stored final states pick the target's own greedy token",
            extract.head_parity,
            0.975,
            True,
        ),
        Check(
            "head_parity_ties",
            "the same, near-ties within bfloat16 noise counted",
            extract.head_parity_ties,
            0.998,
            True,
        ),
        Check(
            "logprob_difference",
            "mean distance from the engine's log-probabilities, sampled text",
            extract.logprob_difference,
            0.03,
            False,
        ),
    ]


def interval(method: Method) -> str:
    """``1.48–1.62``."""
    return f"{method.acceptance_length_low:.2f}–{method.acceptance_length_high:.2f}"


def _compare(ours: Method, other: Method) -> Comparison:
    if ours.acceptance_length_low > other.acceptance_length_high:
        return "better"
    if ours.acceptance_length_high < other.acceptance_length_low:
        return "worse"
    return "not distinguishable"


def step_cost(method: Method) -> float:
    """Time of one decoding step in plain steps; also the acceptance length at which the method breaks even."""
    return method.acceptance_length / method.speedup


def _pace(method: Method) -> Literal["faster", "slower", "the same"]:
    low, high = method.speedup_low, method.speedup_high
    if low is None or high is None:
        low, high = method.speedup - _SPEED_NOISE, method.speedup + _SPEED_NOISE
    if low <= 1 <= high:
        return "the same"
    return "faster" if method.speedup > 1 else "slower"


def by_set(results: Results) -> dict[str, Comparison]:
    """The head against n-gram on each set that both have served; the held-out prompts first."""
    others = {
        name: _compare(methods["eagle3"], methods["ngram"])
        for name, methods in results.benchmark.by_set().items()
        if {"eagle3", "ngram"} <= methods.keys()
    }
    return others | {"heldout": results.verdicts.against_ngram}


def drafting(results: Results) -> str:
    """How often the methods draft at all, without which acceptance by position misleads; empty where it was not counted."""
    shares = {
        name: method.drafted_steps / method.target_steps
        for name, method in (("head", results.benchmark.eagle3), ("n-gram", results.benchmark.ngram))
        if method.target_steps and method.drafted_steps is not None
    }
    if len(shares) < 2:
        return ""
    over_all = ", ".join(f"{share:.0%}" for share in results.benchmark.ngram.acceptance_by_position_all_steps.values())
    return f"The head drafts in {shares['head']:.0%} of its steps, n-gram in {shares['n-gram']:.0%}." + (
        f" Over all its steps n-gram has {over_all}." if over_all else ""
    )


def _acceptance(results: Results) -> str:
    eagle, ngram = results.benchmark.eagle3, results.benchmark.ngram
    more = eagle.acceptance_length - ngram.acceptance_length
    amount = f"{abs(more):.2f} tokens ({abs(more) / ngram.acceptance_length:.0%})"
    conclusion = {
        "better": f"That is {amount} more than n-gram, a clear difference when paired by prompt.",
        "worse": f"That is {amount} less than n-gram, a clear difference when paired by prompt.",
        "not distinguishable": f"The difference from n-gram is {more:+.2f} tokens, which is within the noise of these prompts.",
    }[results.verdicts.against_ngram]
    over_plain = (
        "" if results.verdicts.against_plain == "better" else " That is not shown to be more than plain decoding gives."
    )
    return (
        f"With the draft head, one step of the target gives {eagle.acceptance_length:.2f} tokens (95% interval {interval(eagle)}); "
        f"with n-gram {ngram.acceptance_length:.2f} ({interval(ngram)}), in plain decoding 1. {conclusion}{over_plain}"
    )


def _speed(eagle: Method, ngram: Method, plain: Method, k: int) -> str:
    facts = (
        f"Output runs at {eagle.output_tokens_per_s:,.1f} tokens/s against {plain.output_tokens_per_s:,.1f} plain ({eagle.speedup:.2f}×) "
        f"and {ngram.output_tokens_per_s:,.1f} with n-gram ({ngram.speedup:.2f}×). "
    )
    cost = step_cost(eagle)
    work = f"{k} draft step{'s' if k > 1 else ''}, then a check of {k + 1} tokens at once"
    pace = _pace(eagle)
    if pace == "slower":
        return facts + (
            f"The reason: a decoding step with the head ({work}) takes about {cost:.2f} times as long as a plain step, and gives only "
            f"{eagle.acceptance_length:.2f} tokens for it. On this machine, at this load, it pays above {cost:.2f} tokens per step."
        )
    if pace == "faster":
        return facts + (
            f"A decoding step with the head ({work}) takes about {cost:.2f} times as long as a plain step and gives "
            f"{eagle.acceptance_length:.2f} tokens for it."
        )
    return (
        facts
        + f"A decoding step with the head ({work}) takes about {cost:.2f} times as long as a plain step and gives {eagle.acceptance_length:.2f} "
        f"tokens for it. The difference from plain decoding is within the noise of this run."
    )


def _cautions(results: Results) -> list[str]:
    cautions = []
    failed = [check.name for check in extraction_checks(results.extract) if not check.passed]
    if failed:
        cautions.append(
            f"The extraction self-check fails ({', '.join(failed)}): the head was trained on hidden states that are not shown to be the target's."
        )
    eagle = results.benchmark.eagle3
    if eagle.identical_share < 1:
        cautions.append(
            f"Greedy outputs equal plain decoding's for {eagle.identical_share:.1%} of the prompts. Rounding can flip near-ties; "
            "in float32 every prompt should be equal."
        )
    looped = max(method.looped_share or 0.0 for method in (results.benchmark.plain, results.benchmark.ngram, eagle))
    if looped >= _LOOPS_WORTH_A_WORD:
        cautions.append(f"Up to {looped:.1%} of the outputs loop. Loops flatter every method, n-gram most.")
    return cautions


def judge(results: Results, num_speculative_tokens: int) -> Verdict:
    """Say whether the head is better than n-gram and than plain decoding, by how much, and why."""
    bench = results.benchmark
    eagle, ngram, plain = bench.eagle3, bench.ngram, bench.plain
    against_ngram, pace = results.verdicts.against_ngram, _pace(eagle)
    guessing = {
        "better": "predicts better than n-gram",
        "worse": "predicts worse than n-gram",
        "not distinguishable": "is not distinguishable from n-gram",
    }[against_ngram]
    serving = {
        "faster": f"makes serving {eagle.speedup:.2f} times as fast as plain decoding",
        "slower": f"slows serving down to {eagle.speedup:.0%} of plain speed",
        "the same": f"serves at a speed not distinguishable from plain decoding's ({eagle.speedup:.2f}×)",
    }[pace]
    joint = "and" if (against_ngram == "better") == (pace == "faster") else "but"
    headline = f"The draft head {guessing} {joint} {serving}."
    good = (against_ngram == "better", pace == "faster")
    tone: Literal["good", "mixed", "bad"] = "good" if all(good) else "mixed" if any(good) else "bad"
    return Verdict(
        tone,
        headline,
        _acceptance(results),
        _speed(eagle, ngram, plain, num_speculative_tokens),
        _cautions(results),
    )
