"""The commands `eyas serve` and `eyas demo`: vLLM with target and head, and a look at what it accepts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from eyas.params import load_machine, load_profile

HOST, PORT = "127.0.0.1", 8000
_ProfileOption = Annotated[str, typer.Option(metavar="PROFILE", help="Whose target and head.")]


def serve_command(
    profile: _ProfileOption,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is reached from this machine only.")
    ] = HOST,
) -> None:
    """Serve a profile's target with its head, by vLLM's OpenAI server.

    Prints the whole command, then becomes it; Ctrl-C ends it. Needs what `train` makes.
    """
    from eyas.serving.serve import serve

    serve(profile, host, port)


def demo_command(
    profile: _ProfileOption,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to ask; without it, lines are read.")
    ] = None,
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="A running server of the profile's target.")
    ] = f"http://{HOST}:{PORT}",
) -> None:
    """Watch a server answer: draft tokens that the target accepted in colour, its own plain.

    The answer is greedy, and has at most `responses.max_tokens` tokens. Each line is a conversation of its own; an empty
    one or Ctrl-D ends. Where there are no colours, accepted tokens stand in [brackets].
    """
    from eyas.serving.demo import marked, show_answer  # seconds of imports
    from eyas.serving.opening import opened
    from eyas.targets.resolve import resolve_target
    from eyas.templates.chat import ChatTemplate

    params, machine = load_profile(profile), load_machine()
    target = params.target
    directory = resolve_target(target)
    server = opened(endpoint, profile, machine, target, directory)
    template = ChatTemplate(
        directory, trust_remote_code=target.trust_remote_code, variables=target.chat_template_kwargs
    )
    out = Console(highlight=False)
    out.print(Text.assemble(marked("drafted and accepted", out), " the target's own"), end="\n\n")
    for text in [prompt] if prompt is not None else _lines():
        count = asyncio.run(
            show_answer(
                server,
                template,
                text,
                max_tokens=params.responses.max_tokens,
                context=target.max_model_len,
                out=out,
            )
        )
        out.print(count.line(), style="dim", end="\n\n")


def _lines() -> Iterator[str]:
    """The user's lines up to an empty one or the end."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                typer.echo()  # the shell begins a line of its own
            return
        if not line:
            return
        yield line
