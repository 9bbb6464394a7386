"""`eyas cache adopt` and `commit` after real runs of DVC, one of which it did not survive."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from dvc.repo import Repo
from ruamel.yaml import YAML

from eyas.errors import EyasError
from eyas.keeping import adopt
from eyas.keeping.cache import read_lock
from eyas.keeping.commit import commit
from eyas.keeping.settings import hashing_jobs, set_up_clone
from tests.stub_pipeline import StubCheckout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> StubCheckout:
    made = StubCheckout(tmp_path_factory.mktemp("built"))
    made.repro()
    made.git("add", "-A")  # DVC stages its lock
    made.git("commit", "-qm", "built")
    return made


@pytest.fixture(autouse=True)
def here(built: StubCheckout, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the checkout, whose files are younger than the time that a stage's imports are given."""
    monkeypatch.chdir(built.folder)
    monkeypatch.setattr(adopt, "_IMPORT_SECONDS", 0.0)


def verdicts() -> dict[str, str]:
    """What `adopt` says of each stage that DVC finds changed; an empty text if it was adopted."""
    return {verdict.stage: "; ".join(verdict.against) for verdict in adopt.adopt("smoke")}


def set_param(section: str, key: str, value: object) -> None:
    content = YAML(typ="safe").load(Path("params.yaml"))
    content["profiles"]["smoke"][section][key] = value
    YAML().dump(content, Path("params.yaml"))


def lose_record_of_train(built: StubCheckout, lr: float) -> None:
    """Another learning rate, and DVC killed as soon as the stage has ended."""
    set_param("train", "lr", lr)
    built.tell_params()
    result = built.dvc("repro", "train@smoke", STUB_KILLS_DVC_AFTER="train")
    assert result.returncode == -9, result.stdout + result.stderr


def test_a_stage_that_finished_is_adopted_and_not_run_again(built: StubCheckout) -> None:
    lose_record_of_train(built, 0.5)
    before = Path("data/smoke/draft_head/part").read_bytes()
    found = verdicts()
    assert found["train@smoke"] == ""
    assert found["benchmark@smoke"]
    assert built.repro() == {"benchmark@smoke", "report@smoke"}
    assert Path("data/smoke/draft_head/part").read_bytes() == before
    assert verdicts() == {}


