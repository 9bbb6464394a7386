"""What the stages measured, read and checked.

Takes ``metrics/<profile>/``; gives `Results`. Figures that the report is about must be there and finite; what a stage
counts beyond them is kept as it is.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from eyas.errors import EyasError

STAGES = ("prepare", "respond", "encode", "extract", "vocab", "train", "benchmark")
HELDOUT = "heldout"
PLAIN, NGRAM, EAGLE3 = "plain", "ngram", "eagle3"  # always served; suffix decoding and references where a profile asks
Comparison = Literal["better", "worse", "not distinguishable"]
_T = TypeVar("_T")


class _Measured(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


class Acceptance(_Measured):
    """Emitted tokens per target step, with the 95% interval."""

    acceptance_length: float = Field(gt=0)
    acceptance_length_low: float
    acceptance_length_high: float


class Method(Acceptance):
    """One way of decoding over one set of prompts."""

    output_tokens_per_s: float = Field(gt=0)
    speedup: float = Field(gt=0)
    speedup_low: float | None = None
    speedup_high: float | None = None
    step_cost: float = Field(gt=0)  # in plain steps; also the acceptance length at which the method breaks even
    identical_share: float
    looped_share: float | None = None
    acceptance_length_without_loops: float | None = None
    target_steps: int | None = None
    drafted_steps: int | None = None
    acceptance_by_position_all_steps: dict[str, float] = {}


class Extraction(_Measured):
    """The self-check of the hidden states, and what they cost."""

    head_parity: float
    head_parity_ties: float
    logprob_difference: float
    tokens: int
    bytes_per_token: float
    tokens_per_s: float | None = None  # where nothing was recorded in the last run, there is no speed


class Vocabulary(_Measured):
    """Share of the supervised tokens that the draft vocabulary can express."""

    coverage: float


class Training(_Measured):
    """The kept epoch's simulated held-out acceptance and the speed of training."""

    heldout_acceptance_length: float
    tokens_per_s: float


class Served(_Measured):
    """One method at one k and one number of requests at a time."""

    acceptance_length: float = Field(gt=0)
    output_tokens_per_s: float = Field(gt=0)
    speedup: float = Field(gt=0)


@dataclass(frozen=True)
class Cell:
    """`Served` with its place in the grid."""

    method: str
    k: int
    concurrency: int
    acceptance_length: float
    output_tokens_per_s: float
    speedup: float


class OfCategory(Acceptance):
    """One method over the prompts of one category of a set."""

    prompts: int


class Benchmark(_Measured):
    """The methods over the held-out prompts, by prompt set and by category; other methods than these three are extra."""

    __pydantic_extra__: dict[str, Method | float]

    plain: Method
    ngram: Method
    eagle3: Method
    sets: dict[str, dict[str, Method]] = {}
    categories: dict[str, dict[str, dict[str, OfCategory]]] = {}
    grid: dict[str, dict[str, dict[str, Served]]] = {}


class Epoch(_Measured):
    """One line of ``train_epochs.csv``."""

    epoch: int
    train_loss: float
    heldout_loss: float
    heldout_acceptance_length: float


class Step(_Measured):
    """One line of ``train_steps.csv``."""

    step: int
    epoch: int
    loss: float


class Position(_Measured):
    """One line of ``acceptance.csv``: acceptance of the draft token at this position, by method."""

    __pydantic_extra__: dict[str, float]

    position: int
    ngram: float
    eagle3: float

    def share(self, method: str) -> float:
        """Of a method that drafts."""
        found: float = getattr(self, method)
        return found


class Provenance(_Measured):
    """How one stage ran."""

    versions: dict[str, str]
    git_commit: str
    machine: dict[str, Any]
    wall_seconds: float
    peak_memory_mib: float


class Verdicts(_Measured):
    """The benchmark's own comparison of acceptance lengths on the held-out prompts, paired by prompt."""

    __pydantic_extra__: dict[str, Comparison]

    against_plain: Comparison = Field(alias="eagle3 against plain")
    against_ngram: Comparison = Field(alias="eagle3 against ngram")

    def against(self, method: str) -> Comparison:
        """How the head stands against a method that was served with it."""
        found: Comparison = self.model_dump(by_alias=True)[f"{EAGLE3} against {method}"]
        return found


