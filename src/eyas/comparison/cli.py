"""`eyas compare A B`: the comparison as lines in the terminal or as JSON, and its gate."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from eyas.comparison.changes import Changes
from eyas.comparison.compare import Comparison, compare
from eyas.comparison.judgement import Figure
from eyas.comparison.sides import WORKSPACE, read_side
from eyas.errors import EyasError

_COLOURS = {"better": "green", "worse": "bold red", "missing": "bold red"}
_Side = Annotated[str, typer.Argument(help="REV, REV:profile, workspace, workspace:profile, or a metrics folder")]


def compare_command(
    before: _Side,
    after: _Side = WORKSPACE,
    gate: Annotated[
        bool,
        typer.Option("--gate", help="Exit with status 1 if the head is worse beyond noise, or a figure of it is gone."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which figures of AFTER are better or worse than those of BEFORE, and what changed in parameters, code and packages.

    Where DVC's cache has both runs' outputs, acceptance lengths are paired by prompt; elsewhere the intervals decide. Speeds of
    different machines are shown and not gated.
    """
    result = compare(read_side(before), read_side(after))
    printed = Console(highlight=False)
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2, sort_keys=True))
    else:
        _show(printed, result)
    if gate and result.regressions:
        worse = ", ".join(f"{line.name} ({line.word})" for line in result.regressions)
        raise EyasError(f"{result.after} does not pass against {result.before}: {worse}")


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    interval = "" if figure.low == figure.high else f" ({figure.low:,.3f} to {figure.high:,.3f})"
    return f"{figure.value:,.3f}{interval}"


def _show(printed: Console, result: Comparison) -> None:
    printed.print(f"[bold]{escape(result.after)} against {escape(result.before)}[/]")
    for line in result.lines:
        colour = _COLOURS.get(line.word, "default")
        values = f"{_figure(line.before)} → {_figure(line.after)}"
        printed.print(f"  [{colour}]{line.word}[/]  {escape(line.name)}: {values}, {line.how}", soft_wrap=True)
    _differences(printed, "figures without an interval that differ", result.others)
    _changes(printed, result.changes)


def _changes(printed: Console, changed: Changes) -> None:
    _differences(printed, "machine", changed.machine)
    _differences(printed, "parameters", changed.params)
    _differences(printed, "packages", changed.packages)
    for stage, paths in changed.code.items():
        printed.print(f"code of {stage}: {escape(', '.join(paths))}", soft_wrap=True)


def _differences(printed: Console, title: str, values: dict[str, tuple[Any, Any]]) -> None:
    if not values:
        return
    printed.print(f"\n[bold]{title}[/]")
    for key, (a, b) in values.items():
        printed.print(f"  {escape(key)}: {escape(_told(a))} → {escape(_told(b))}", soft_wrap=True)


def _told(value: Any) -> str:
    return "–" if value is None else f"{value:,.6g}" if isinstance(value, float) else str(value)
