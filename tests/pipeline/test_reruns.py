"""Touch this, and exactly those stages run: asked of real DVC on the project's own pipeline, and the source of `docs/reruns.md`.

The stages are stubs, since only DVC's decisions matter here. `python -m tests.pipeline.test_reruns` writes the page anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from eyas.params import Machine
from tests.stub_pipeline import PLACEMENT, ROOT, STAGES, StubCheckout

PAGE = ROOT / "docs/reruns.md"
ALL = " ".join(STAGES)
TEMPLATED = "respond encode vocab benchmark"


@dataclass(frozen=True)
class Row:
    """One change: a file and what is done to it, and the stages that DVC runs for it."""

    group: str
    touch: str
    runs: tuple[str, ...]
    change: Callable[[Path], None]
    file: str


def param(section: str, key: str, value: Any, runs: str) -> Row:
    """Another value of one of smoke's parameters."""

    def change(file: Path) -> None:
        content = YAML(typ="safe").load(file)
        content["profiles"]["smoke"][section][key] = value
        YAML().dump(content, file)

    return Row("parameters", f"`{section}.{key}`", tuple(runs.split()), change, "params.yaml")


def source(name: str, runs: str) -> Row:
    """A comment in a file of the code."""
    return Row("code", f"`{name}`", tuple(runs.split()), append("# a remark\n"), name)


def package(name: str, runs: str) -> Row:
    """Another version in locks/env.json."""

    def change(file: Path) -> None:
        text = file.read_text()
        file.write_text(re.sub(rf'("{name}": ")', r"\g<1>9", text))
        assert file.read_text() != text

    return Row("packages", f"`{name}`", tuple(runs.split()), change, "locks/env.json")


def data(touch: str, name: str, change: Callable[[Path], None], runs: str) -> Row:
    """A file of the data, or of what a stage wrote."""
    return Row("data", touch, tuple(runs.split()), change, name)


def placement(key: str, value: Any) -> Row:
    """A key of machine.yaml."""
    return Row("placement", f"`{key}`", (), lambda file: file.write_text(json.dumps({key: value})), "machine.yaml")


def other(touch: str, name: str, change: Callable[[Path], None]) -> Row:
    """Something that no stage of smoke depends on."""
    return Row("all else", touch, (), change, name)


def append(text: str) -> Callable[[Path], None]:
    """Add text to the end of a file, which may be new."""

    def change(file: Path) -> None:
        with file.open("a") as stream:
            stream.write(text)

    return change


def another_rtx(file: Path) -> None:
    """Change a parameter of a profile that is not the one asked about."""
    content = YAML(typ="safe").load(file)
    content["profiles"]["rtx"]["train"]["epochs"] = 9
    YAML().dump(content, file)


ROWS = (
    param("target", "max_model_len", 2048, ALL),
    param("target", "dtype", "bfloat16", ALL),
    param("dataset", "validation_share", 0.2, "prepare report"),
    param("dataset", "sources", [{"source": "package:chitchat"}], "prepare report"),
    param("responses", "temperature", 0.0, "respond encode train report"),
    param("responses", "max_tokens", 81, "respond encode train report"),
    param("extract", "layers", [2, 15, 28, 30], "extract report"),
    param("extract", "codec", "none", "extract report"),
    param("vocab", "draft_vocab_size", 4096, "vocab report"),
    param("draft", "num_layers", 2, "train report"),
    param("train", "lr", 2.0e-3, "train report"),
    param("train", "epochs", 4, "train report"),
    param("benchmark", "num_speculative_tokens", [2], "benchmark report"),
    *(source(f"stages/{stage}.py", stage) for stage in STAGES),
    source("src/eyas/stage.py", ALL),
    source("src/eyas/params.py", ALL),
    source("src/eyas/targets/resolve.py", ALL),
    source("src/eyas/conversations/near_duplicates.py", "prepare"),
    source("src/eyas/conversations/loops.py", "respond benchmark"),
    source("src/eyas/templates/chat.py", TEMPLATED),
    source("src/eyas/templates/rows.py", "encode"),
    source("src/eyas/extraction/engine.py", "respond extract benchmark"),
    source("src/eyas/extraction/selfcheck.py", "extract"),
    source("src/eyas/store/writer.py", "extract"),
    source("src/eyas/store/shards.py", "extract train"),
    source("src/eyas/store/reader.py", "train"),
    source("src/eyas/vocabulary.py", "vocab train"),
    source("src/eyas/drafting/training.py", "train"),
    source("src/eyas/benchmark/statistics.py", "benchmark"),
    source("src/eyas/report/page.html.j2", "report"),
    package("vllm", "respond extract benchmark"),
    package("torch", "extract train"),
    package("transformers", "respond encode extract vocab train benchmark"),
    package("speculators", "train"),
    package("h5py", "extract train"),
    package("tokenizers", ALL),
    package("datasets", "prepare"),
    package("matplotlib", "report"),
    data("a new file in `data/input`", "data/input/more.jsonl", append('{"prompt": "Why?"}\n'), "prepare"),
    data("`locks/data.txt`", "locks/data.txt", append("# a remark\n"), "prepare"),
    data("the benchmark's output removed", "data/smoke/benchmark", shutil.rmtree, "benchmark"),
    data("train's metrics edited", "metrics/smoke/train.json", append(" "), "train report"),
    *(placement(key, value) for key, value in PLACEMENT.items()),
    other("another profile's parameters", "params.yaml", another_rtx),
    other("a module that no stage imports", "src/eyas/doctor.py", append("# a remark\n")),
    other("a test", "tests/unit/test_files.py", append("# a remark\n")),
    other("a page of `docs/`", "docs/data.md", append("More.\n")),
    other("the pinned packages of both engines", "locks/cpu.txt", append("# a remark\n")),
    other("the Makefile", "Makefile", append("# a remark\n")),
)


