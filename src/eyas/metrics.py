"""The one check of ``metrics/<profile>``: what DVC's readers drop or misread in silence is named and refused.

Takes a profile's folder; gives its files. Which keys and series a stage writes is listed here, and tests hold the list against
the committed metrics.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.errors import EyasError

STAGES = ("prepare", "respond", "encode", "extract", "vocab", "train", "benchmark", "report")
_METHOD = (
    *("acceptance_length", "acceptance_length_low", "acceptance_length_high"),
    *("output_tokens_per_s", "speedup", "identical_share"),
)
KEYS: dict[str, tuple[str, ...]] = {
    "prepare": ("kept", "train", "validation", "rejected"),
    "respond": ("conversations", "tokens", "looped_share"),
    "encode": ("train_rows", "validation_rows", "supervised_tokens"),
    "extract": ("head_parity", "head_parity_ties", "logprob_difference", "tokens", "bytes_per_token"),
    "vocab": ("coverage",),
    "train": ("heldout_acceptance_length", "tokens_per_s"),
    "benchmark": tuple(f"{method}.{key}" for method in ("plain", "ngram", "eagle3") for key in _METHOD),
    "report": ("plots",),
}
"""Dotted keys that each stage always writes; it may write more."""
SERIES: dict[str, tuple[str, ...]] = {
    "train_steps.csv": ("step", "loss"),
    "train_epochs.csv": ("epoch", "train_loss", "heldout_loss", "heldout_acceptance_length"),
    "acceptance.csv": ("position", "ngram", "eagle3"),
}
"""Columns that each plot series always has; it may have more."""


def parse_metrics(file: Path) -> dict[str, Any]:
    """One metrics file, or one error for what is wrong with it; see `parse_metrics_text`."""
    return parse_metrics_text(_ascii(file), str(file))


def parse_metrics_text(text: str, name: str) -> dict[str, Any]:
    """The content of a metrics file.

    Raises:
        EyasError: not ASCII, not JSON, not an object, or a NaN or infinite number; names the file and the key.
    """
    if not text.isascii():
        raise EyasError(f"{name}: not ASCII, which DVC takes for a binary file")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise EyasError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise EyasError(f"{name}: holds {type(content).__name__}, not an object of metrics")
    for key, value in leaves(content):
        if isinstance(value, float) and not math.isfinite(value):
            raise EyasError(f"{name}: {key} is {value}")
        if value is None or isinstance(value, list):
            raise EyasError(f"{name}: {key} is {'null' if value is None else 'a list'}, which DVC drops in silence")
    return content


def _ascii(file: Path) -> str:
    try:
        return file.read_bytes().decode("ascii")
    except UnicodeDecodeError as error:
        raise EyasError(f"{file}: byte {error.start} is not ASCII, which DVC takes for a binary file") from None


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of all that is no mapping."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else key)
    else:
        yield path, value


def check_series(file: Path) -> None:
    """Check one plot series: a header, rows of its length, finite numbers.

    A cell may be a word where the header does not promise a number (a method's or set's name), and a column may be empty as a whole.

    Raises:
        EyasError: names the file, the line and the column.
    """
    lines = list(csv.reader(_ascii(file).splitlines()))
    if len(lines) < 2:
        raise EyasError(f"{file}: no rows")
    header = lines[0]
    missing = [name for name in SERIES.get(file.name, ()) if name not in header]
    if missing:
        raise EyasError(f"{file}: no column {', '.join(missing)}")
    for number, row in enumerate(lines[1:], 2):
        if len(row) != len(header):
            raise EyasError(f"{file}, line {number}: {len(row)} cells where the header has {len(header)}")
    # one that no row fills is what this machine cannot know, such as the share of a GPU's peak on a CPU
    filled = {name for name, *cells in zip(*lines, strict=True) if any(cells)} | set(SERIES.get(file.name, ()))
    for number, row in enumerate(lines[1:], 2):
        for name, cell in zip(header, row, strict=True):
            if name not in filled:
                continue
            _check_cell(cell, f"{file}, line {number}: {name}", name in SERIES.get(file.name, ()))


def _check_cell(cell: str, where: str, promised: bool) -> None:
    try:
        finite = math.isfinite(float(cell))
    except ValueError:
        if promised or not cell:
            raise EyasError(f"{where} is {cell!r}, not a number") from None
        return
    if not finite:
        raise EyasError(f"{where} is {cell}")


def check_metrics(profile: str, root: Path = Path("metrics")) -> list[Path]:
    """Check that every stage of a profile left sound metrics and series, and return their files.

    Raises:
        EyasError: all faults at once, a line each.
    """
    folder = root / profile
    # series beyond those that are known are checked too
    series = sorted({*SERIES, *(file.name for file in folder.glob("*.csv"))})
    files = [*(folder / f"{stage}.json" for stage in STAGES), *(folder / name for name in series)]
    faults = []
    for file in files:
        if not file.is_file():
            stage = file.stem.replace("train_steps", "train").replace("train_epochs", "train")
            stage = "benchmark" if stage == "acceptance" else stage
            faults.append(f"{file}: missing; `dvc repro {stage}@{profile}` makes it")
            continue
        try:
            _check(file)
        except EyasError as error:
            faults.append(str(error))
    if faults:
        raise EyasError("\n".join(faults))
    return files


def _check(file: Path) -> None:
    if file.suffix == ".csv":
        return check_series(file)
    written = {key for key, _ in leaves(parse_metrics(file))}
    missing = [key for key in KEYS[file.stem] if key not in written]
    if missing:
        raise EyasError(f"{file}: {', '.join(missing)} missing, which the {file.stem} stage always writes")
    return None
