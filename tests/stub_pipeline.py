"""The project's own pipeline, driven by real DVC, with a stub in place of each stage: it writes what `dvc.yaml` lists in milliseconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from eyas.metrics import KEYS, SERIES
from eyas.params import load_profile

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("prepare", "respond", "encode", "extract", "vocab", "train", "benchmark", "report")
# Every setting of machine.yaml, and none of them the default.
PLACEMENT: dict[str, Any] = {
    "tensor_parallel_size": 8,
    "gpu_memory_utilization": 0.5,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 65536,
    "cpu_kv_cache_gib": 8,
    "threads": 1,
    "store_workers": 3,
    "benchmark_engines": 1,
    "endpoint": "http://127.0.0.1:8000/v1",
    "endpoint_concurrency": 128,
    "endpoint_timeout_s": 60.0,
    "train_ranks": 8,
    "train_sharding": "fsdp",
    "checkpoint_minutes": 1.0,
    "checkpoint_steps": 500,
    "checkpoints_kept": 3,
    "peak_tflops": 989.0,
    "track": ["tensorboard"],
}
# Stands where `python` is looked for. New bytes in each run, as a stage whose outputs did change; or always the same ones.
_STUB = """\
import json, os, pathlib, signal, sys, time, uuid
stage, profile = sys.argv[2].removeprefix("stages."), sys.argv[3]
known = json.loads(pathlib.Path(__file__).with_name("known.json").read_text())
started = time.time()
if "STUB_SECONDS" in os.environ:
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as real stages, it dies with DVC
    time.sleep(float(os.environ["STUB_SECONDS"]) / 2)
text = "the same" if "STUB_SAME" in os.environ else uuid.uuid4().hex
for name in known["outs"][stage]:
    path = pathlib.Path(name.replace("${item}", profile))
    if not path.suffix:
        path = path / "part"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + name)
time.sleep(float(os.environ.get("STUB_SECONDS", 0)) / 2)
value = len(text) / (int(text[:4], 16) + 1 if text != "the same" else 1)
metrics = {"value": value}
for key in known["keys"][stage]:
    first, _, second = key.partition(".")
    metrics.setdefault(first, {}).update({second: value}) if second else metrics.update({first: value})
for name in known["metrics"][stage]:
    path = pathlib.Path(name.replace("${item}", profile))
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = known["series"].get(path.name, ["step"])
    series = ",".join(columns) + "\\n" + ",".join([str(value)] * len(columns)) + "\\n"
    path.write_text(series if path.suffix == ".csv" else json.dumps(metrics))
path.parent.parent.joinpath("provenance").mkdir(exist_ok=True)
provenance = {"stage": stage, "profile": profile, "params": known["params"].get(profile, {}), "versions": {}}
provenance |= {"wall_seconds": time.time() - started, "peak_memory_mib": 1}
pathlib.Path(f"metrics/{profile}/provenance/{stage}.json").write_text(json.dumps(provenance))
if os.environ.get("STUB_KILLS_DVC_AFTER") == stage:
    os.kill(os.getppid(), signal.SIGKILL)  # as a machine that fails while DVC hashes
"""


class StubCheckout:
    """A copy of the project's files with a Git history of its own, `smoke` active and nothing built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.bin = folder / "bin"
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file() and not name.startswith(("metrics/", "dvc.lock")):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        self._write_stub()
        # not the machine's own state database, which outlives the test
        (self.folder / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {folder / 'state'}\n")
        self.git("init", "-q", "-b", "main")
        for key, value in (("user.name", "t"), ("user.email", "t@example.com"), ("gc.auto", "0")):
            self.git("config", key, value)
        self.commit("start")

    def _write_stub(self) -> None:
        stages = YAML(typ="safe").load(self.folder / "dvc.yaml")["stages"]
        series = {s: [*e["do"]["metrics"], *e["do"].get("plots", [])] for s, e in stages.items()}
        known = {
            "outs": {stage: entry["do"]["outs"] for stage, entry in stages.items()},
            "keys": KEYS,
            "series": SERIES,
            "metrics": {stage: [next(iter(m)) for m in listed] for stage, listed in series.items()},
        }
        self.bin.mkdir()
        (self.bin / "known.json").write_text(json.dumps(known))
        self.tell_params()
        (self.bin / "python").write_text(f"#!{sys.executable} -SE\n{_STUB}")
        (self.bin / "python").chmod(0o755)

    def tell_params(self) -> None:
        """Have the stub put what params.yaml holds now into the provenance of its runs."""
        file = self.bin / "known.json"
        names = YAML(typ="safe").load(self.folder / "params.yaml")["active"]
        params = {n: json.loads(load_profile(n, self.folder / "params.yaml").model_dump_json()) for n in names}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"params": params}))

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]])
        return os.environ | {"PATH": path, "COLUMNS": "400"}

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command in the checkout, with the stub before the environment's own programs."""
        environment = self.environment | variables
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def git(self, *arguments: str) -> str:
        result = self.run("git", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", message)

    def dvc(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "dvc", *arguments, **variables)

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """The same, in a process group of its own and not waited for; what it prints goes together."""
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def repro(self, *arguments: str, **variables: str) -> set[str]:
        """Build; gives the stages that ran, as ``train@smoke``."""
        result = self.dvc("repro", *arguments, **variables)
        assert result.returncode == 0, result.stdout + result.stderr
        return ran(result.stdout)


def ran(output: str) -> set[str]:
    """Names of the stages that a `dvc repro` ran."""
    return {line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage '")}
