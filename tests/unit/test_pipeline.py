"""dvc.yaml says what each stage really depends on: modules, parameters, packages; checked against the code itself."""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from eyas.params import Profile
from tests.pipeline.test_reruns import ROWS

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("prepare", "respond", "encode", "extract", "vocab", "train", "benchmark", "report")
# Packages whose version changes a stage's bytes, by the top-level name that its code imports.
PACKAGES = {
    "vllm": "vllm",
    "torch": "torch",
    "transformers": "transformers",
    "speculators": "speculators",
    "h5py": "h5py",
    "hdf5plugin": "hdf5plugin",
    "zstandard": "zstandard",
    "tokenizers": "tokenizers",
    "matplotlib": "matplotlib",
    "jinja2": "jinja2",
    "gguf": "gguf",
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "datasets": "datasets",
    "rensa": "rensa",
}
# Those that change no byte of an output; a package that is in neither list must be thought about.
SILENT = {
    "isal": "computes zlib's CRC-32",
    "huggingface_hub": "brings files that are checked by hash",
    "markupsafe": "marks text for jinja2",
    "openai": "speaks HTTP to a server whose engine decides",
    "pydantic": "validates parameters",
    "rich": "prints",
    "ruamel": "reads parameters",
    "safetensors": "writes a format that does not change",
    "triton": "comes with torch, whose version decides",
}


def declared(stage: str) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"][stage]["do"]
    return content


@cache
def module_file(name: str) -> Path | None:
    path = ROOT / "src" / Path(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


@cache
def imports(file: Path) -> tuple[frozenset[Path], frozenset[str]]:
    """First-party files and third-party top-level names that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"eyas(\.\w+)+", node.value)
        ):
            names.add(node.value)  # a module that is named to vLLM or run as a child process
    own = {found for name in names if name.startswith("eyas") and (found := module_file(name))}
    return frozenset(own), frozenset(name.split(".")[0] for name in names if not name.startswith("eyas"))


def closure(stage: str) -> tuple[set[Path], set[str]]:
    """All first-party files that a stage imports, and the third-party packages that these import."""
    todo, files, packages = {ROOT / "stages" / f"{stage}.py"}, set[Path](), set[str]()
    while todo:
        file = todo.pop()
        files.add(file)
        own, others = imports(file)
        packages |= others
        todo |= set(own) - files
    templates = {t for file in files for t in file.parent.glob("*.j2")}
    empty = {f for f in files if f.name == "__init__.py" and not has_code(f)}
    return (files | templates) - empty, packages


def has_code(file: Path) -> bool:
    body = ast.parse(file.read_text()).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)


def locked_keys(stage: str) -> list[str]:
    return [key for p in declared(stage).get("params", []) if isinstance(p, dict) for key in p["locks/env.json"]]


def test_stages_are_the_known_ones() -> None:
    assert tuple(YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_declared_modules_are_the_imported_ones(stage: str) -> None:
    files, _ = closure(stage)
    imported = {str(f.relative_to(ROOT)) for f in files}
    deps = {d for d in declared(stage)["deps"] if d.endswith((".py", ".j2"))}
    assert deps == imported


@pytest.mark.parametrize("stage", STAGES)
def test_declared_params_are_the_read_ones(stage: str) -> None:
    source = (ROOT / "stages" / f"{stage}.py").read_text()
    read = set(re.findall(r"\bstage\.params\.(\w+)", source))
    if re.search(r"\bstage\.params\b(?!\.)", source):  # handed on whole
        read = set(Profile.model_fields)
    listed = {p.split(".")[-1] for p in declared(stage).get("params", []) if isinstance(p, str)}
    assert listed == read


@pytest.mark.parametrize("stage", STAGES)
def test_declared_packages_are_the_imported_ones(stage: str) -> None:
    _, packages = closure(stage)
    assert set(locked_keys(stage)) == {PACKAGES[p] for p in packages if p in PACKAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_package_inits_hold_no_code(stage: str) -> None:
    files, _ = closure(stage)
    assert not [f for f in files if f.name == "__init__.py"]


@pytest.mark.parametrize("stage", STAGES)
def test_every_imported_package_is_known(stage: str) -> None:
    _, packages = closure(stage)
    assert packages - PACKAGES.keys() - SILENT.keys() - set(sys.stdlib_module_names) == set()


def test_every_pinned_version_is_some_stage_s() -> None:
    pinned = set(json.loads((ROOT / "locks/env.json").read_text()))
    assert {key for stage in STAGES for key in locked_keys(stage)} == pinned == set(PACKAGES.values())


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_the_own_profile_s_sections(stage: str) -> None:
    listed = [p for p in declared(stage).get("params", []) if isinstance(p, str)]
    assert set(listed) <= {f"profiles.${{item}}.{section}" for section in Profile.model_fields}
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("stage", STAGES)
def test_only_the_stage_itself_reads_parameters(stage: str) -> None:
    """What a module read of params.yaml on its own, `stage.params` would not show."""
    for file in closure(stage)[0] - {ROOT / "src/eyas/stage.py", ROOT / "src/eyas/params.py"}:
        assert not re.search(r"\b(load_profile|PARAMS_FILE|params\.yaml\")", file.read_text()), file


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_rows_in_the_reruns_table(stage: str) -> None:
    groups = {row.group for row in ROWS if stage in row.runs}
    assert {"parameters", "code", "packages"} <= groups
    assert f"`stages/{stage}.py`" in {row.touch for row in ROWS}


def test_every_section_has_rows_in_the_reruns_table() -> None:
    touched = {row.touch.strip("`").split(".")[0] for row in ROWS if row.group == "parameters"}
    assert touched == set(Profile.model_fields)


@pytest.mark.parametrize("name", ["dvc.yaml", "params.yaml", "dvc.lock", ".dvc/config"])
def test_no_value_is_an_absolute_path(name: str) -> None:
    for text in re.split(r"[\s,;:='\"\[\]]+", re.sub(r"#.*", "", (ROOT / name).read_text())):
        assert not text.startswith(("/", "~", "..")), f"{name}: {text}"


@pytest.mark.parametrize("stage", STAGES)
def test_no_code_of_a_stage_names_a_place_of_one_machine(stage: str) -> None:
    for file in closure(stage)[0]:
        if file.suffix == ".py":
            texts = [n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)]
            places = [
                t for t in texts if isinstance(t, str) and re.match(r"(/(home|root|work|tmp|opt|usr|mnt)\b|~/\w)", t)
            ]
            assert not places, (file, places)


def test_no_absolute_path_in_the_pipeline() -> None:
    for name in ("dvc.yaml", "params.yaml", ".dvc/config", "Makefile"):
        assert not re.search(r"(?<![\w.$})/])/(home|root|work|tmp|opt|usr|mnt)\b", (ROOT / name).read_text()), name
