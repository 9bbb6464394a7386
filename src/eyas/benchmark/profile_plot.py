"""The plot of `eyas profile`: time of a step and needed acceptance length, by batch size."""

from __future__ import annotations

from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure

from eyas.benchmark.breakeven import BreakEven
from eyas.files import atomic_file

_LINES = ("-", "--", ":", "-.")


def draw(rows: list[BreakEven], file: Path) -> None:
    """Write a PNG; each k has its kind of line."""
    sizes = sorted({row.batch_size for row in rows})
    places = list(range(len(sizes)))
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        times, lengths = figure.subplots(1, 2)
        of_k: dict[int, list[BreakEven]] = {}
        for row in sorted(rows, key=lambda row: row.batch_size):
            of_k.setdefault(row.k, []).append(row)
        plain = [row.plain.median * 1e3 for row in next(iter(of_k.values()))]
        times.plot(places, plain, color="#7d8791", marker="s", label="plain")
        for line, (k, some) in zip(_LINES * len(of_k), of_k.items(), strict=False):
            verify = [row.verify.median * 1e3 if row.verify else float("nan") for row in some]
            times.plot(places, verify, line, color="#c77a12", marker="D", label=f"verify {k + 1}")
            step = [row.step.median * 1e3 for row in some]
            times.plot(places, step, line, color="#1d5f9e", marker="o", label=f"draft {k}, verify {k + 1}")
            needed = [row.needed() for row in some]
            lengths.plot(places, needed, line, color="#1d5f9e", marker="o", label=f"needed, k {k}")
            lengths.axhline(k + 1, linestyle=line, color="#7d8791", label=f"most, k {k}")
        times.set_ylabel("milliseconds a step")
        lengths.set_ylabel("acceptance length")
        lengths.set_ylim(bottom=1)
        times.set_ylim(bottom=0)
        for axes in (times, lengths):
            axes.set_xticks(places, [str(size) for size in sizes])
            axes.set_xlabel("batch size")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#d5dade", linewidth=0.8)
            axes.legend(frameon=False, fontsize=8)
        with atomic_file(file) as temporary:
            figure.savefig(temporary, format="png", dpi=150, facecolor="white", metadata={"Software": None})
