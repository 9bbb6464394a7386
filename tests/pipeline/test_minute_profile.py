"""The real dvc.yaml, end to end, on a tiny random Llama: real vLLM, real training, real serving, real DVC."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from eyas.store.reader import StoreReader
from tests.tiny import make_tiny_target

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("prepare", "respond", "encode", "extract", "vocab", "train", "benchmark", "report")
MINUTE: dict[str, Any] = {
    "target": {"source": "data/input/tiny-target", "dtype": "float32", "max_model_len": 256},
    "dataset": {
        "sources": [{"source": "data/input/chats.jsonl"}],
        "validation_share": 0.25,
        "benchmark_sets": [{"source": "data/input/benchmark.jsonl"}],
    },
    "responses": {"max_tokens": 16, "greedy_probes": 4},
    "extract": {"layers": [1, 2, 3, 4], "shard_mib": 1},
    "vocab": {"draft_vocab_size": 256},
    "draft": {"num_layers": 1},
    "train": {"epochs": 2, "lr": 1.0e-3, "tokens_per_step": 256, "ttt_steps": 2, "autocast": "bfloat16"},
    "benchmark": {
        "num_speculative_tokens": [2],
        "max_tokens": 12,
        "concurrency": [4],
        "repeats": 2,
        "heldout_prompts": 6,
        "prompts_per_set": 2,
    },
}


class Checkout:
    """A clone-like copy of the project in a folder of its own, with only the minute profile active."""

    def __init__(self, folder: Path):
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file() and not name.startswith(("metrics/", "dvc.lock")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        (folder / "dvc.lock").unlink(missing_ok=True)
        make_tiny_target(folder / "data/input/tiny-target")
        names = [
            "bread",
            "cheese",
            "rivers",
            "clocks",
            "trains",
            "maps",
            "glass",
            "stars",
            "wolves",
            "paper",
            "ships",
            "iron",
            "salt",
            "wool",
            "rain",
            "corn",
        ]
        chats = [
            {"messages": [{"role": "user", "content": f"Tell me {how} {name}."}, *(SECOND if i % 3 == 0 else [])]}
            for i, name in enumerate(names)
            for how in ("about", "a story of")
        ]
        write_jsonl(folder / "data/input/chats.jsonl", chats)
        write_jsonl(folder / "data/input/benchmark.jsonl", [{"prompt": f"What is {n} for?"} for n in ("a lamp", "tea")])
        self.set_params(MINUTE)
        self.git("init", "-q")
        self.git("add", "-A")
        self.git("-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "start")

    def set_params(self, profile: dict[str, Any], **others: dict[str, Any]) -> None:
        write_params(self.folder, profile, **others)

    def store(self, profile: str = "minute") -> dict[str, tuple[str, int]]:
        return shards_of(self.folder, profile)

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.folder, check=True)

    def dvc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        command = [sys.executable, "-m", "dvc", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def eyas(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        command = [str(Path(sys.executable).parent / "eyas"), *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def metrics(self, stage: str) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / "metrics/minute" / f"{stage}.json").read_text())
        return values


SECOND = [{"role": "assistant", "content": "It is old."}, {"role": "user", "content": "And then?"}]


def write_params(folder: Path, profile: dict[str, Any], **others: dict[str, Any]) -> None:
    content = {"active": ["minute", *others], "profiles": {"minute": profile, **others}}
    YAML().dump(content, folder / "params.yaml")


def shards_of(folder: Path, profile: str = "minute") -> dict[str, tuple[str, int]]:
    """MD5 and inode of each shard."""
    shards = sorted((folder / f"data/{profile}/hidden_states").glob("shard-*.h5"))
    return {s.name: (hashlib.md5(s.read_bytes()).hexdigest(), s.stat().st_ino) for s in shards}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ran(output: str) -> set[str]:
    """Names of the stages that a `dvc repro` (or its dry run) executed."""
    return {stage for stage in STAGES if f"Running stage '{stage}@minute'" in output}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    made = Checkout(tmp_path_factory.mktemp("checkout"))
    result = made.dvc("repro")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert ran(result.stdout) == set(STAGES)
    yield made


def test_every_stage_leaves_its_metrics_and_provenance(checkout: Checkout) -> None:
    for stage in STAGES:
        assert checkout.metrics(stage), stage
        provenance = json.loads((checkout.folder / f"metrics/minute/provenance/{stage}.json").read_text())
        assert provenance["stage"] == stage
        assert provenance["wall_seconds"] > 0
        assert provenance["versions"]["torch"]


def test_extraction_proved_itself(checkout: Checkout) -> None:
    metrics = checkout.metrics("extract")
    assert metrics["head_parity"] >= 0.975
    assert metrics["head_parity_ties"] >= 0.998
    assert metrics["logprob_difference"] <= 0.03
    assert set(metrics["reference_error"]) == {"1", "2", "3", "4"}
    assert max(metrics["reference_error"].values()) <= 0.02
    store = StoreReader(checkout.folder / "data/minute/hidden_states")
    assert sum(store.lengths) == metrics["tokens"]
    assert len(store.keys) == metrics["rows"]


def test_benchmark_has_the_three_methods(checkout: Checkout) -> None:
    metrics = checkout.metrics("benchmark")
    assert metrics["plain"]["acceptance_length"] == 1.0
    for method in ("plain", "ngram", "eagle3"):
        assert metrics[method]["output_tokens_per_s"] > 0
        assert metrics[method]["identical_share"] == 1.0  # float32: speculation changes nothing


def test_series_and_report_can_be_read(checkout: Checkout) -> None:
    with (checkout.folder / "metrics/minute/train_epochs.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == MINUTE["train"]["epochs"]
    page = (checkout.folder / "data/minute/report/index.html").read_text()
    assert "<html" in page
    shown = checkout.dvc("metrics", "show", "--json", "metrics/minute/extract.json")
    assert shown.returncode == 0 and "head_parity" in shown.stdout
    plots = checkout.dvc("plots", "show", "metrics/minute/train_steps.csv", "-o", "plots")
    assert plots.returncode == 0, plots.stderr


def test_nothing_reruns_without_a_change(checkout: Checkout) -> None:
    assert ran(checkout.dvc("repro").stdout) == set()


def test_a_comment_in_the_report_touches_only_the_report(checkout: Checkout) -> None:
    source = checkout.folder / "stages/report.py"
    before = source.read_text()
    source.write_text(before + "# a remark\n")
    assert ran(checkout.dvc("repro", "--dry").stdout) == {"report"}
    source.write_text(before)


def test_the_benchmark_s_k_does_not_retrain(checkout: Checkout) -> None:
    checkout.set_params(MINUTE | {"benchmark": MINUTE["benchmark"] | {"num_speculative_tokens": [1]}})
    assert ran(checkout.dvc("repro", "--dry").stdout) == {"benchmark", "report"}
    checkout.set_params(MINUTE)


def test_another_profile_with_more_conversations_extracts_only_those(checkout: Checkout) -> None:
    chats = (checkout.folder / "data/input/chats.jsonl").read_text()
    more = [
        {"messages": [{"role": "user", "content": f"Tell me about {name}."}]} for name in ("lamps", "doors", "soap")
    ]
    write_jsonl(checkout.folder / "data/input/more.jsonl", more)
    sources = [{"source": "data/input/more.jsonl"}, {"source": "data/input/chats.jsonl"}]
    second = MINUTE | {"dataset": MINUTE["dataset"] | {"sources": sources}}
    checkout.set_params(MINUTE, second=second)
    result = checkout.dvc("repro", "extract@second")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    first, both = checkout.store(), checkout.store("second")
    assert first.items() < both.items()  # hard links: the same file, not a copy
    assert len(both) == len(first) + 1
    metrics = json.loads((checkout.folder / "metrics/second/extract.json").read_text())
    assert metrics["rows"] == checkout.metrics("extract")["rows"] + len(more)
    probes = 4
    assert metrics["recorded_tokens"] < metrics["tokens"] * (len(more) + 2 * probes) / metrics["rows"]
    shutil.rmtree(checkout.folder / ".work/second")  # as on a machine that only pulled
    assert checkout.dvc("repro", "extract@second").returncode == 0
    assert checkout.store("second") == both
    assert (checkout.folder / "data/input/chats.jsonl").read_text() == chats
    checkout.set_params(MINUTE)


def test_another_layer_starts_afresh_and_says_why(checkout: Checkout) -> None:
    checkout.set_params(MINUTE | {"extract": MINUTE["extract"] | {"layers": [1, 2, 4]}})
    result = checkout.dvc("repro", "extract@minute")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "extraction starts afresh: layers: [1, 2, 3, 4] → [1, 2, 4]" in " ".join(result.stderr.split())
    assert checkout.metrics("extract")["recorded_tokens"] >= checkout.metrics("extract")["tokens"]
    checkout.set_params(MINUTE)
    result = checkout.dvc("repro", "extract@minute")
    assert result.returncode == 0, result.stderr[-4000:]


def test_repair_extracts_again_just_what_is_damaged(checkout: Checkout) -> None:
    before = checkout.store()
    store = checkout.folder / "data/minute/hidden_states"
    victim = max(store.glob("shard-*.h5"), key=lambda shard: shard.stat().st_size)
    assert checkout.eyas("store", "repair", str(store)).returncode == 0  # nothing to do
    victim.chmod(0o644)
    with victim.open("r+b") as stream:  # in place: scratch and DVC's cache are the same file
        stream.seek(victim.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))
    found = checkout.eyas("store", "verify", str(store))
    assert found.returncode == 1
    assert f"{victim.name}, row " in found.stderr
    mended = checkout.eyas("store", "repair", str(store))
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert "1 of " in mended.stderr.replace("2 of", "1 of")
    assert {name: md5 for name, (md5, _) in checkout.store().items()} == {
        name: md5 for name, (md5, _) in before.items()
    }
    assert checkout.eyas("store", "verify", str(store)).returncode == 0
    assert checkout.metrics("extract")["recorded_tokens"] < checkout.metrics("extract")["tokens"] / 4
    assert ran(checkout.dvc("repro", "vocab@minute").stdout) == set()


def test_learning_rate_reruns_train_benchmark_report(checkout: Checkout) -> None:
    checkout.set_params(MINUTE | {"train": MINUTE["train"] | {"lr": 2.0e-3}})
    result = checkout.dvc("repro")
    assert result.returncode == 0, result.stderr[-4000:]
    assert ran(result.stdout) == {"train", "benchmark", "report"}
    checkout.set_params(MINUTE)


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("train", {"epoch": 3}, "unknown parameter; did you mean `epochs`?"),
        ("vocab", {"draft_vocab_size": 513}, "only 512 tokens"),
        ("extract", {"layers": [1, 2, 9]}, "not in 0..4"),
        ("target", {"source": "data/input/nowhere"}, "no such directory"),
        ("dataset", {"sources": [{"source": "data/input/nothing.jsonl"}]}, "nothing.jsonl"),
    ],
)
def test_bad_parameters_stop_with_one_clear_message(
    checkout: Checkout, section: str, change: dict[str, Any], words: str
) -> None:
    checkout.set_params(MINUTE | {section: MINUTE[section] | change})
    stage = {"dataset": "prepare", "target": "prepare"}.get(section, section)
    environment = os.environ | {"PYTHONPATH": str(checkout.folder)}
    command = [sys.executable, "-m", f"stages.{stage}", "minute"]
    outputs = sorted((checkout.folder / "data/minute").iterdir())
    result = subprocess.run(command, cwd=checkout.folder, env=environment, capture_output=True, text=True, check=False)
    checkout.set_params(MINUTE)
    assert result.returncode == 1
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert sorted((checkout.folder / "data/minute").iterdir()) == outputs
