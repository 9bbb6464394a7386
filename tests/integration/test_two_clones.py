"""docs/moving-machines.md, run as it stands: a profile goes to another machine and back, and nothing is computed twice.

First with a folder as the remote, then through an SSH and an S3 server, each with rows of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eyas.params import Machine, load_machine, load_profile
from tests.integration.test_moving_remotes import Server, server
from tests.pipeline.test_minute_profile import MINUTE, ROOT, Checkout, ran, shards_of, write_jsonl, write_params
from tests.stub_pipeline import PLACEMENT

PAGE = ROOT / "docs/moving-machines.md"
__all__ = ["server"]  # a fixture


def blocks() -> dict[str, list[str]]:
    """The commands under each heading of the page."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("    "):
            found.setdefault(heading, []).append(line.strip())
    return found


@dataclass
class Clone:
    """A place with one checkout, in which the commands of the page are run."""

    place: Path
    origin: Path
    remote: str
    done: list[str]

    @property
    def folder(self) -> Path:
        return self.place / "eyas"

    def run(self, command: str) -> str:
        """Run one command of the page, with the small profile and the test's own places; gives all that it printed."""
        real = command.replace("rtx", "minute").replace("/mnt/shared/eyas", self.remote)
        real = real.replace("ssh://git.example.com/eyas.git", str(self.origin))
        if command.startswith("make setup"):  # the environment of these tests is the checkout's too
            (self.folder / ".venv").symlink_to(sys.prefix)
            with (self.folder / ".git/info/exclude").open("a") as stream:
                stream.write("/.venv\n")
            real = "make --dry-run setup ENGINE=cpu"
        real = re.sub("^make ", "make -o setup ", real) if not command.startswith("make setup") else real
        identity = {
            f"GIT_{who}_{what}": "t@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        folder = self.folder if self.folder.is_dir() else self.place
        result = subprocess.run(
            ["bash", "-c", real],
            cwd=folder,
            env=os.environ | identity,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}"
        self.done.append(command)
        return result.stdout

    def follow(self, heading: str) -> dict[str, str]:
        """Run the block under a heading; gives what each of its commands printed."""
        return {command: self.run(command) for command in blocks()[heading] if not command.startswith("cd ")}

    def add_data(self, name: str, *topics: str) -> None:
        """A new file under data/input, named in params.yaml before those that are."""
        new = [{"messages": [{"role": "user", "content": f"Tell me about {topic}."}]} for topic in topics]
        write_jsonl(self.folder / f"data/input/{name}.jsonl", new)
        before = load_profile("minute", self.folder / "params.yaml").dataset.sources
        sources = [{"source": f"data/input/{name}.jsonl"}, *({"source": known.source} for known in before)]
        write_params(self.folder, MINUTE | {"dataset": MINUTE["dataset"] | {"sources": sources}})

    def extract_metrics(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / "metrics/minute/extract.json").read_text())
        return values

    def remote_objects(self) -> dict[str, int]:
        """Each object of the remote and when it was written."""
        top = Path(self.remote) / "files/md5"
        return {str(f.relative_to(top)): f.stat().st_mtime_ns for f in top.rglob("*") if f.is_file()}


