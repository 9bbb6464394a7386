"""`eyas cache commit`: one Git commit with a profile's lock entries, metrics and parameters, once they belong together."""

from __future__ import annotations

from pathlib import Path

from eyas.errors import EyasError
from eyas.keeping.cache import LOCK_FILE, git, read_lock
from eyas.keeping.merge import with_stages_of
from eyas.metrics import check_metrics
from eyas.params import load_profile

_PLAIN = ("params.yaml", "dvc.yaml")


def commit(profile: str, message: str) -> str:
    """Commit what a run of a profile left for Git; gives the new commit's short name.

    Other profiles' entries of the lock stay as HEAD has them, so that none is committed without its metrics.

    Raises:
        EyasError: something unrelated is staged, stages are out of date, their code is not committed, metrics are unfit, or nothing
            changed.
    """
    load_profile(profile)
    if not message.strip():
        raise EyasError('say what the run is: make commit PROFILE=… M="…"')
    if git("ls-files", "--unmerged"):
        raise EyasError("a merge has conflicts that are not resolved; finish it first (`git status`)")
    mine = (str(LOCK_FILE), *_PLAIN, f"metrics/{profile}/")
    staged = git("diff", "--cached", "--name-only", "-z").split("\0")
    unrelated = [name for name in staged if name and not name.startswith(mine)]
    if unrelated:
        raise EyasError(
            f"staged but not part of a run: {', '.join(unrelated[:5])}; commit it on its own, or `git restore --staged` it"
        )
    _require_reproduced(profile)
    _require_committed_code(profile)
    check_metrics(profile)
    git("add", "--", f"metrics/{profile}", *(name for name in _PLAIN if Path(name).exists()))
    _stage_lock(profile)
    if not git("diff", "--cached", "--name-only"):
        raise EyasError(f"{profile}: nothing to commit; HEAD has this run already")
    git("commit", "--quiet", "-m", message)
    return git("rev-parse", "--short", "HEAD").strip()


def _require_reproduced(profile: str) -> None:
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    target = f"report@{profile}"
    try:
        with Repo(".") as repo:
            changed = sorted(repo.status(targets=[target], with_deps=True))
    except DvcException as error:
        raise EyasError(f"DVC: {error}") from error
    if changed:
        raise EyasError(
            f"out of date: {', '.join(changed)}; `make repro PROFILE={profile}` first (`dvc status --with-deps {target}` says why)"
        )


def _require_committed_code(profile: str) -> None:
    """The lock names the code by its hash: a commit that has one and not the other could not be built again."""
    stages = read_lock(LOCK_FILE.read_text(encoding="utf-8"), str(LOCK_FILE))
    read = {
        dep["path"] for name, entry in stages.items() if name.endswith(f"@{profile}") for dep in entry.get("deps", [])
    }
    code = sorted(path for path in {*read, "locks/env.json"} if not path.startswith(("data/", "metrics/")))
    changed = [line[3:] for line in git("status", "--porcelain", "--", *code).splitlines()]
    if changed:
        raise EyasError(
            f"the run was made with code that is not committed: {', '.join(changed[:5])}; commit that first"
        )


def _stage_lock(profile: str) -> None:
    """Put HEAD's lock with this profile's stages into Git's index; the file itself keeps all that it has."""
    committed = git("show", f"HEAD:{LOCK_FILE}") if git("ls-tree", "HEAD", "--", str(LOCK_FILE)) else ""
    text = with_stages_of(profile, committed, LOCK_FILE.read_text(encoding="utf-8"))
    if text.splitlines() != committed.splitlines():
        blob = git("hash-object", "-w", "--path", str(LOCK_FILE), "--stdin", given=text).strip()
        git("update-index", "--add", "--cacheinfo", f"100644,{blob},{LOCK_FILE}")
