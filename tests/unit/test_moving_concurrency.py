"""Two `make repro` at once in one checkout: real DVC on the project's own pipeline, with stages that take a moment."""

from __future__ import annotations

import sys
import time

import pytest
from ruamel.yaml import YAML

from eyas.keeping.cache import read_lock
from tests.stub_pipeline import STAGES, StubCheckout, ran

REPRO = (sys.executable, "-m", "eyas.moving", "repro")


@pytest.fixture
def checkout(tmp_path_factory: pytest.TempPathFactory) -> StubCheckout:
    made = StubCheckout(tmp_path_factory.mktemp("two"))
    content = YAML(typ="safe").load(made.folder / "params.yaml")
    content["active"] = ["smoke", "rtx"]
    YAML().dump(content, made.folder / "params.yaml")
    made.tell_params()
    made.commit("two profiles")
    return made


@pytest.mark.parametrize("second", ["rtx", "smoke"])
def test_the_second_is_refused_and_the_first_is_not_disturbed(checkout: StubCheckout, second: str) -> None:
    first = checkout.start(*REPRO, "smoke", STUB_SECONDS="0.6")
    until = time.monotonic() + 60
    while not (checkout.folder / "data/smoke").is_dir() and time.monotonic() < until:
        time.sleep(0.05)
    refused = checkout.run(*REPRO, second)
    assert refused.returncode == 1
    said = " ".join(refused.stderr.split())
    assert f"`make repro` of this checkout is running already (pid {first.pid}); wait for it or stop it" in said
    assert ran(refused.stdout) == set()
    output = first.communicate()[0]
    assert first.returncode == 0, output
    assert ran(output) == {f"{stage}@smoke" for stage in STAGES}

    again = checkout.run(*REPRO, second)
    assert again.returncode == 0, again.stderr
    assert ran(again.stdout) == ({f"{stage}@rtx" for stage in STAGES} if second == "rtx" else set())
    locked = read_lock((checkout.folder / "dvc.lock").read_text(), "dvc.lock")
    assert set(locked) == {f"{stage}@{profile}" for profile in {"smoke", second} for stage in STAGES}
    assert "up to date" in checkout.dvc("status", *(f"report@{p}" for p in {"smoke", second}), "--with-deps").stdout
