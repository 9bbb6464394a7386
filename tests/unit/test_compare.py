"""`eyas compare`: words for figures, the gate, what changed, and where the two sides come from."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from eyas.benchmark.statistics import interval, ratio
from eyas.cli import app
from eyas.comparison.judgement import Figure, judge_counts, judge_figures

ROOT = Path(__file__).parents[2]
PLANTED = json.loads((ROOT / "benchmarks" / "benchmark" / "results" / "planted.json").read_text())
SOUND = PLANTED["as trained"]["counts"]["sound"]
WORSE = PLANTED["as trained"]["counts"]["wrong rope base"]
AGAIN = "sound, served again"
FAULTS = [(head, name) for head, found in PLANTED.items() for name in found["verdicts"] if name != AGAIN]
USELESS = {name: [tokens, tokens] for name, (tokens, _) in SOUND.items()}  # nothing accepted
STEPPED = pa.schema(
    [("method", pa.string()), ("set", pa.string()), ("prompt_id", pa.string()), ("step_tokens", pa.list_(pa.int32()))]
)


def figures(counts: dict[str, list[int]]) -> dict[str, float]:
    pairs = [(t, s) for t, s in counts.values()]
    low, high = interval(pairs)
    return {"acceptance_length": ratio(pairs), "acceptance_length_low": low, "acceptance_length_high": high}


def speeds(rate: float) -> dict[str, float]:
    return {"output_tokens_per_s": rate, "output_tokens_per_s_low": rate - 1, "output_tokens_per_s_high": rate + 1}


def write_run(root: Path, counts: dict[str, list[int]], *, rate: float = 40, cpu: str = "A", lr: float = 0.1) -> None:
    folder = root / "metrics" / "smoke"
    (folder / "provenance").mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.json").write_text(json.dumps({"eagle3": figures(counts) | speeds(rate), "sets": {}}))
    provenance = {"machine": {"cpu": cpu}, "params": {"train": {"lr": lr}}, "versions": {"vllm": "1"}}
    (folder / "provenance" / "benchmark.json").write_text(json.dumps(provenance))


def write_outputs(root: Path, counts: dict[str, list[int]]) -> None:
    rows = [
        {"method": "eagle3", "set": "heldout", "prompt_id": name, "step_tokens": [1, t - s + 1, *[1] * (s - 1)]}
        for name, (t, s) in counts.items()
    ]
    (root / "data" / "smoke" / "benchmark").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, STEPPED), root / "data" / "smoke" / "benchmark" / "outputs.parquet")


def write_lock(root: Path, code: str) -> None:
    """A lock whose benchmark outputs are in DVC's cache, as `dvc commit` leaves them."""

    def store(content: bytes, suffix: str = "") -> str:
        name = hashlib.md5(content, usedforsecurity=False).hexdigest() + suffix
        file = root / ".dvc" / "cache" / "files" / "md5" / name[:2] / name[2:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return name

    outputs = (root / "data" / "smoke" / "benchmark" / "outputs.parquet").read_bytes()
    listing = store(json.dumps([{"md5": store(outputs), "relpath": "outputs.parquet"}]).encode(), ".dir")
    (root / "dvc.lock").write_text(
        "schema: '2.0'\nstages:\n  benchmark@smoke:\n    cmd: x\n    deps:\n    - path: src/serve.py\n"
        f"      md5: {code}\n    outs:\n    - path: data/smoke/benchmark\n      md5: {listing}\n"
    )


def git(*arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


def commit(root: Path, counts: dict[str, list[int]]) -> None:
    write_run(root, counts)
    write_outputs(root, counts)
    write_lock(root, "a" * 32)
    git("add", ".")
    git("commit", "-qm", "sound", "--allow-empty")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose one commit is the sound head's run."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".gitignore").write_text("data/\n.dvc/\n")
    git("init", "-q")
    commit(tmp_path, SOUND)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def told(*arguments: str) -> dict[str, Any]:
    code, output = run(*arguments, "--json")
    assert code == 0, output
    answer: dict[str, Any] = json.loads(output)
    return answer


def words(answer: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {line["name"].removeprefix("benchmark.eagle3."): (line["word"], line["how"]) for line in answer["lines"]}


def test_the_same_run_is_not_distinguishable_and_passes(checkout: Path) -> None:
    answer = told("HEAD", "workspace", "--gate")
    assert words(answer)["acceptance_length"] == ("not distinguishable", "paired by prompt")
    assert answer["others"] == {} and answer["regressions"] == []


@pytest.mark.parametrize(
    ("counts", "how"), [(WORSE, "paired by prompt"), (USELESS, "by intervals")], ids=["wrong rope base", "useless"]
)
def test_a_fault_is_worse_and_fails_the_gate(checkout: Path, counts: dict[str, list[int]], how: str) -> None:
    write_run(checkout, counts)
    shutil.rmtree(checkout / "data")
    if how == "paired by prompt":
        write_outputs(checkout, counts)
    assert words(told("HEAD"))["acceptance_length"] == ("worse", how)
    code, output = run("HEAD", "--gate")
    assert code == 1 and "benchmark.eagle3.acceptance_length (worse)" in output.replace("\n", " ")
    # the other way round it is an improvement
    assert run("workspace", "HEAD", "--gate")[0] == 0


@pytest.mark.parametrize(("head", "fault"), FAULTS)
def test_every_planted_fault_is_worse_and_fails_the_gate(checkout: Path, head: str, fault: str) -> None:
    counts = PLANTED[head]["counts"]
    commit(checkout, counts["sound"])
    write_run(checkout, counts[fault])
    write_outputs(checkout, counts[fault])
    assert words(told("HEAD"))["acceptance_length"] == ("worse", "paired by prompt")
    assert PLANTED[head]["verdicts"][fault] == "worse"
    assert run("HEAD", "--gate")[0] == 1


def test_sound_heads_are_not_distinguishable() -> None:
    again = PLANTED["as trained"]
    assert judge_counts(SOUND, again["counts"][AGAIN]).word == again["verdicts"][AGAIN] == "not distinguishable"
    assert judge_counts(SOUND, PLANTED["rescaled"]["counts"]["sound"]).word == "not distinguishable"


def test_speed_is_gated_on_one_machine_only(checkout: Path) -> None:
    write_run(checkout, SOUND, rate=20)
    assert words(told("HEAD"))["output_tokens_per_s"][0] == "worse"
    assert run("HEAD", "--gate")[0] == 1
    write_run(checkout, SOUND, rate=20, cpu="B")
    answer = told("HEAD", "workspace", "--gate")
    assert words(answer)["output_tokens_per_s"] == ("–", "other machine")
    assert answer["changes"]["machine"] == {"cpu": ["A", "B"]}


def test_a_figure_that_is_gone_fails_the_gate(checkout: Path) -> None:
    (checkout / "metrics" / "smoke" / "benchmark.json").write_text('{"plain": {"speedup": 1.0}}')
    code, output = run("HEAD", "--gate")
    assert code == 1 and "missing" in output


def test_it_says_what_changed(checkout: Path) -> None:
    write_run(checkout, SOUND, lr=0.2)
    write_lock(checkout, "b" * 32)
    changes = told("HEAD")["changes"]
    assert changes["params"] == {"train.lr": [0.1, 0.2]}
    assert changes["code"] == {"benchmark": ["src/serve.py"]} and changes["packages"] == {}
    assert "train.lr: 0.1 → 0.2" in run("HEAD")[1]


def test_a_metrics_folder_of_another_machine(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write_run(other, USELESS, cpu="B")
    answer = told("HEAD:smoke", str(other / "metrics" / "smoke"))
    assert words(answer)["acceptance_length"] == ("worse", "by intervals")


@pytest.mark.parametrize("side", ["nowhere", "HEAD:rtx", "workspace:rtx"])
def test_a_side_that_is_not_there(checkout: Path, side: str) -> None:
    code, output = run("HEAD", side)
    assert code == 1 and side in output and "Traceback" not in output


def test_the_checkout_stays_as_it_is(checkout: Path) -> None:
    before = {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file() and ".git" not in p.parts}
    run("HEAD", "workspace")
    assert before == {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file() and ".git" not in p.parts}


def test_intervals_may_touch_and_still_differ() -> None:
    a, b = Figure(1.50, 1.40, 1.60), Figure(1.68, 1.58, 1.78)
    assert judge_figures(a, b).word == "better" and judge_figures(b, a).word == "worse"
    assert judge_figures(a, b, lower_better=True).word == "worse"
    assert judge_figures(a, Figure(1.58, 1.48, 1.68)).word == "not distinguishable"


def test_pairing_leaves_out_prompts_of_one_side() -> None:
    fewer = copy.deepcopy(SOUND)
    fewer.pop(next(iter(fewer)))
    assert judge_counts(SOUND, fewer).word == "not distinguishable"