@dataclass
class Story:
    """What the commands of the page printed, machine by machine, and the remote's objects before and after the new data."""

    first: Clone
    second: Clone
    printed: dict[str, dict[str, str]]
    before: dict[str, int]
    after: dict[str, int]
    rows: int
    shards: dict[str, str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    top = tmp_path_factory.mktemp("machines")
    done: list[str] = []
    first, second = (Clone(top / name, top / "origin.git", str(top / "remote"), done) for name in ("rtx", "b300"))
    second.place.mkdir()
    first.folder.mkdir(parents=True)
    made = Checkout(first.folder)
    (first.folder / ".venv").symlink_to(sys.prefix)
    (first.folder / ".git/info/exclude").write_text("/.venv\n")
    made.git("init", "-q", "--bare", str(first.origin))
    made.git("remote", "add", "origin", str(first.origin))
    made.git("push", "-q", "--set-upstream", "origin", "HEAD")
    printed = {
        heading: machine.follow(heading)
        for machine, heading in (
            (first, "The remote, once for each checkout"),
            (first, "On the first machine"),
            (second, "On the big machine"),
        )
    }
    before, rows = first.remote_objects(), second.extract_metrics()["rows"]
    shards = {name: md5 for name, (md5, _) in made.store().items()}
    second.add_data("more", "lamps", "doors", "soap")
    printed["More data on the big machine"] = second.follow("More data on the big machine")
    after = first.remote_objects()
    printed["Back on the first machine"] = first.follow("Back on the first machine")
    yield Story(first, second, printed, before, after, rows, shards)


def test_the_first_machine_ran_everything(story: Story) -> None:
    output = story.printed["On the first machine"]["make repro PROFILE=rtx"]
    assert len(ran(output)) == 8
    assert "minute: the run" in output


def test_the_second_machine_runs_nothing(story: Story) -> None:
    output = story.printed["On the big machine"]["make repro PROFILE=rtx"]
    assert ran(output) == set()
    assert "nothing to run" in output
    assert "minute: the run" in output  # the summary


def test_only_new_rows_are_extracted(story: Story) -> None:
    metrics = story.second.extract_metrics()
    assert metrics["rows"] == story.rows + 3
    assert metrics["recorded_tokens"] < metrics["tokens"] / 4
    store = shards_of(story.second.folder)
    assert story.shards.items() < {name: md5 for name, (md5, _) in store.items()}.items()
    assert len(store) == len(story.shards) + 1


def test_only_new_objects_are_sent(story: Story) -> None:
    assert story.before.items() < story.after.items()  # none was written again
    sent = story.printed["More data on the big machine"]["make push PROFILE=rtx"]
    assert f"sent {len(story.after) - len(story.before)} objects" in sent


def test_the_first_machine_runs_nothing_and_has_the_new_rows(story: Story) -> None:
    printed = story.printed["Back on the first machine"]
    assert ran(printed["make repro PROFILE=rtx"]) == set()
    assert "nothing to run" in printed["make repro PROFILE=rtx"]
    assert f"fetched {len(story.after) - len(story.before)} objects" in printed["make pull PROFILE=rtx"]
    assert shards_of(story.first.folder).keys() == shards_of(story.second.folder).keys()


def test_placement_changes_no_stage(story: Story) -> None:
    (story.first.folder / "machine.yaml").write_text(json.dumps(PLACEMENT))
    assert PLACEMENT.keys() == Machine.model_fields.keys()
    load_machine(story.first.folder / "machine.yaml")
    assert "nothing to run" in story.first.run("make repro PROFILE=rtx")


def test_every_command_of_the_page_was_run(story: Story) -> None:
    assert {c for commands in blocks().values() for c in commands} - set(story.first.done) == {"cd eyas"}


def test_a_third_clone_without_a_pull_runs_nothing_either(story: Story, tmp_path: Path) -> None:
    third = Clone(tmp_path, story.first.origin, story.first.remote, [])
    for command in blocks()["On the big machine"]:
        if not command.startswith(("cd ", "make pull")):
            output = third.run(command)
    assert ran(output) == set()
    assert "outputs that are not here" in output
    assert not (third.folder / "data/minute").exists()


def sent(output: str) -> tuple[int, int]:
    """How many objects a push sent, and how many were there already."""
    found = re.search(r"sent (\d+) objects?, .*; (\d+) were there already", " ".join(output.split()))
    assert found, output
    return int(found[1]), int(found[2])


def test_the_same_through_a_server(story: Story, server: Server, tmp_path: Path) -> None:
    kind = server.url.partition(":")[0]
    remote = server.url + (f" ENDPOINT={server.endpoint}" if server.endpoint else "")
    first = Clone(story.first.place, story.first.origin, remote, [])
    for command in ("make remote URL=/mnt/shared/eyas", "make push PROFILE=rtx"):
        output = first.run(command)
    assert sent(output)[0] > len(shards_of(first.folder))
    assert sent(output)[1] == 0
    assert sent(first.run("make push PROFILE=rtx"))[0] == 0

    second = Clone(tmp_path, story.first.origin, remote, [])
    printed = second.follow("On the big machine")
    assert ran(printed["make repro PROFILE=rtx"]) == set()
    assert "nothing to run" in printed["make repro PROFILE=rtx"]
    rows, shards = second.extract_metrics()["rows"], shards_of(second.folder)

    second.add_data(kind, f"{kind} and cats", f"{kind} and dogs")
    printed = second.follow("More data on the big machine")
    metrics, store = second.extract_metrics(), shards_of(second.folder)
    assert metrics["rows"] == rows + 2
    assert metrics["recorded_tokens"] < metrics["tokens"] / 4
    assert {name: md5 for name, (md5, _) in shards.items()}.items() < {n: md5 for n, (md5, _) in store.items()}.items()
    objects, there = sent(printed["make push PROFILE=rtx"])
    assert there >= len(shards)

    printed = first.follow("Back on the first machine")
    assert ran(printed["make repro PROFILE=rtx"]) == set()
    assert "nothing to run" in printed["make repro PROFILE=rtx"]
    assert f"fetched {objects} objects" in printed["make pull PROFILE=rtx"]
    assert shards_of(first.folder).keys() == store.keys()
