"""What a profile's run came to, as a table in the terminal. Stages that have not run yet are left out.

Takes ``metrics/<profile>/``; gives rich renderables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from eyas.errors import EyasError
from eyas.metrics import STAGES, parse_metrics

_METHODS = {"plain": "plain", "ngram": "n-gram", "eagle3": "draft head"}


@dataclass(frozen=True)
class _Figure:
    label: str
    stage: str
    key: str
    form: str


_FIGURES = (
    _Figure("conversations kept", "prepare", "kept", "{:,.0f}"),
    _Figure("… for training", "prepare", "train", "{:,.0f}"),
    _Figure("… for validation", "prepare", "validation", "{:,.0f}"),
    _Figure("rejected rows", "prepare", "rejected", "{:,.0f}"),
    _Figure("generated tokens", "respond", "tokens", "{:,.0f}"),
    _Figure("answers that loop", "respond", "looped_share", "{:.1%}"),
    _Figure("training rows", "encode", "train_rows", "{:,.0f}"),
    _Figure("validation rows", "encode", "validation_rows", "{:,.0f}"),
    _Figure("supervised tokens", "encode", "supervised_tokens", "{:,.0f}"),
    _Figure("recorded tokens", "extract", "tokens", "{:,.0f}"),
    _Figure("bytes a token", "extract", "bytes_per_token", "{:,.0f}"),
    _Figure("extraction, tokens/s", "extract", "tokens_per_s", "{:,.0f}"),
    _Figure("greedy tokens re-derived", "extract", "head_parity", "{:.4f}"),
    _Figure("… near-ties counted", "extract", "head_parity_ties", "{:.4f}"),
    _Figure("log-probability difference", "extract", "logprob_difference", "{:.4f}"),
    _Figure("draft vocabulary coverage", "vocab", "coverage", "{:.2%}"),
    _Figure("training, tokens/s", "train", "tokens_per_s", "{:,.0f}"),
    _Figure("held-out acceptance length", "train", "heldout_acceptance_length", "{:.3f}"),
)


def summary(profile: str, root: Path = Path("metrics")) -> Group:
    """The tables for one profile.

    Raises:
        EyasError: no stage has run, or a metrics file is unsound.
    """
    folder = root / profile
    metrics = {stage: parse_metrics(file) for stage in STAGES if (file := folder / f"{stage}.json").is_file()}
    if not metrics:
        raise EyasError(f"{folder}: no metrics yet; `make repro PROFILE={profile}` makes them")
    tables = [_figures(profile, metrics)]
    if "benchmark" in metrics:
        tables.append(_benchmark(metrics["benchmark"]))
    tables.append(_times(folder / "provenance"))
    return Group(*tables)


def _figures(profile: str, metrics: dict[str, dict[str, Any]]) -> Table:
    table = Table("figure", title=f"{profile}: the run", title_justify="left", title_style="bold")
    table.add_column("value", justify="right")
    stage = ""
    for figure in _FIGURES:
        value = metrics.get(figure.stage, {}).get(figure.key)
        if isinstance(value, int | float):
            if stage and stage != figure.stage:
                table.add_section()
            stage = figure.stage
            table.add_row(figure.label, figure.form.format(value))
    return table


def _benchmark(benchmark: dict[str, Any]) -> Table:
    table = Table("decoding", title="serving held-out prompts", title_justify="left", title_style="bold")
    for name in ("acceptance length (95 %)", "output tokens/s", "speed-up (95 %)", "identical output"):
        table.add_column(name, justify="right")
    measured = {key: value for key, value in benchmark.items() if isinstance(value, dict) and "speedup" in value}
    # other drafters stand between n-gram and the head, as in the benchmark's own table
    others = sorted(measured.keys() - _METHODS.keys())
    order = ["plain", "ngram", *others, "eagle3"]
    for key in [name for name in order if name in measured]:
        method, name = measured[key], _METHODS.get(key, key)
        table.add_row(
            name,
            _number(method.get("acceptance_length"), "{:.2f}") + _span(method, "acceptance_length"),
            _number(method.get("output_tokens_per_s"), "{:,.0f}"),
            _number(method.get("speedup"), "{:.2f}x") + _span(method, "speedup"),
            _number(method.get("identical_share"), "{:.0%}"),
        )
    return table


def _span(method: dict[str, Any], key: str) -> str:
    low, high = method.get(f"{key}_low"), method.get(f"{key}_high")
    return f" ({low:.2f} to {high:.2f})" if low is not None and high is not None and low != high else ""


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "-"


def _times(folder: Path) -> Table:
    table = Table("stage", title="times", title_justify="left", title_style="bold", show_footer=True)
    table.columns[0].footer = "all"
    table.add_column("seconds", justify="right")
    table.add_column("peak memory, MiB", justify="right")
    total = 0.0
    for stage in STAGES:
        file = folder / f"{stage}.json"
        if not file.is_file():
            continue
        ran = json.loads(file.read_text())
        total += ran["wall_seconds"]
        table.add_row(stage, f"{ran['wall_seconds']:,.1f}", f"{ran['peak_memory_mib']:,.0f}")
    table.columns[1].footer = f"{total:,.1f}"
    return table
