"""dvc.yaml says what each stage really depends on: modules, parameters, packages; checked against the code itself."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from eyas.params import Profile

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
    listed = {key for p in declared(stage).get("params", []) if isinstance(p, dict) for key in p["locks/env.json"]}
    assert listed == {PACKAGES[p] for p in packages if p in PACKAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_package_inits_hold_no_code(stage: str) -> None:
    files, _ = closure(stage)
    assert not [f for f in files if f.name == "__init__.py"]


def test_no_absolute_path_in_the_pipeline() -> None:
    for name in ("dvc.yaml", "params.yaml", ".dvc/config", "Makefile"):
        assert not re.search(r"(?<![\w.$})/])/(home|root|work|tmp|opt|usr|mnt)\b", (ROOT / name).read_text()), name