class BenchmarkProvenance(Provenance):
    """How the benchmark ran, and what it concluded; `advice` is a sentence for each method that drafts, the head first."""

    verdicts: Verdicts
    advice: list[str] = Field(min_length=1)


@dataclass(frozen=True)
class Results:
    """Everything that the page tells about one profile."""

    profile: str
    prepare: dict[str, Any]
    respond: dict[str, Any]
    encode: dict[str, Any]
    extract: Extraction
    vocab: Vocabulary
    train: Training
    benchmark: Benchmark
    steps: list[Step]
    epochs: list[Epoch]
    positions: list[Position]
    verdicts: Verdicts
    advice: list[str]
    provenance: dict[str, Provenance]

    @property
    def methods(self) -> list[str]:
        """The methods' names in the order in which they are told: plain decoding first, the head last."""
        return [PLAIN, NGRAM, *(self.positions[0].model_extra or {}), EAGLE3]

    def by_set(self) -> dict[str, dict[str, Method]]:
        """Set → method → figures, the held-out prompts first, then by name."""
        sets = self.benchmark.sets
        heldout = {name: getattr(self.benchmark, name) for name in self.methods}
        others = {
            name: {method: sets[name][method] for method in self.methods if method in sets[name]}
            for name in sorted(sets)
            if name != HELDOUT
        }
        return {HELDOUT: heldout, **others}

    def cells(self) -> list[Cell]:
        """The grid ``<method>.k<k>.c<concurrency>`` in the order of method, k and concurrency."""
        grid = self.benchmark.grid
        return [
            Cell(method, k, c, served.acceptance_length, served.output_tokens_per_s, served.speedup)
            for method in self.methods
            for k, by_c in sorted((int(name[1:]), value) for name, value in grid.get(method, {}).items())
            for c, served in sorted((int(name[1:]), value) for name, value in by_c.items())
        ]


def _checked(kind: type[_T], value: Any, file: Path, stage: str, profile: str) -> _T:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its content"
        raise EyasError(
            f"{file}: {place}: {first['msg']}; run the {stage} stage again (`dvc repro -f -s {stage}@{profile}`)"
        ) from None


def _text(file: Path, stage: str, profile: str) -> str:
    if not file.is_file():
        raise EyasError(f"{file}: no such file; the {stage} stage makes it (`dvc repro {stage}@{profile}`)")
    return file.read_text(encoding="utf-8")


def read_results(metrics: Path, profile: str) -> Results:
    """Read the metrics, plot series and provenance of all stages before the report.

    Raises:
        EyasError: a file is missing, or lacks a figure, or holds one that is not finite; names the stage that makes it.
    """

    def values(kind: type[_T], stage: str, name: str) -> _T:
        file = metrics / name
        try:
            content = json.loads(_text(file, stage, profile))
        except json.JSONDecodeError as error:
            raise EyasError(
                f"{file}: not valid JSON ({error}); run the {stage} stage again (`dvc repro -f -s {stage}@{profile}`)"
            ) from None
        return _checked(kind, content, file, stage, profile)

    def series(kind: type[_T], stage: str, name: str) -> list[_T]:
        file = metrics / name
        rows = list(csv.DictReader(_text(file, stage, profile).splitlines()))
        if not rows:
            raise EyasError(f"{file}: no rows; run the {stage} stage again (`dvc repro -f -s {stage}@{profile}`)")
        return [_checked(kind, row, file, stage, profile) for row in rows]

    benchmark = values(BenchmarkProvenance, "benchmark", "provenance/benchmark.json")
    return Results(
        profile=profile,
        prepare=values(dict[str, Any], "prepare", "prepare.json"),
        respond=values(dict[str, Any], "respond", "respond.json"),
        encode=values(dict[str, Any], "encode", "encode.json"),
        extract=values(Extraction, "extract", "extract.json"),
        vocab=values(Vocabulary, "vocab", "vocab.json"),
        train=values(Training, "train", "train.json"),
        benchmark=values(Benchmark, "benchmark", "benchmark.json"),
        steps=series(Step, "train", "train_steps.csv"),
        epochs=series(Epoch, "train", "train_epochs.csv"),
        positions=series(Position, "benchmark", "acceptance.csv"),
        verdicts=benchmark.verdicts,
        advice=benchmark.advice,
        provenance={
            **{stage: values(Provenance, stage, f"provenance/{stage}.json") for stage in STAGES[:-1]},
            "benchmark": benchmark,
        },
    )
