"""`eyas conversations …`: what would become of files of conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from eyas.console import Progress
from eyas.conversations.faults import REJECTED, REPAIRED, BadRow
from eyas.conversations.reading import data_files, read_rows
from eyas.conversations.rules import validate
from eyas.errors import EyasError

app = typer.Typer(
    no_args_is_help=True, help="Files of conversations: what can be trained on, and what is wrong with the rest."
)
_SENTENCES = REJECTED | REPAIRED


@app.callback()
def _conversations() -> None:
    """Keeps ``check`` a command of its own while there is no second one."""


@dataclass
class Findings:
    """What became of every row of some files."""

    rows: int = 0
    kept: int = 0
    rejected: list[dict[str, Any]] = field(default_factory=list)
    repaired: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)

    def add(self, where: dict[str, Any], row: dict[str, Any] | BadRow) -> None:
        """Judge one row; ``where`` are its file and number."""
        self.rows += 1
        try:
            if isinstance(row, BadRow):
                raise row
            _, repairs = validate(row)
        except BadRow as fault:
            self.rejected.append({**where, "reason": fault.reason})
            self.details.setdefault(fault.reason, fault.detail)
            return
        self.kept += 1
        self.repaired += [{**where, "rule": rule} for rule in repairs]

    def table(self) -> Table:
        """One line for each rule that applied: how often, what it says, and where it applied first."""
        table = Table(Column("rule", no_wrap=True), "rows", "what it says", "first", box=None, padding=(0, 2, 0, 0))
        for entries, key, style in ((self.rejected, "reason", "red"), (self.repaired, "rule", "yellow")):
            by_rule: dict[str, list[dict[str, Any]]] = {}
            for entry in entries:
                by_rule.setdefault(entry[key], []).append(entry)
            for name, found in sorted(by_rule.items(), key=lambda item: (-len(item[1]), item[0])):
                first = f"{found[0].get('file', '')} row {found[0]['row']} {self.details.get(name, '')}".strip()
                table.add_row(f"[{style}]{name}[/]", f"{len(found):,}", _SENTENCES[name], escape(first))
        return table


def _rows(files: list[Path]) -> Iterator[tuple[Path, int, dict[str, Any] | BadRow]]:
    with Progress("reading", sum(file.stat().st_size for file in files), "bytes") as progress:
        for file in files:
            for number, row in read_rows(file, progress.advance):
                yield file, number, row


@app.command()
def check(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help=".jsonl, .json, .parquet, .csv, also .gz or .zst; folders and globs of these.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
    max_rejected_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The largest share of faulty rows that is still fine.")
    ] = 0.5,
) -> None:
    """Read conversations as the stage `prepare` would, and say which rows are kept, mended, or set aside, and by which rule.

    Deduplication, benchmark prompts, limits and caps come later, in `prepare`. Exit status 1 if nothing is kept, or if a
    larger share of the rows is faulty than you allow. docs/data.md explains the rules.
    """
    files = list(dict.fromkeys(file for source in sources for file in data_files(source)))
    findings = Findings()
    for file, number, row in _rows(files):
        findings.add({"file": str(file), "row": number} if len(files) > 1 else {"row": number}, row)
    summary = {
        "rows": findings.rows,
        "kept": findings.kept,
        "rejected": findings.rejected,
        "repaired": findings.repaired,
    }
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        printed = Console(highlight=False)
        printed.print(f"{findings.kept:,} of {findings.rows:,} rows are kept, {len(findings.rejected):,} are rejected")
        if findings.rejected or findings.repaired:
            printed.print(findings.table())
    if not findings.kept:
        raise EyasError(f"none of {findings.rows} rows can be used")
    if len(findings.rejected) > max_rejected_share * findings.rows:
        raise EyasError(
            f"{len(findings.rejected)} of {findings.rows} rows are faulty, more than the share of {max_rejected_share:g} that "
            "is allowed: --max-rejected-share"
        )
