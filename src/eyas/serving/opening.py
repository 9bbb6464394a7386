"""The running server that a command's `--endpoint` names; what is wrong with it is said in that option's words."""

from __future__ import annotations

from pathlib import Path

from eyas.errors import EyasError
from eyas.extraction.server import Server, open_server
from eyas.params import Machine, TargetParams


def opened(endpoint: str, profile: str, machine: Machine, target: TargetParams, directory: Path) -> Server:
    """Find out what serves there, as `eyas.extraction.server.open_server` does for a stage.

    Raises:
        EyasError: as there.
    """
    import openai

    try:
        return open_server(endpoint, machine, target, directory)
    except EyasError as error:
        if isinstance(error.__cause__, openai.APIConnectionError):
            raise EyasError(
                f"no server answers at {endpoint}; start one with `make serve PROFILE={profile}` in another terminal and wait "
                'for its "Application startup complete", or name another with --endpoint'
            ) from error
        raise EyasError(str(error).replace("machine.endpoint:", "--endpoint:", 1)) from error
