"""`eyas mask …`: which tokens of the data's conversations a draft head would learn from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from eyas.console import console
from eyas.conversations.faults import BadRow
from eyas.conversations.reading import read_rows
from eyas.conversations.rules import validate
from eyas.errors import EyasError
from eyas.templates.chat import ChatTemplate, TemplateRefusal
from eyas.templates.encoding import TokenRow

app = typer.Typer(no_args_is_help=True, help="Loss masks: which tokens a draft head learns from.")


@app.callback()
def _mask() -> None:
    """Keeps ``show`` a command of its own while there is no second one."""


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="Conversations: .jsonl, .json, .parquet or .csv.", show_default=False)],
    target: Annotated[Path, typer.Option(help="The target: a directory in Hugging Face layout.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many conversations.", show_default="all")
    ] = None,
    variable: Annotated[
        list[str] | None,
        typer.Option(help="Variable of the chat template, as in enable_thinking=false.", show_default=False),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the tokenizer's own code, if it has any.")] = False,
) -> None:
    """Show the tokens that the data's own answers would have a draft head learn, in colour or as JSON.

    A conversation has several rows if the template rewrites history. Rows that cannot be used are named on standard
    error; the exit status is 1 if there is nothing to show.
    """
    if not file.is_file():
        raise EyasError(f"{file}: no such file")
    if not target.is_dir():
        raise EyasError(f"{target}: no such directory; give the target's, in Hugging Face layout")
    template = ChatTemplate(target, trust_remote_code=trust_remote_code, variables=dict(map(_variable, variable or [])))
    terminal = Console(highlight=False, soft_wrap=True)
    shown = 0
    for number, rows in _masks(file, template):
        shown += 1
        for part, row in enumerate(rows, 1):
            if as_json:
                typer.echo(json.dumps(_entry(template, number, row), ensure_ascii=False))
            else:
                terminal.print(_coloured(template, row, f"row {number}, {part} of {len(rows)}"), end="\n\n")
        if shown == limit:
            break
    if not shown:
        raise EyasError(f"{file}: no row has an answer that can be shown")


def _variable(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise EyasError(f"--variable {text}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _masks(file: Path, template: ChatTemplate) -> Iterator[tuple[int, list[TokenRow]]]:
    for number, row in read_rows(file, lambda _: None):
        try:
            if isinstance(row, BadRow):
                raise row
            conversation, _ = validate(row)
            messages = [message.as_dict() for message in conversation.messages]
            rows = template.answered_rows(messages, conversation.tools, sys.maxsize)
        except BadRow as fault:
            console.print(f"row {number}: rejected, {fault}", markup=False, soft_wrap=True)
        except TemplateRefusal as refusal:
            console.print(f"row {number}: refused, {refusal}", markup=False, soft_wrap=True)
        else:
            if rows:
                yield number, rows
            else:
                console.print(f"row {number}: no answer in it", markup=False)


def _entry(template: ChatTemplate, number: int, row: TokenRow) -> dict[str, Any]:
    return {
        "row": number,
        "input_ids": row.input_ids,
        "loss_mask": [int(supervised) for supervised in row.loss_mask],
        "tokens": template.pieces(row.input_ids),
    }


def _coloured(template: ChatTemplate, row: TokenRow, title: str) -> Text:
    text = Text(f"{title}: {sum(row.loss_mask)} of {len(row.input_ids)} tokens supervised\n", style="bold")
    for piece, supervised in zip(template.pieces(row.input_ids), row.loss_mask, strict=True):
        text.append(piece, style="not bold black on green" if supervised else "not bold dim")
    return text
