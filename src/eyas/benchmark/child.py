"""What a process with an engine in it does at its end, and what its parent says of one that failed."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from eyas.console import console
from eyas.errors import EyasError


def run_and_exit(work: Callable[[], None], tell: Callable[[str], None]) -> NoReturn:
    """Do the work, then end the process at once: status 0, or 1 after an error.

    Args:
        work: may raise; an `EyasError` is for the user, anything else goes into the log, which the parent names.
        tell: takes an `EyasError`'s text.
    """
    status = 0
    try:
        work()
    except EyasError as error:
        tell(str(error))
        status = 1
    except Exception:
        traceback.print_exc()
        status = 1
    console.file.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an engine's threads and processes may keep a normal exit waiting


def ended(status: int) -> str:
    """How a process with this exit status ended, for a message."""
    return f"was killed by signal {-status} (out of memory?)" if status < 0 else f"failed with status {status}"
