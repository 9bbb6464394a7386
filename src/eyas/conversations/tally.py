"""What became of every row: counted for each source and for all of them.

Takes the `Findings` of each chunk and the `Selection`; gives the stage's metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.conversations.examine import Findings
from eyas.conversations.selection import KEPT, REASONS, Selection
from eyas.errors import EyasError


@dataclass
class Tally:
    """One source's rows; ``reasons`` counts each rule by its name, ``first`` is the first faulty row."""

    rows: int = 0
    kept: int = 0
    rejected: int = 0
    repaired: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    first: dict[str, Any] = field(default_factory=dict)

    def add(self, findings: Findings, source: str) -> list[dict[str, Any]]:
        """Count a chunk; gives the entries of rejected.jsonl for its faulty rows."""
        entries = []
        for file, number, fault in findings.faults:
            place = {"row": number} if file is None else {"file": file, "row": number}
            entries.append({"source": source, **place, "reason": fault.reason, "detail": fault.detail})
            self.faults[fault.reason] += 1
        self.first = self.first or next(iter(entries), {})
        self.rows += findings.rows
        self.rejected += len(entries)
        self.repaired += findings.repaired
        self.reasons.update(findings.reasons)
        return entries

    def check(self, most: float, where: str) -> None:
        """Stop if too large a share of the rows is faulty.

        Raises:
            EyasError: more than ``most``.
        """
        if self.rejected <= most * self.rows:
            return
        common = ", ".join(f"{name} {count}" for name, count in self.faults.most_common(3))
        file = f"{self.first['file']}, " if "file" in self.first else ""
        raise EyasError(
            f"{where}: {self.rejected} of {self.rows} rows are faulty ({common}), more than dataset.max_rejected_share = "
            f"{most}; the first is {file}row {self.first['row']}: {self.first['reason']}, {self.first['detail']}"
        )

    def merge(self, other: Tally) -> None:
        """Add another tally's counts."""
        self.rows += other.rows
        self.kept += other.kept
        self.rejected += other.rejected
        self.repaired += other.repaired
        self.reasons.update(other.reasons)
        self.faults.update(other.faults)

    def counts(self) -> dict[str, Any]:
        """The counts; rows = kept + rejected + left_out."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "rejected": self.rejected,
            "repaired": self.repaired,
            "left_out": self.rows - self.kept - self.rejected,
            "reasons": dict(self.reasons + self.faults),
        }


def dataset_metrics(
    names: Sequence[str],
    tallies: Sequence[Tally],
    selection: Selection,
    benchmark_sets: Iterable[str],
) -> dict[str, Any]:
    """The stage's metrics.

    Args:
        names: the sources; two of one name (parts of one data set) are counted together.
        tallies: what became of each source's rows before the selection.
        selection: what became of the candidates.
        benchmark_sets: for each benchmark prompt the name of its set.
    """
    total = Tally()
    by_name: dict[str, Tally] = {}
    for name, tally, counts in zip(names, tallies, selection.counts.tolist(), strict=True):
        chosen = Tally(kept=counts[KEPT], reasons=Counter(dict(zip(REASONS[1:], counts[1:], strict=True))))
        for one in (tally, chosen):
            total.merge(one)
            by_name.setdefault(name, Tally()).merge(one)
    return {
        **total.counts(),
        "train": total.kept - selection.validation,
        "validation": selection.validation,
        "multi_turn": selection.multi_turn,
        "user_turns": selection.user_turns,
        "sources": {name: tally.kept for name, tally in by_name.items()},
        "by_source": {name: tally.counts() for name, tally in by_name.items()},
        "benchmark_prompts": dict(Counter(benchmark_sets)),
    }