def page(downstream: dict[str, set[str]]) -> str:
    """`docs/reruns.md`; `downstream` has the stages that read an output of a stage, directly or not."""
    lines = [
        "# What reruns",
        "",
        "One change in a built checkout of `smoke`, and what `make repro` does about it. The stages of the second column run. If the bytes",
        "that they write are the ones from before, nothing else does; where they differ, the stages of the third column follow. Another",
        "profile's stages never run: each profile has its own.",
        "",
        "The table is written by `python -m tests.pipeline.test_reruns` and each row is asked of DVC by that test.",
    ]
    group = ""
    for row in ROWS:
        if row.group != group:
            group = row.group
            lines += [
                "",
                f"## {group.capitalize()}",
                "",
                "| touched | runs | then, if the bytes changed |",
                "|---|---|---|",
            ]
        after = set().union(*(downstream[stage] for stage in row.runs)) - set(row.runs)
        columns = [", ".join(s for s in STAGES if s in chosen) or "nothing" for chosen in (set(row.runs), after)]
        if not row.runs:
            columns[1] = ""
        elif set(row.runs) == set(STAGES):
            columns = ["everything", ""]
        lines.append(f"| {row.touch} | {columns[0]} | {columns[1]} |")
    return "\n".join(lines) + "\n"


def downstream_of() -> dict[str, set[str]]:
    """For each stage, those that read an output of it, directly or not; as `dvc.yaml` has it."""
    stages = {name: entry["do"] for name, entry in YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"].items()}
    writes = {
        name: {
            *entry["outs"],
            *(next(iter(listed)) for listed in [*entry["metrics"], *entry.get("plots", [])]),
        }
        for name, entry in stages.items()
    }
    found: dict[str, set[str]] = {}
    for name in reversed(STAGES):
        direct = {other for other, entry in stages.items() if writes[name] & set(entry["deps"])}
        found[name] = direct.union(*(found[other] for other in direct))
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubCheckout]:
    made = StubCheckout(tmp_path_factory.mktemp("reruns"))
    assert made.repro(STUB_SAME="1") == {f"{stage}@smoke" for stage in STAGES}
    made.commit("built")
    yield made


@pytest.fixture(scope="module")
def repo(built: StubCheckout) -> Iterator[Any]:
    """DVC's own view of the pipeline, read once: parsing is most of what `dvc status` takes."""
    from dvc.repo import Repo

    before = Path.cwd()
    os.chdir(built.folder)
    try:
        with Repo(".") as repo:
            yield repo
    finally:
        os.chdir(before)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}: {row.touch}")
def test_touching_it_runs_exactly_these(built: StubCheckout, repo: Any, row: Row) -> None:
    file = built.folder / row.file
    aside = built.folder.parent / "aside"
    there = file.exists()
    if there:  # the very file comes back afterwards, so that DVC need not hash it again
        file.rename(aside)
        (shutil.copytree if aside.is_dir() else shutil.copy)(aside, file)
    try:
        row.change(file)
        with repo.lock:
            found = {stage.addressing for stage in repo.index.stages if stage.status()}
        assert found == {f"{name}@smoke" for name in row.runs}
    finally:
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
        if there:
            aside.rename(file)


def test_repro_runs_them_and_what_follows(built: StubCheckout) -> None:
    row = next(row for row in ROWS if row.touch == "`train.lr`")
    after = set(row.runs).union(*(downstream_of()[stage] for stage in row.runs))
    row.change(built.folder / row.file)
    (built.folder / "machine.yaml").write_text("max_num_seqs: 3\n")
    assert built.repro() == {f"{stage}@smoke" for stage in after} == {"train@smoke", "benchmark@smoke", "report@smoke"}


def test_nothing_follows_where_the_bytes_are_the_same(built: StubCheckout) -> None:
    append("# a remark\n")(built.folder / "stages/encode.py")
    assert built.repro("vocab@smoke", STUB_SAME="1") == {"encode@smoke"}


def test_every_placement_key_has_a_row() -> None:
    assert not [key for key, field in Machine.model_fields.items() if PLACEMENT[key] == field.default]
    assert {row.touch.strip("`") for row in ROWS if row.group == "placement"} == set(Machine.model_fields)


def test_the_page_is_this_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(downstream_of()), "run `python -m tests.pipeline.test_reruns`"


if __name__ == "__main__":
    PAGE.write_text(page(downstream_of()), encoding="utf-8")
