"""The command `eyas profile`: its options, and a record as tables and sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eyas.benchmark.breakeven import GOALS, BreakEven, StepTime, measured_words, unsteady_words, words
from eyas.benchmark.trace import CLASSES
from eyas.errors import EyasError
from eyas.files import write_json_atomic
from eyas.params import load_machine, load_profile

_DEFAULT_SIZES, _DEFAULT_CONTEXT = "1,8", 256


def numbers(text: str, option: str) -> list[int]:
    """``1,8,32`` as distinct positive numbers, in order.

    Raises:
        EyasError: it is something else.
    """
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise EyasError(f"{option} {text}: give positive numbers with commas between them, such as 1,8,32")
    return found


def profile_command(
    profile: Annotated[str, typer.Option(metavar="NAME", help="a name under `profiles` in params.yaml")],
    batch_sizes: Annotated[str, typer.Option(metavar="N,N", help="Sequences that decode together.")] = _DEFAULT_SIZES,
    k: Annotated[
        str | None, typer.Option("--k", metavar="N,N", help="Draft tokens a step; the profile's own if not given.")
    ] = None,
    context_length: Annotated[
        int, typer.Option(min=2, help="Tokens before each sequence's first own.")
    ] = _DEFAULT_CONTEXT,
    out: Annotated[Path | None, typer.Option(help="Write the record as JSON into this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it as PNG into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure decoding steps on this machine, and say which acceptance length speculation needs before it pays.

    For the question before a training run is paid for: needs the target, no data and no trained head. Starts one engine for
    plain decoding and two for each k.
    """
    from eyas.benchmark.profile import measure, rows_of  # it, too, starts no engine in this process

    params = load_profile(profile)
    record = measure(
        profile,
        params,
        load_machine(),
        batch_sizes=numbers(batch_sizes, "--batch-sizes"),
        k=numbers(k, "--k") if k else sorted(params.benchmark.num_speculative_tokens),
        context_length=context_length,
    )
    rows = rows_of(record)
    metrics = Path("metrics") / profile / "benchmark.json"
    main = (params.benchmark.concurrency[0], params.benchmark.num_speculative_tokens[0])
    known = json.loads(metrics.read_text()) if metrics.is_file() else {}
    record["sentences"] = sentences(rows, known, main)
    if out is not None:
        write_json_atomic(out, record)
    if plot is not None:
        from eyas.benchmark.profile_plot import draw

        draw(rows, plot)
    if as_json:
        typer.echo(json.dumps(record, indent=2, sort_keys=True, allow_nan=False))
    else:
        show(Console(highlight=False), record, rows)


def sentences(rows: list[BreakEven], metrics: dict[str, Any], main: tuple[int, int]) -> list[str]:
    """What each row means, behind it the benchmark's main figures where they are of its batch size and k, and a warning last."""
    said = []
    for row in rows:
        said.append(words(row))
        known = measured_words(row, metrics) if (row.batch_size, row.k) == main else None
        said += [known] if known else []
    unsteady = unsteady_words(rows)
    return said + ([unsteady] if unsteady else [])


def _time(time: StepTime | None) -> str:
    return "–" if time is None else f"{time.median * 1e3:,.2f} ({time.low * 1e3:,.2f} to {time.high * 1e3:,.2f})"


def _steps(rows: list[BreakEven]) -> Table:
    columns = ("batch", "k", "plain", "verify k + 1", "draft and verify", "draft")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        draft = "–" if row.draft_seconds is None else f"{row.draft_seconds * 1e3:,.2f}"
        table.add_row(str(row.batch_size), str(row.k), _time(row.plain), _time(row.verify), _time(row.step), draft)
    return table


def _needed(rows: list[BreakEven]) -> Table:
    columns = ("batch", "k", *(f"{goal:.1f}x" for goal in GOALS), "most")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        lengths = (f"{row.needed(goal):.2f}" if row.reachable(goal) else "out of reach" for goal in GOALS)
        table.add_row(str(row.batch_size), str(row.k), *lengths, str(row.k + 1))
    return table


def _where(where: dict[str, dict[str, dict[str, Any]]]) -> Table:
    cases = [(label, size, trace) for label, sizes in where.items() for size, trace in sizes.items()]
    columns = ("", *(f"{label}, batch {size}" for label, size, _ in cases))
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for kind in CLASSES:
        shares = (trace["seconds"][kind] / sum(trace["seconds"].values()) for _, _, trace in cases)
        table.add_row(kind, *(f"{share:.0%}" for share in shares))
    return table


def show(printed: Console, record: dict[str, Any], rows: list[BreakEven]) -> None:
    """Print a record."""
    head = f"{record['profile']}: {record['target']}, {record['dtype']}, {record['context_length']} tokens of context"
    printed.print(f"[bold]{escape(head)}[/]")
    for title, table in (
        ("milliseconds a step, with quartiles", _steps(rows)),
        ("acceptance length needed to be so many times as fast as plain decoding", _needed(rows)),
        ("where the time goes", _where(record["where"])),
    ):
        printed.print(f"\n{title}")
        printed.print(table)
    printed.print()
    for sentence in record["sentences"]:
        printed.print(escape(sentence), soft_wrap=True)
