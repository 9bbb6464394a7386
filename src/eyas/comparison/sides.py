"""One side of a comparison: ``REV``, ``REV:profile``, ``workspace``, ``workspace:profile``, or a metrics folder.

Takes that text; gives a `Side`. A revision is read with ``git show``; nothing is checked out. Outputs come from DVC's cache.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.parquet as pq

from eyas.activation import active_profiles
from eyas.errors import EyasError
from eyas.keeping.cache import LOCK_FILE, git, open_cache, read_lock
from eyas.metrics import STAGES, parse_metrics_text

WORKSPACE = "workspace"
Counts = dict[tuple[str, str], dict[str, tuple[int, int]]]
"""By method and set: by prompt, emitted tokens and target steps."""


@dataclass(frozen=True)
class Side:
    """What one run left.

    Attributes:
        name: what the user called it.
        profile: whose metrics these are.
        metrics: by stage; stages that have not run are absent.
        provenance: by stage.
        lock: the stages of its lock for this profile, by stage; empty for a folder.
        counts: by method and set; empty where outputs cannot be had or do not tell steps.
    """

    name: str
    profile: str
    metrics: dict[str, dict[str, Any]]
    provenance: dict[str, dict[str, Any]]
    lock: dict[str, dict[str, Any]]
    counts: Counts

    @property
    def machine(self) -> dict[str, Any]:
        """Where the benchmark ran, without what an update of the system changes."""
        described = self.provenance.get("benchmark", {}).get("machine", {})
        return {key: value for key, value in described.items() if key not in ("kernel", "memory_gib")}


def read_side(text: str) -> Side:
    """Read a side.

    Raises:
        EyasError: no such revision, profile or folder, or unsound metrics.
    """
    folder = Path(text)
    if any((folder / f"{stage}.json").is_file() for stage in STAGES):
        return _read(text, folder.resolve().name, _from_folder(folder), {}, {})
    revision, _, profile = text.partition(":")
    profile = profile or active_profiles()[0]
    if revision == WORKSPACE:
        read, data = _from_folder(Path()), Path("data", profile, "benchmark", "outputs.parquet")
        lock = _lock(read(str(LOCK_FILE)), text, profile)
        counts = _counts(data.read_bytes()) if data.is_file() else {}
    else:
        _require_commit(revision)
        read = _from_commit(revision)
        lock = _lock(read(str(LOCK_FILE)), text, profile)
        counts = _cached_counts(lock, profile)
    return _read(text, profile, lambda name: read(f"metrics/{profile}/{name}"), lock, counts)


def _require_commit(revision: str) -> None:
    try:
        git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except EyasError:
        raise EyasError(
            f"{revision}: neither a commit, a branch, a tag, `{WORKSPACE}`, nor a folder with metrics (as metrics/smoke is)"
        ) from None


def _from_folder(folder: Path) -> Callable[[str], str | None]:
    def read(name: str) -> str | None:
        file = folder / name
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None

    return read


def _from_commit(revision: str) -> Callable[[str], str | None]:
    def read(name: str) -> str | None:
        return git("show", f"{revision}:{name}") if git("ls-tree", revision, "--", name) else None

    return read


def _read(
    name: str, profile: str, read: Callable[[str], str | None], lock: dict[str, dict[str, Any]], counts: Counts
) -> Side:
    metrics, provenance = {}, {}
    for stage in STAGES:
        if (text := read(f"{stage}.json")) is not None:
            metrics[stage] = parse_metrics_text(text, f"{name}: {stage}.json")
        if (text := read(f"provenance/{stage}.json")) is not None:
            provenance[stage] = json.loads(text)
    if "benchmark" not in metrics:
        raise EyasError(
            f"{name}: no benchmark.json of profile {profile} there; another profile is named as REV:profile"
        )
    return Side(name, profile, metrics, provenance, lock, counts)


def _lock(text: str | None, where: str, profile: str) -> dict[str, dict[str, Any]]:
    stages = read_lock(text or "", f"{LOCK_FILE} of {where}")
    return {name.partition("@")[0]: entry for name, entry in stages.items() if name.endswith(f"@{profile}")}


def _cached_counts(lock: dict[str, dict[str, Any]], profile: str) -> Counts:
    """Counts from the outputs that a lock names, if DVC's cache of this checkout has them."""
    outs = lock.get("benchmark", {}).get("outs", [])
    listing = next((str(o["md5"]) for o in outs if o.get("path") == f"data/{profile}/benchmark"), None)
    if listing is None or not Path(".dvc").is_dir():
        return {}
    cache = open_cache()
    if not cache.path(listing).is_file():
        return {}
    for entry in json.loads(cache.path(listing).read_bytes()):
        if PurePosixPath(entry["relpath"]).name == "outputs.parquet" and cache.path(entry["md5"]).is_file():
            return _counts(cache.path(entry["md5"]).read_bytes())
    return {}


def _counts(content: bytes) -> Counts:
    """Counts of ``outputs.parquet``; an older one has no ``step_tokens``, and then no counts."""
    table = pq.read_table(io.BytesIO(content))
    if "step_tokens" not in table.column_names:
        return {}
    counts: Counts = {}
    for row in table.select(["method", "set", "prompt_id", "step_tokens"]).to_pylist():
        # the first step is the prefill, whose token is the same for every method
        steps = row["step_tokens"][1:]
        counts.setdefault((row["method"], row["set"]), {})[row["prompt_id"]] = (sum(steps), len(steps))
    return counts
