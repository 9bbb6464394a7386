"""The merge driver for dvc.lock, as functions and through Git itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from eyas.errors import EyasError
from eyas.keeping.merge import merge_locks, stage_blocks, with_stages_of

ROOT = Path(__file__).resolve().parents[2]


def lock(**stages: str) -> str:
    """A lock as DVC writes it, with one output per stage; `_` in a name stands for `@`."""
    if not stages:
        return ""
    blocks = [
        f"  {name.replace('_', '@')}:\n    cmd: run {name}\n    outs:\n    - path: data/{name}\n      hash: md5\n      md5: {digit * 32}\n"
        for name, digit in stages.items()
    ]
    return "schema: '2.0'\nstages:\n" + "".join(blocks)


def test_the_real_lock_is_split_and_put_together_without_loss() -> None:
    text = (ROOT / "dvc.lock").read_text()
    blocks = stage_blocks(text, "dvc.lock")
    assert set(blocks) == set(YAML(typ="safe").load(text)["stages"])
    assert merge_locks(text, text, text).text == text


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "merged"),
    [
        (lock(a_x="1"), lock(a_x="2"), lock(a_x="1"), lock(a_x="2")),
        (lock(a_x="1"), lock(a_x="1"), lock(a_x="3"), lock(a_x="3")),
        (lock(a_x="1"), lock(a_x="2"), lock(a_x="2"), lock(a_x="2")),
        (lock(), lock(a_x="1"), lock(b_y="2"), lock(a_x="1", b_y="2")),
        (lock(a_x="1", b_y="1"), lock(a_x="2", b_y="1"), lock(a_x="1", b_y="3"), lock(a_x="2", b_y="3")),
        (lock(a_x="1", b_y="1"), lock(a_x="1"), lock(a_x="2", b_y="1"), lock(a_x="2")),  # removed by us
        (lock(a_x="1", b_y="1"), lock(a_x="1", b_y="1"), lock(a_x="1"), lock(a_x="1")),  # removed by them
        (lock(a_x="1"), lock(), lock(a_x="1"), "schema: '2.0'\n"),
    ],
)
def test_each_stage_comes_from_the_side_that_changed_it(base: str, ours: str, theirs: str, merged: str) -> None:
    found = merge_locks(base, ours, theirs)
    assert (found.text, found.conflicts) == (merged, ())


@pytest.mark.parametrize(
    ("base", "ours", "theirs"),
    [
        (lock(a_x="1", b_y="1"), lock(a_x="2", b_y="1"), lock(a_x="3", b_y="4")),
        (lock(b_y="1"), lock(a_x="2", b_y="1"), lock(a_x="3", b_y="4")),
        (lock(a_x="1", b_y="1"), lock(b_y="1"), lock(a_x="3", b_y="4")),
    ],
)
def test_a_stage_that_both_sides_built_is_a_conflict_with_its_name(base: str, ours: str, theirs: str) -> None:
    found = merge_locks(base, ours, theirs)
    assert found.conflicts == ("a@x",)
    assert found.text.count("<<<<<<<") == found.text.count("=======") == found.text.count(">>>>>>>") == 1
    assert "4" * 32 in found.text  # the other stage is merged all the same


@pytest.mark.parametrize("text", ["stages: [", "stages: 3\n", "<<<<<<< ours\n", lock(a_x="1").replace("  a", "    a")])
def test_what_is_no_lock_is_refused(text: str) -> None:
    with pytest.raises(EyasError, match=r"their dvc\.lock"):
        merge_locks(lock(a_x="1"), lock(a_x="1"), text)


def test_one_profile_s_stages_are_taken_and_the_others_left() -> None:
    committed = lock(a_x="1", a_y="1", b_x="1")
    assert with_stages_of("x", committed, lock(a_x="2", a_y="3", c_x="4")) == lock(a_x="2", a_y="1", c_x="4")
    assert with_stages_of("x", "", lock(a_x="2", a_y="3")) == lock(a_x="2")


def git(folder: Path, *arguments: str, fails: bool = False) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", *arguments]
    result = subprocess.run(
        command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert (result.returncode != 0) == fails, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("conflict", [False, True])
def test_git_merges_two_machines_with_the_driver(tmp_path: Path, conflict: bool) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    program = f"{sys.executable} -c 'from eyas.keeping.cli import app; app()'"
    git(tmp_path, "config", "merge.eyas-lock.driver", f"{program} merge-lock %O %A %B")
    (tmp_path / ".gitattributes").write_text("dvc.lock merge=eyas-lock\n")
    file = tmp_path / "dvc.lock"

    def run_is_committed(text: str) -> None:
        file.write_text(text)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", "run")

    run_is_committed(lock(a_x="1"))
    git(tmp_path, "checkout", "-qb", "other")
    run_is_committed(lock(a_x="3" if conflict else "1", b_y="2"))
    git(tmp_path, "checkout", "-q", "main")
    run_is_committed(lock(a_x="2", c_z="1"))
    output = git(tmp_path, "merge", "other", fails=conflict)
    if conflict:
        assert "both sides built a@x" in " ".join(output.split())
        assert "<<<<<<< ours" in file.read_text()
    else:
        assert stage_blocks(file.read_text(), "merged") == stage_blocks(lock(a_x="2", b_y="2", c_z="1"), "expected")
