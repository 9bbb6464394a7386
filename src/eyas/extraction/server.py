"""A running vLLM server as the engine that answers: what is at the URL, and whether it serves the target.

Nothing is sent to any other host: proxies of the environment are not used, redirects are not followed.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eyas.console import console
from eyas.errors import EyasError
from eyas.params import Machine, TargetParams

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SHORT_S = 10.0  # longest wait for a connection, and for what a server answers at once
NEEDED = "vLLM 0.10.2 or later"  # the first that returns token ids


@dataclass(frozen=True)
class Server:
    """A vLLM server that serves the target."""

    root: str  # URL, without /v1
    model: str
    version: str  # of vLLM
    concurrency: int
    timeout_s: float


def open_server(endpoint: str, machine: Machine, target: TargetParams, directory: Path) -> Server:
    """Find out what serves there.

    Args:
        endpoint: base URL, with or without `/v1`.
        machine: requests at a time, patience.
        target: what must be served, and how long a context.
        directory: the target's, by whose path or name a server may know it.

    Raises:
        EyasError: nothing answers there, it is not vLLM, or it serves another model or too short a context.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EyasError(f"machine.endpoint: {endpoint!r} is not a URL such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise EyasError("machine.endpoint: no password in the URL, which is recorded; set the key in OPENAI_API_KEY")
    root = endpoint.rstrip("/").removesuffix("/v1").rstrip("/")
    version, cards = asyncio.run(_look(root))
    card = _served(root, cards, target.source, directory)
    longest = card.get("max_model_len") or 0
    if longest < target.max_model_len:
        raise EyasError(
            f"{root}: {card['id']} is served with a context of {longest} tokens, target.max_model_len is "
            f"{target.max_model_len}; start the server with --max-model-len {target.max_model_len}"
        )
    console.print(f"vLLM {version} at {root} serves {card['id']}", markup=False, soft_wrap=True)
    return Server(root, card["id"], version, machine.endpoint_concurrency, machine.endpoint_timeout_s)


async def _look(root: str) -> tuple[str, list[dict[str, Any]]]:
    """Version of vLLM, and the cards of what it serves."""
    import openai

    version: Any = None
    cards: Any = None
    async with client_of(root, SHORT_S, 0) as client:
        try:
            cards = await client.get("/models", cast_to=object)
            version = await client.get(f"{root}/version", cast_to=object)
        except openai.APIConnectionError as error:
            raise EyasError(
                f"machine.endpoint: no server answers at {root} ({error.__cause__ or error}); start one with `vllm serve`, or "
                "remove `endpoint` from machine.yaml to run vLLM in the stage itself"
            ) from error
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise EyasError(key_refused(root)) from None
            if error.status_code >= 500:
                raise EyasError(
                    f"machine.endpoint: {root} answers with status {error.status_code}; wait until the server is ready"
                ) from error
        except ValueError:
            pass  # not JSON
    try:
        return version["version"].split("+")[0], [
            card for card in cards["data"] if card["id"] and not card.get("parent")
        ]
    except (KeyError, TypeError, AttributeError):
        raise EyasError(
            f"machine.endpoint: what answers at {root} is not a vLLM server (its /v1/models and /version are others); Eyas needs {NEEDED}"
        ) from None


def _served(root: str, cards: list[dict[str, Any]], source: str, directory: Path) -> dict[str, Any]:
    """The card of the target: the one whose id or root is the target's source, its directory, or the last part of either."""
    names = {source, str(directory), str(directory.resolve())}
    names |= {name.rstrip("/").rsplit("/", 1)[-1] for name in names}
    for card in cards:
        own = [str(card["id"]), str(card.get("root") or "")]
        if names & {*own, *(name.rstrip("/").rsplit("/", 1)[-1] for name in own)}:
            return card
    served = ", ".join(f"{card['id']} (from {card.get('root')})" for card in cards) or "nothing"
    raise EyasError(
        f"machine.endpoint: {root} serves {served}, but the target is {source}; if they are the same weights, start the server with "
        f"--served-model-name {source}"
    )


def client_of(root: str, timeout_s: float, retries: int) -> AsyncOpenAI:
    """A client of the server at a URL (without /v1), with the key of the variable OPENAI_API_KEY if there is one."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

    return AsyncOpenAI(
        base_url=f"{root}/v1",
        api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
        timeout=Timeout(timeout_s, connect=min(timeout_s, SHORT_S)),
        max_retries=retries,
        http_client=DefaultAsyncHttpxClient(trust_env=False, follow_redirects=False),
    )


def key_refused(root: str) -> str:
    """What to say where a server wants another key; its own words may repeat a part of ours."""
    return f"machine.endpoint: {root} does not accept the API key; set the server's in the variable OPENAI_API_KEY"
