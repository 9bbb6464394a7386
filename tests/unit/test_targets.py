import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import TargetParams
from eyas.targets.resolve import chat_template, describe_target, open_target, resolve_target, text_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 320,
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    save_file({"lm_head.weight": np.arange(12, dtype=np.float32)}, directory / "model.safetensors")
    return directory


def params(source: Path | str) -> TargetParams:
    return TargetParams(source=str(source), max_model_len=64)


def refused(source: Path | str) -> str:
    with pytest.raises(EyasError) as caught:
        given = params(source)
        describe_target(given, resolve_target(given))
    return str(caught.value)


def test_a_local_directory(target: Path) -> None:
    described = describe_target(params(target), resolve_target(params(target)))
    assert (described["hidden_size"], described["num_layers"], described["vocab_size"]) == (64, 2, 320)
    assert json.loads(json.dumps(described)) == described


def test_missing_directory(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'}: no such directory" in refused(tmp_path / "none")


def test_unknown_bundled_target_names_the_known() -> None:
    assert "no bundled target `smollm3`; there is smollm2-135m" in refused("bundled:smollm3")


def test_a_hub_id_without_network_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "eyas-test/none could not be had from the hub" in refused("eyas-test/none")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "no *.safetensors weights"),
        ("tokenizer.json", "no chat template"),
    ],
)
def test_a_missing_file_is_named(target: Path, name: str, said: str) -> None:
    (target / name).unlink()
    if name == "tokenizer.json":
        (target / "tokenizer_config.json").write_text("{}")
    assert said in refused(target)


def test_no_tokenizer(target: Path) -> None:
    for file in target.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer files" in refused(target)


@pytest.mark.parametrize("value", [None, "", "  \n", [], [{"name": "tool_use", "template": "x"}]])
def test_no_chat_template(target: Path, value: Any) -> None:
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    said = refused(target)
    assert "no chat template" in said and "chat_template.jinja" in said


def test_where_a_chat_template_may_be(target: Path) -> None:
    assert chat_template(target) == "{{ messages }}"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert chat_template(target) == "yes"
    (target / "chat_template.jinja").write_text("a file of its own")
    assert chat_template(target) == "a file of its own"


def test_sizes_of_a_multimodal_wrapper(target: Path) -> None:
    wrapped = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": CONFIG}
    (target / "config.json").write_text(json.dumps(wrapped))
    assert text_config(target).hidden_size == 64
    (target / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 64}}))
    with pytest.raises(EyasError, match="num_hidden_layers"):
        text_config(target)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("config.json", "config_hash"),
        ("tokenizer.json", "tokenizer_hash"),
        ("model.safetensors", "weights_hash"),
        ("chat_template.jinja", "chat_template_hash"),
    ],
)
def test_a_changed_target_is_noticed(target: Path, tmp_path: Path, name: str, what: str) -> None:
    file = tmp_path / "target.json"
    write_json_atomic(file, describe_target(params(target), target))
    assert open_target(params(target), file)[0] == target
    if name == "config.json":
        (target / name).write_text(json.dumps(CONFIG | {"rope_theta": 1e6}))
    elif name == "model.safetensors":
        save_file({"lm_head.weight": np.arange(1, 13, dtype=np.float32)}, target / name)
    else:
        (target / name).write_text('{"other": true}')
    with pytest.raises(EyasError, match=f"has changed since .*{what}.*prepare"):
        open_target(params(target), file)


def test_moving_a_target_changes_no_hash(target: Path, tmp_path: Path) -> None:
    moved = target.rename(tmp_path / "elsewhere")
    before = describe_target(params("bundled:x"), moved)
    assert before == describe_target(params("bundled:x"), moved.rename(tmp_path / "again"))


def test_the_bundled_target_has_the_expected_bytes() -> None:
    """Converts it once per machine; `resolve_target` itself refuses other hashes."""
    given = TargetParams(source="bundled:smollm2-135m", dtype="float32", max_model_len=1024)
    described = describe_target(given, resolve_target(given))
    assert (described["hidden_size"], described["num_layers"], described["vocab_size"]) == (576, 30, 49152)
    assert described["weights_hash"] == WEIGHTS_HASH


WEIGHTS_HASH = "79b5e8b60ab141786fbc7f7d8c530c349b5e084b1a838da83a72c75be5249953"
