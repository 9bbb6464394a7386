"""A tiny checkout with a real DVC pipeline of copies, for the tests of moving artefacts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

PROFILE: dict[str, Any] = {
    "target": {"source": "data/input/target", "max_model_len": 256},
    "dataset": {"sources": [{"source": "data/input/chats.jsonl"}], "benchmark_sets": []},
    "responses": {"max_tokens": 16},
    "extract": {"layers": [1, 2]},
    "vocab": {"draft_vocab_size": 256},
    "draft": {"num_layers": 1},
    "train": {"epochs": 2, "lr": 1.0e-3, "tokens_per_step": 256},
    "benchmark": {
        "num_speculative_tokens": [2],
        "max_tokens": 12,
        "concurrency": [4],
        "heldout_prompts": 6,
        "prompts_per_set": 2,
    },
}
# A directory of shards, then a file: as the real pipeline, with `cp` for what takes hours there.
PIPELINE = """\
stages:
  extract:
    foreach: ${active}
    do:
      cmd: mkdir -p data/${item}/hidden_states metrics/${item} && cp data/input/*.h5 data/${item}/hidden_states
        && echo '{"rows":1}' > metrics/${item}/extract.json
      deps: [data/input]
      params: ["profiles.${item}.extract"]
      outs: ["data/${item}/hidden_states"]
      metrics: ["metrics/${item}/extract.json": {cache: false}]
  report:
    foreach: ${active}
    do:
      cmd: cat data/${item}/hidden_states/* | md5sum > data/${item}/report
      deps: ["data/${item}/hidden_states"]
      outs: ["data/${item}/report"]
"""


class TinyCheckout:
    """A Git and DVC repository with the profiles `one` (active) and `two`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data/input").mkdir(parents=True)
        for name in ("a", "b", "c"):
            (folder / f"data/input/{name}.h5").write_bytes(name.encode() * 100_000)
        (folder / "dvc.yaml").write_text(PIPELINE)
        (folder / ".gitignore").write_text("/data/*\n!/data/input/\n")
        self.set_params(["one"])
        self.git("init", "-q")
        self.dvc("init", "-q")
        (folder / ".dvc/config").write_text(
            "[core]\n    analytics = false\n    check_update = false\n    autostage = true\n"
            '[cache]\n    type = "hardlink,symlink"\n'
        )
        self.commit("start")

    @classmethod
    def clone(cls, origin: TinyCheckout, folder: Path) -> TinyCheckout:
        made = cls.__new__(cls)
        made.folder = folder
        subprocess.run(["git", "clone", "-q", str(origin.folder), str(folder)], check=True)
        return made

    def set_params(self, active: list[str], **sections: dict[str, Any]) -> None:
        profiles = {"one": PROFILE | sections, "two": PROFILE}
        YAML().dump({"active": active, "profiles": profiles}, self.folder / "params.yaml")

    def git(self, *arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=self.folder, check=True, capture_output=True)

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", message)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def dvc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "dvc", *arguments)

    def moving(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "eyas.moving", *arguments)

    @property
    def objects(self) -> Path:
        return self.folder / ".dvc/cache/files/md5"
