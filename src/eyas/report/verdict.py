"""Is the head better, and how sure are we: the answer in words.

Takes `Results`; gives a `Verdict` and the extraction checks. On the held-out prompts "better" is the benchmark's word, which
pairs the methods by prompt; on the other sets it needs two 95% intervals that do not overlap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from eyas.report.results import EAGLE3, HELDOUT, PLAIN, Acceptance, Comparison, Extraction, Method, Results

_SPEED_NOISE = 0.03  # where speed was measured once and has no interval, a smaller difference is not called one
_LOOPS_WORTH_A_WORD = 0.05
_NAMES = {"plain": "plain", "ngram": "n-gram", "suffix": "suffix", "eagle3": "draft head"}
_SUBJECTS = {"ngram": "N-gram", "suffix": "Suffix decoding", "eagle3": "The draft head"}


@dataclass(frozen=True)
class Verdict:
    """A headline, and the sentences that carry it; ``others`` has one for each method besides plain decoding and n-gram."""

    tone: Literal["good", "mixed", "bad"]
    headline: str
    acceptance: str
    others: list[str]
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


def name_of(method: str) -> str:
    """What the page calls a method; a reference has its own name."""
    return _NAMES.get(method, method)


def interval(method: Acceptance) -> str:
    """``1.48–1.62``."""
    return f"{method.acceptance_length_low:.2f}–{method.acceptance_length_high:.2f}"


def _compare(ours: Method, other: Method) -> Comparison:
    if ours.acceptance_length_low > other.acceptance_length_high:
        return "better"
    if ours.acceptance_length_high < other.acceptance_length_low:
        return "worse"
    return "not distinguishable"


def _pace(method: Method) -> Literal["faster", "slower", "the same"]:
    low, high = method.speedup_low, method.speedup_high
    if low is None or high is None:
        low, high = method.speedup - _SPEED_NOISE, method.speedup + _SPEED_NOISE
    if low <= 1 <= high:
        return "the same"
    return "faster" if method.speedup > 1 else "slower"


def _rivals(results: Results) -> list[str]:
    """The other methods that draft."""
    return [name for name in results.methods if name not in (PLAIN, EAGLE3)]


def by_set(results: Results) -> dict[str, dict[str, Comparison]]:
    """The head against each other method that drafts, on each set that both have served; the held-out prompts first."""
    rivals = _rivals(results)
    others = {
        name: {rival: _compare(methods[EAGLE3], methods[rival]) for rival in rivals if rival in methods}
        for name, methods in results.by_set().items()
        if EAGLE3 in methods
    }
    return others | {HELDOUT: {rival: results.verdicts.against(rival) for rival in rivals}}


def drafting(results: Results) -> str:
    """How often the methods draft at all, without which acceptance by position misleads; empty where it was not counted."""
    heldout = results.by_set()[HELDOUT]
    shares = {
        name: method.drafted_steps / method.target_steps
        for name, method in ((name, heldout[name]) for name in (EAGLE3, *_rivals(results)))
        if method.target_steps and method.drafted_steps is not None
    }
    if EAGLE3 not in shares or len(shares) < 2:
        return ""
    others = ", ".join(f"{name_of(name)} in {share:.0%}" for name, share in shares.items() if name != EAGLE3)
    over_all = ", ".join(f"{share:.0%}" for share in results.benchmark.ngram.acceptance_by_position_all_steps.values())
    return f"The head drafts in {shares[EAGLE3]:.0%} of its steps, {others}." + (
        f" Over all its steps n-gram has {over_all}." if over_all else ""
    )


def advice(results: Results) -> list[str]:
    """The benchmark's advice, with the methods named as on the page: which of them pays, why, and where it would."""
    told = []
    for sentence in results.advice:
        method, _, rest = sentence.partition(" ")
        # the terminal's x is a multiplication sign here
        told.append(re.sub(r"(?<=\d)x\b", "×", f"{_SUBJECTS.get(method, method)} {rest}."))
    return told


def _others(results: Results) -> list[str]:
    ours = results.benchmark.eagle3
    told = []
    for name in results.methods[2:-1]:
        other: Method = getattr(results.benchmark, name)
        word = {
            "better": "the head predicts better",
            "worse": "the head predicts worse",
            "not distinguishable": "the two are not distinguishable",
        }[results.verdicts.against(name)]
        told.append(
            f"Against {'suffix decoding' if name == 'suffix' else name}: {word}, "
            f"{ours.acceptance_length:.2f} tokens per step against {other.acceptance_length:.2f} ({interval(other)}), "
            f"{ours.output_tokens_per_s:,.1f} tokens/s against {other.output_tokens_per_s:,.1f}."
        )
    return told


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
    cost = eagle.step_cost
    work = f"{k} draft step{'s' if k > 1 else ''}, then a check of {k + 1} tokens at once"
    pace = _pace(eagle)
    if pace == "slower":  # why, and where it would pay, is the first caution
        return facts
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
    if _pace(results.benchmark.eagle3) == "slower":
        cautions.append(advice(results)[0])  # the head's own
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
    looped = max(method.looped_share or 0.0 for method in results.by_set()[HELDOUT].values())
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
        _others(results),
        _speed(eagle, ngram, plain, num_speculative_tokens),
        _cautions(results),
    )