def test_what_is_not_proved_is_refused_and_nothing_changed(built: StubCheckout) -> None:
    lose_record_of_train(built, 0.25)
    lock = Path("dvc.lock").read_bytes()

    repo = Repo(".")
    train = next(stage for stage in repo.index.stages if stage.addressing == "train@smoke")

    def refused() -> str:
        return "; ".join(adopt.evidence_against(repo, train, "smoke"))

    assert refused() == ""
    set_param("train", "lr", 0.125)
    assert "it ran with other parameters in `train` than params.yaml has now" in refused()
    set_param("train", "lr", 0.25)

    provenance = Path("metrics/smoke/provenance/train.json")
    told, times = provenance.read_text(), provenance.stat()

    def tell(**changes: object) -> None:
        provenance.write_text(json.dumps(json.loads(told) | changes))
        os.utime(provenance, ns=(times.st_atime_ns, times.st_mtime_ns))

    tell(profile="rtx")
    assert "is of train@rtx" in refused()
    tell(versions={"torch": "1.0+cpu"})
    assert "it ran with torch 1.0+cpu; locks/env.json says" in refused()
    tell()
    os.utime(provenance, ns=(times.st_atime_ns, times.st_mtime_ns - 10**10))
    assert "written after it finished: " in refused()
    provenance.write_text("{")
    assert "does not say that it finished" in refused()
    tell()
    Path(".work/smoke").mkdir(parents=True, exist_ok=True)
    with Path(".work/smoke/train.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert "it is running" in refused()
    with Path("src/eyas/drafting/heads.py").open("a") as stream:
        stream.write("# a remark\n")
    assert "touched since it started, so nobody can say what it read: src/eyas/drafting/heads.py" in refused()
    shutil.rmtree("data/smoke/draft_head")
    assert "no data/smoke/draft_head" in refused()
    assert verdicts()["train@smoke"] == refused()
    assert Path("dvc.lock").read_bytes() == lock
    assert built.repro() == {"train@smoke", "benchmark@smoke", "report@smoke"}


def test_a_stage_whose_input_is_another_now_is_not_adopted(built: StubCheckout) -> None:
    lose_record_of_train(built, 0.0625)
    read = Path("data/smoke/tokens/part")
    before, times = read.read_bytes(), read.stat()
    read.unlink()  # a hard link of the cache
    read.write_bytes(before[::-1])
    os.utime(read, ns=(times.st_atime_ns, times.st_mtime_ns))  # whatever its time says
    os.utime(read.parent, ns=(times.st_atime_ns, times.st_mtime_ns))
    found, lock = verdicts(), Path("dvc.lock").read_bytes()
    assert "touched since it started, so nobody can say what it read: data/smoke/tokens" in found["train@smoke"]
    assert found["encode@smoke"] == "dvc.lock has this run already, with other outputs: data/smoke/tokens"
    assert "its input from encode@smoke is not recorded" in found["train@smoke"]
    assert Path("dvc.lock").read_bytes() == lock
    assert "train@smoke" in built.repro()


def test_one_commit_has_the_lock_metrics_and_parameters_of_one_profile(built: StubCheckout) -> None:
    set_param("benchmark", "max_tokens", 33)
    with pytest.raises(EyasError, match="out of date: benchmark@smoke, report@smoke; `make repro PROFILE=smoke` first"):
        commit("smoke", "a run")
    built.repro()
    content = YAML(typ="safe").load(Path("params.yaml"))
    content["active"] = ["smoke", "rtx"]
    YAML().dump(content, Path("params.yaml"))
    assert built.repro("prepare@rtx") == {"prepare@rtx"}
    Path("README.md").write_text("another\n")
    built.git("add", "README.md")
    with pytest.raises(EyasError, match=r"staged but not part of a run: README\.md; commit it on its own"):
        commit("smoke", "a run")
    built.git("restore", "--staged", "README.md")
    with pytest.raises(EyasError, match="say what the run is"):
        commit("smoke", " ")
    with Path("src/eyas/report/page.py").open("a") as stream:
        stream.write("# a remark\n")
    assert built.repro("report@smoke") == {"report@smoke"}
    with pytest.raises(EyasError, match=r"code that is not committed: .*src/eyas/report/page\.py"):
        commit("smoke", "a run")
    built.git("reset", "-q")
    built.git("add", "src", "stages")
    built.git("commit", "-qm", "code")
    made = commit("smoke", "a run")
    assert built.git("rev-parse", "HEAD").startswith(made)
    files = built.git("show", "--name-only", "--format=%s", "HEAD").split("\n")
    assert files[0] == "a run"
    assert {"dvc.lock", "params.yaml", "metrics/smoke/benchmark.json"} <= set(files)
    assert all(name in ("", "dvc.lock", "params.yaml") or name.startswith("metrics/smoke/") for name in files[1:])
    committed = read_lock(built.git("show", "HEAD:dvc.lock"), "HEAD")
    present = read_lock(Path("dvc.lock").read_text(), "dvc.lock")
    assert {**committed, "prepare@rtx": present["prepare@rtx"]} == present
    assert "prepare@rtx" not in committed
    with pytest.raises(EyasError, match="nothing to commit"):
        commit("smoke", "again")


def test_metrics_and_a_lock_that_no_stage_wrote_are_not_committed(built: StubCheckout) -> None:
    for file, was, now in (("metrics/smoke/train.json", '"value": 0', '"value": 7'), ("dvc.lock", "md5: ", "md5: 0")):
        told = Path(file).read_text()
        assert was in told
        Path(file).write_text(told.replace(was, now))
        with pytest.raises(EyasError, match=r"out of date: .*train@smoke.*; `make repro PROFILE=smoke` first"):
            commit("smoke", "a run")
        Path(file).write_text(told)


def test_metrics_that_dvc_would_misread_are_not_committed(built: StubCheckout) -> None:
    Path("metrics/smoke/report.json").write_text('{"value": NaN}')
    assert built.dvc("commit", "-f", "report@smoke").returncode == 0
    head = built.git("rev-parse", "HEAD")
    with pytest.raises(EyasError, match=r"metrics/smoke/report\.json: value is nan"):
        commit("smoke", "a run")
    assert built.git("rev-parse", "HEAD") == head


def test_a_clone_is_set_up_once_and_its_own_settings_stay(built: StubCheckout) -> None:
    done = set_up_clone()
    assert done == ["dvc.lock is merged stage by stage", f"DVC hashes with {hashing_jobs()} threads"]
    assert "cache merge-lock %O %A %B" in built.git("config", "--get", "merge.eyas-lock.driver")
    assert built.dvc("config", "core.checksum_jobs").stdout.strip() == str(hashing_jobs())
    assert built.dvc("config", "--local", "core.checksum_jobs", "3").returncode == 0
    assert set_up_clone() == []
    assert built.dvc("config", "core.checksum_jobs").stdout.strip() == "3"
