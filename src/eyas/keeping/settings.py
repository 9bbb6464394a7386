"""What a clone needs to be told once, because neither Git nor DVC carries it: the merge driver, hashing threads, the state database."""

from __future__ import annotations

import os
from pathlib import Path

from eyas.errors import EyasError
from eyas.keeping.cache import git

_DRIVER = ".venv/bin/eyas cache merge-lock %O %A %B"
_MOST_JOBS = 32


def set_up_clone() -> list[str]:
    """Set what is not set yet; gives a line for each thing that was.

    Raises:
        EyasError: Git or DVC refuses.
    """
    from dvc.config import Config, ConfigError

    done = []
    if _DRIVER not in git("config", "--local", "--default", "", "--get", "merge.eyas-lock.driver"):
        git("config", "--local", "merge.eyas-lock.name", "dvc.lock, stage by stage")
        git("config", "--local", "merge.eyas-lock.driver", _DRIVER)
        done.append("dvc.lock is merged stage by stage")
    try:
        config = Config.from_cwd()
        with config.edit("local") as local:
            core = local.setdefault("core", {})
            if "checksum_jobs" not in core:
                core["checksum_jobs"] = jobs = hashing_jobs()
                done.append(f"DVC hashes with {jobs} threads")
            if "site_cache_dir" not in core:
                # beside the cache: DVC's own choice is /var/tmp, which a container loses, and then everything is hashed again
                core["site_cache_dir"] = str(Path(".dvc/tmp/state").resolve())
                done.append("DVC's state database is in .dvc/tmp/state")
    except (ConfigError, OSError) as error:
        raise EyasError(f".dvc/config.local: {error}") from error
    return done


def hashing_jobs() -> int:
    """Threads for hashing: MD5 keeps one core busy for each file."""
    return min(_MOST_JOBS, len(os.sched_getaffinity(0)))
