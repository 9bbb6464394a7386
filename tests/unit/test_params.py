import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from eyas.errors import EyasError
from eyas.params import Machine, Profile, load_machine, load_profile

ROOT = Path(__file__).parents[2]
PARAMS = (ROOT / "params.yaml").read_text()


def changed(tmp_path: Path, pattern: str, new: str) -> Path:
    """params.yaml with the first match replaced; smoke is the first profile, and its tuned numbers may change."""
    text, count = re.subn(pattern, new, PARAMS, count=1)
    assert count == 1, pattern
    file = tmp_path / "params.yaml"
    file.write_text(text)
    return file


def message(file: Path, profile: str = "smoke") -> str:
    with pytest.raises(EyasError) as caught:
        load_profile(profile, file)
    return str(caught.value)


def test_every_profile_of_the_checkout_is_valid() -> None:
    for name in YAML(typ="safe").load(PARAMS)["profiles"]:
        assert isinstance(load_profile(name, ROOT / "params.yaml"), Profile)


def test_unknown_profile_names_the_nearest() -> None:
    assert message(ROOT / "params.yaml", "smokey").endswith("no profile `smokey`; did you mean `smoke`?")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "tokens_per_step:",
            "token_per_step:",
            "train.token_per_step: unknown parameter; did you mean `tokens_per_step`?",
        ),
        (
            "draft_vocab_size:",
            "draft_vocab_sise:",
            "vocab.draft_vocab_sise: unknown parameter; did you mean `draft_vocab_size`?",
        ),
        ("    extract:", "    extracts:", "profiles.smoke.extracts: unknown parameter; did you mean `extract`?"),
        ("cap: ", "cup: ", "did you mean `cap`?"),
        ("temperature:", "zzzz:", "responses.zzzz: unknown parameter; known: "),
    ],
)
def test_unknown_parameter_names_the_nearest(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in message(changed(tmp_path, old, new))


def test_a_mistyped_required_parameter_is_also_missing(tmp_path: Path) -> None:
    said = message(changed(tmp_path, "epochs:", "epoch:"))
    assert "train.epochs: missing" in said and "did you mean `epochs`?" in said


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        (r"\blr: \S+", "lr: 0", "profiles.smoke.train.lr"),
        (r"\blr: \S+", "lr: fast", "profiles.smoke.train.lr"),
        (r"layers: \[2, ", "layers: [15, 2, ", "profiles.smoke.extract"),
        (r"codec: \w+", "codec: gzip", "profiles.smoke.extract.codec"),
        (r"validation_share: \S+", "validation_share: 1.0", "profiles.smoke.dataset.validation_share"),
        (r"epochs: \d+", "epochs: 4.5", "profiles.smoke.train.epochs"),
    ],
)
def test_bad_value_names_parameter_and_value(tmp_path: Path, old: str, new: str, where: str) -> None:
    said = message(changed(tmp_path, old, new))
    assert f"params.yaml: {where}" in said and "got" in said


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    file = changed(tmp_path, r"\blr: \S+", "lr: -1")
    file.write_text(re.sub(r"\bmax_turns:", "max_turn:", file.read_text(), count=1))
    assert len(message(file).splitlines()) == 2


def test_missing_file(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "params.yaml")


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\t- x"])
def test_not_yaml(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    assert "not valid YAML" in message(tmp_path / "params.yaml")


@pytest.mark.parametrize("text", ["", "[1, 2]", "profiles: 3", "active: [smoke]"])
def test_no_profiles(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    assert "needs a mapping `profiles`" in message(tmp_path / "params.yaml")


@pytest.mark.parametrize(("written", "value"), [("1e-4", 1e-4), ("1E-4", 1e-4), ("1.0e-04", 1e-4), ("1", 1.0)])
def test_numbers_are_read_as_yaml_1_2(tmp_path: Path, written: str, value: float) -> None:
    """PyYAML, a YAML 1.1 reader, makes the string '1e-4' of the first."""
    assert load_profile("smoke", changed(tmp_path, r"\blr: \S+", f"lr: {written}")).train.lr == value


def test_yes_is_no_boolean_and_octal_no_octal(tmp_path: Path) -> None:
    file = changed(tmp_path, r"source: bundled:\S+", "source: yes")
    assert load_profile("smoke", file).target.source == "yes"
    assert load_profile("smoke", changed(tmp_path, r"cap: \d+", "cap: 010")).dataset.sources[0].cap == 10


@given(st.floats(min_value=1e-12, max_value=1.0, allow_nan=False))
def test_any_float_that_python_writes_is_read_back(value: float) -> None:
    assert YAML(typ="safe").load(f"lr: {value!r}")["lr"] == value


def test_profiles_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_profile("smoke", ROOT / "params.yaml").train.lr = 1.0  # type: ignore[misc]


def test_machine_settings(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    assert load_machine(file) == Machine()
    file.write_text("")
    assert load_machine(file) == Machine()
    file.write_text("tensor_parallel_size: 8\n")
    assert load_machine(file).tensor_parallel_size == 8
    file.write_text("tensor_paralel_size: 8\n")
    with pytest.raises(EyasError, match="did you mean `tensor_parallel_size`"):
        load_machine(file)


def test_the_example_of_machine_settings_is_valid_and_shows_every_one(tmp_path: Path) -> None:
    text = (ROOT / "machine.example.yaml").read_text()
    assert load_machine(ROOT / "machine.example.yaml")
    shown = {line.lstrip("# ").split(":")[0] for line in text.splitlines() if ":" in line}
    assert set(Machine.model_fields) <= shown
