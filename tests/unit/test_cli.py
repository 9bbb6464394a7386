import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.cli import app
from eyas.doctor import Finding
from eyas.metrics import SERIES, STAGES

ROOT = Path(__file__).parents[2]
METRICS: dict[str, dict[str, Any]] = {
    "prepare": {"kept": 400, "train": 360, "validation": 40, "rejected": 7},
    "respond": {"conversations": 400, "tokens": 31_234, "looped_share": 0.041},
    "encode": {"train_rows": 360, "validation_rows": 40, "supervised_tokens": 31_234},
    "extract": {
        "head_parity": 0.99,
        "head_parity_ties": 0.9995,
        "logprob_difference": 0.004,
        "tokens": 65_000,
        "bytes_per_token": 3300.5,
        "tokens_per_s": 2200.0,
    },
    "vocab": {"coverage": 0.9987},
    "train": {"heldout_acceptance_length": 1.61, "tokens_per_s": 350.0},
    "benchmark": {
        name: {
            "acceptance_length": length,
            "acceptance_length_low": length - 0.1 * (length > 1),
            "acceptance_length_high": length + 0.1 * (length > 1),
            "output_tokens_per_s": 100.0 * length,
            "speedup": length,
            "identical_share": 1.0,
        }
        for name, length in {"plain": 1.0, "ngram": 1.2, "eagle3": 1.55}.items()
    },
    "report": {"plots": 4},
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the head and the first profile of the real params.yaml, and that profile again as `rtx`."""
    head, _, rest = (ROOT / "params.yaml").read_text().partition("  smoke:\n")
    profile = rest.split("\n\n")[0].rstrip("\n")
    head = re.sub(r"^active: .*$", "active: [smoke]", head, flags=re.MULTILINE)
    text = f"{head}  smoke:\n{profile}\n\n  # a second one\n  rtx:\n{profile}\n"
    (tmp_path / "params.yaml").write_text(text)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def write_metrics(root: Path, *stages: str) -> None:
    for stage in stages or STAGES:
        folder = root / "metrics" / "smoke"
        (folder / "provenance").mkdir(parents=True, exist_ok=True)
        (folder / f"{stage}.json").write_text(json.dumps(METRICS[stage]))
        (folder / "provenance" / f"{stage}.json").write_text('{"wall_seconds": 12.5, "peak_memory_mib": 900.0}')
    for name, columns in SERIES.items():
        (folder / name).write_text(f"{','.join(columns)}\n{','.join('1' for _ in columns)}\n")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def faults(*arguments: str) -> str:
    code, output = run(*arguments)
    assert code == 1 and "error: " in output and "Traceback" not in output
    return output


def test_help_tells_every_command() -> None:
    code, output = run("--help")
    assert code == 0
    for command in ("doctor", "summary", "activate", "packages", "target", "metrics", "store"):
        assert command in output


@pytest.mark.parametrize(
    "command", ["doctor", "summary", "activate", "packages fetch", "target describe", "metrics check"]
)
def test_every_command_has_help(command: str) -> None:
    code, output = run(*command.split(), "--help")
    assert code == 0 and len(output.splitlines()) > 5


def test_activate_adds_the_profile_and_keeps_every_other_byte(checkout: Path) -> None:
    before = (checkout / "params.yaml").read_text()
    assert run("activate", "rtx")[0] == 0
    after = (checkout / "params.yaml").read_text()
    assert after == before.replace("active: [smoke]", "active: [smoke, rtx]")
    assert run("activate", "rtx")[0] == 0
    assert (checkout / "params.yaml").read_text() == after


def test_activate_keeps_a_block_list_and_its_comments(checkout: Path) -> None:
    file = checkout / "params.yaml"
    file.write_text(file.read_text().replace("active: [smoke]", "active:\n  - smoke # the small one"))
    before = file.read_text()
    run("activate", "rtx")
    assert file.read_text() == before.replace("  - smoke # the small one\n", "  - smoke # the small one\n  - rtx\n")


def test_activate_refuses_an_unknown_or_faulty_profile_and_writes_nothing(checkout: Path) -> None:
    file = checkout / "params.yaml"
    before = file.read_text()
    assert "did you mean `rtx`?" in faults("activate", "rtz")
    assert file.read_text() == before
    file.write_text(re.sub(r"epochs: \d+", "epochs: 0", before))
    assert "rtx.train.epochs" in faults("activate", "rtx")


def test_activate_keeps_comments_beside_the_list(checkout: Path) -> None:
    file = checkout / "params.yaml"
    file.write_text(file.read_text().replace("active: [smoke]", "active: [ smoke ]  # what [this] checkout is about"))
    run("activate", "rtx")
    assert "active: [ smoke, rtx]  # what [this] checkout is about\n" in file.read_text()


def test_activate_refuses_a_list_over_several_lines(checkout: Path) -> None:
    file = checkout / "params.yaml"
    file.write_text(file.read_text().replace("active: [smoke]", "active: [\n  smoke,\n]"))
    assert "on one line" in faults("activate", "rtx")


@pytest.mark.parametrize("line", ["", "active: smoke", "active: []", "active: [1]"])
def test_active_must_list_profiles(checkout: Path, line: str) -> None:
    file = checkout / "params.yaml"
    file.write_text(file.read_text().replace("active: [smoke]", line))
    assert "`active: [smoke]`" in faults("activate", "rtx")


def test_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (
        ["summary"],
        ["metrics", "check"],
        ["activate", "x"],
        ["packages", "fetch"],
        ["target", "describe", "x"],
    ):
        assert "from the root of its checkout" in faults(*command)


def test_summary_shows_the_figures(checkout: Path) -> None:
    write_metrics(checkout)
    code, output = run("summary", "smoke")
    assert code == 0
    for shown in ("31,234", "0.9995", "99.87%", "1.55 (1.45 to 1.65)", "1.55x", "draft head", "100.0"):
        assert shown in output, shown


@pytest.mark.parametrize("count", range(1, len(STAGES)))
def test_summary_of_a_run_that_is_not_finished(checkout: Path, count: int) -> None:
    write_metrics(checkout, *STAGES[:count])
    code, output = run("summary")
    assert code == 0 and STAGES[count - 1] in output


def test_summary_before_any_run(checkout: Path) -> None:
    assert "make repro PROFILE=rtx" in faults("summary", "rtx")


def test_metrics_check_accepts_sound_metrics(checkout: Path) -> None:
    write_metrics(checkout)
    code, output = run("metrics", "check", "smoke")
    assert code == 0 and f"smoke: {len(STAGES) + len(SERIES)} metrics files are sound" in output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": {"b": NaN}}', "a.b is nan"),
        (b'{"a": -Infinity}', "a is -inf"),
        (b'{"a": null}', "a is null"),
        (b'{"a": {"b": [1, 2]}}', "a.b is a list"),
        (b'{"a": 1', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1]", "holds list"),
        ('{"ä": 1}'.encode(), "byte 2 is not ASCII"),
    ],
)
def test_metrics_check_names_file_and_key(checkout: Path, content: bytes, said: str) -> None:
    write_metrics(checkout)
    (checkout / "metrics" / "smoke" / "train.json").write_bytes(content)
    output = faults("metrics", "check", "smoke")
    assert "train.json" in output and said in output


def test_metrics_check_names_all_faults_at_once(checkout: Path) -> None:
    write_metrics(checkout)
    (checkout / "metrics" / "smoke" / "vocab.json").unlink()
    (checkout / "metrics" / "smoke" / "train.json").write_text("{")
    output = faults("metrics", "check")
    assert "vocab.json: missing; `dvc repro vocab@smoke`" in output and "train.json: not valid JSON" in output


def test_target_describe_prints_what_target_json_holds() -> None:
    code, output = run("target", "describe", "smoke")
    assert code == 0 and json.loads(output)["hidden_size"] == 576


def test_doctor_finds_this_environment_fit() -> None:
    code, output = run("doctor")
    assert code == 0 and "as locked" in output


def test_doctor_fails_on_a_fault_but_not_on_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(verdict: Any) -> Any:
        return lambda: [Finding("disk", verdict, "1 GiB [free] here")]

    monkeypatch.setattr("eyas.cli.examine", one("advice"))
    assert run("doctor") == (0, run("doctor")[1])
    monkeypatch.setattr("eyas.cli.examine", one("fault"))
    output = faults("doctor")
    assert "not fit to run: disk" in output and "[free]" in output
