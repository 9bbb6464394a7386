"""The plots: each drawn twice, as inline SVG that takes its colours from the page, and as PNG on white.

Takes `Results`; gives `Plot`s with a text that states their numbers. Same results, same bytes: no dates, a fixed salt,
matplotlib's own font and defaults whatever the user's matplotlibrc says.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import matplotlib.style
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eyas.report.results import HELDOUT, PLAIN, Cell, Epoch, Method, Results, Step
from eyas.report.verdict import interval, name_of

_MARKERS = {"plain": "s", "ngram": "D", "suffix": "P", "eagle3": "o"}
_MOST_POINTS = 300  # of a line
_LABELS_SIDE_BY_SIDE = 10  # bars whose labels have room beside each other
_WIDTH = 5.0  # inches; small, so that the text stays readable when a phone scales the plot down
_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "eyas",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "lines.linewidth": 2,
    "lines.markersize": 6,
}


@dataclass(frozen=True)
class Palette:
    """Colours by what they mean; told apart by lightness too, and never the only sign."""

    ink: str
    muted: str
    line: str
    plain: str
    ngram: str
    suffix: str
    reference: str
    eagle3: str


_ON_WHITE = Palette(
    ink="#1c2126",
    muted="#59636e",
    line="#d5dade",
    plain="#7d8791",
    ngram="#c77a12",
    suffix="#2f7d63",
    reference="#9a4a8c",
    eagle3="#1d5f9e",
)
# Stand-ins that no drawing uses otherwise; each becomes a CSS variable of the page, so the plot follows dark mode.
_STAND_IN = Palette(**{colour.name: f"#fe000{number}" for number, colour in enumerate(fields(Palette), 1)})


@dataclass(frozen=True)
class Look:
    """How a method is drawn everywhere; ``colour`` is one of `Palette`."""

    colour: str
    marker: str
    alpha: float


def looks(methods: Sequence[str]) -> dict[str, Look]:
    """By method. References share a colour and are told apart by marker and strength."""
    references = [method for method in methods if method not in _MARKERS]
    return {method: Look(method, marker, 1.0) for method, marker in _MARKERS.items() if method in methods} | {
        method: Look("reference", "^v<>"[number % 4], max(0.4, 1 - 0.3 * number))
        for number, method in enumerate(references)
    }


@dataclass(frozen=True)
class Plot:
    """One figure of the page; ``png`` is written beside it as ``<name>.png``."""

    name: str
    title: str
    alt: str
    svg: Markup
    png: bytes


def _axes(ax: Axes, colours: Palette) -> None:
    ax.tick_params(colors=colours.muted, labelcolor=colours.ink, length=0)
    for spine in ax.spines.values():
        spine.set_color(colours.line)
    ax.xaxis.label.set_color(colours.muted)
    ax.yaxis.label.set_color(colours.muted)


def _legend(ax: Axes, colours: Palette, columns: int = 3) -> None:
    """Above the plot, where it covers no data."""
    ax.legend(
        frameon=False, labelcolor=colours.ink, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0
    )


def _plot(name: str, title: str, alt: str, height: float, draw: Callable[[Axes, Palette], None]) -> Plot:
    def save(colours: Palette, form: str, **options: object) -> bytes:
        with matplotlib.style.context("default"), mpl.rc_context(_RC):
            figure = Figure(figsize=(_WIDTH, height), layout="constrained")
            draw(figure.add_subplot(), colours)
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form, **options)  # type: ignore[arg-type]
            return buffer.getvalue()

    no_date = {"Date": None, "Creator": None, "Format": None, "Type": None}
    drawn = save(_STAND_IN, "svg", transparent=True, metadata=no_date).decode()
    png = save(_ON_WHITE, "png", dpi=200, facecolor="white", metadata={"Software": None})
    return Plot(name, title, alt, _inline(drawn, name, alt), png)


def _inline(drawn: str, name: str, alt: str) -> Markup:
    """Make matplotlib's SVG file a part of a page: no header, ids of its own, colours by CSS variable, a text for readers."""
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", drawn[drawn.index("<svg") :], flags=re.S)
    body = body[body.index(">") + 1 :]
    view = re.search(r'viewBox="([^"]+)"', drawn)
    assert view is not None  # matplotlib always writes it
    for colour in fields(_STAND_IN):
        body = body.replace(getattr(_STAND_IN, colour.name), f"var(--{colour.name})")
    body = re.sub(r'\bid="|(?<=href=")#|(?<=url\()#', lambda match: f"{match[0]}{name}-", body)
    return Markup('<svg viewBox="{}" role="img" aria-label="{}">{}').format(view[1], alt, Markup(body.strip()))


def _loss(epochs: list[Epoch]) -> Plot:
    def draw(ax: Axes, colours: Palette) -> None:
        _axes(ax, colours)
        ax.grid(axis="y", color=colours.line, linewidth=0.8)
        x = [e.epoch for e in epochs]
        for values, colour, marker, label in (
            ([e.train_loss for e in epochs], colours.plain, "s", "training"),
            ([e.heldout_loss for e in epochs], colours.eagle3, "o", "held out"),
        ):
            ax.plot(x, values, color=colour, marker=marker, label=label)
        ax.set_xticks(x)
        ax.set_xlabel("epoch")
        ax.set_ylabel("loss")
        _legend(ax, colours)

    told = "; ".join(f"epoch {e.epoch}: training {e.train_loss:.3f}, held out {e.heldout_loss:.3f}" for e in epochs)
    return _plot("loss", "Loss by epoch", f"Line plot of the loss by epoch. {told}.", 3.1, draw)


def _thinned(steps: list[Step]) -> list[tuple[float, float]]:
    """Step and loss; of a long run the means of as many bins as a plot can show."""
    bins = min(_MOST_POINTS, len(steps))
    edges = [len(steps) * i // bins for i in range(bins + 1)]
    some = [steps[start:end] for start, end in pairwise(edges)]
    return [(sum(s.step for s in part) / len(part), sum(s.loss for s in part) / len(part)) for part in some]


def _loss_by_step(steps: list[Step]) -> Plot:
    points = _thinned(steps)
    ends = [before.step for before, after in pairwise(steps) if after.epoch != before.epoch]

    def draw(ax: Axes, colours: Palette) -> None:
        _axes(ax, colours)
        ax.grid(axis="y", color=colours.line, linewidth=0.8)
        for end in ends:
            ax.axvline(end, color=colours.muted, linewidth=1, linestyle=(0, (1, 2)))
        ax.plot([step for step, _ in points], [loss for _, loss in points], color=colours.eagle3, linewidth=1.4)
        ax.set_xlabel("step" + (", dotted where an epoch ends" if ends else ""))
        ax.set_ylabel("training loss")

    # single steps are noisy: the text has the means around a few places
    tenth = max(1, len(steps) // 10)
    starts = sorted({min(len(steps) - tenth, round(i * (len(steps) - tenth) / 4)) for i in range(5)})
    told = "; ".join(
        f"steps {part[0].step} to {part[-1].step}: {sum(s.loss for s in part) / len(part):.3f}"
        for part in (steps[start : start + tenth] for start in starts)
    )
    alt = f"Line plot of the training loss by step, over {steps[-1].step} steps. Means: {told}."
    return _plot("steps", "Training loss by step", alt, 3.1, draw)


def _heldout(epochs: list[Epoch], served: float) -> Plot:
    best = max(epochs, key=lambda e: e.heldout_acceptance_length)

    def draw(ax: Axes, colours: Palette) -> None:
        _axes(ax, colours)
        ax.grid(axis="y", color=colours.line, linewidth=0.8)
        x = [e.epoch for e in epochs]
        y = [e.heldout_acceptance_length for e in epochs]
        ax.plot(x, y, color=colours.eagle3, marker="o", label="simulated")
        ax.axhline(served, color=colours.muted, linewidth=1.2, linestyle=(0, (4, 3)), label=f"served, {served:.2f}")
        ax.plot([best.epoch], [best.heldout_acceptance_length], "o", ms=12, mfc="none", mec=colours.eagle3, mew=1.5)
        ax.annotate(
            f"{best.heldout_acceptance_length:.2f}, kept",
            (best.epoch, best.heldout_acceptance_length),
            (0, 11),
            textcoords="offset points",
            ha="right" if best.epoch == x[-1] and len(x) > 1 else "center",
            color=colours.ink,
        )
        ax.margins(y=0.25)
        ax.set_xticks(x)
        ax.set_xlabel("epoch")
        ax.set_ylabel("tokens per target step")
        _legend(ax, colours)

    told = ", ".join(f"epoch {e.epoch}: {e.heldout_acceptance_length:.2f}" for e in epochs)
    alt = f"Line plot of held-out acceptance length by epoch. {told}; epoch {best.epoch} was kept. Served by vLLM: {served:.2f}."
    return _plot("heldout", "Held-out acceptance length by epoch", alt, 3.1, draw)


def _acceptance(results: Results) -> Plot:
    rows, methods = results.positions, results.methods[1:]
    look, width = looks(methods), 0.8 / len(methods)

    def draw(ax: Axes, colours: Palette) -> None:
        _axes(ax, colours)
        crowded = len(methods) * len(rows) > _LABELS_SIDE_BY_SIDE
        for number, method in enumerate(methods):
            shares = [row.share(method) for row in rows]
            bars = ax.bar(
                [row.position + (number - (len(methods) - 1) / 2) * width for row in rows],
                shares,
                0.93 * width,
                color=getattr(colours, look[method].colour),
                alpha=look[method].alpha,
                label=name_of(method),
            )
            ax.bar_label(
                bars, [f"{share:.0%}" for share in shares], padding=2, color=colours.ink, rotation=90 if crowded else 0
            )
        ax.set_xticks([row.position for row in rows])
        ax.set_xlabel("position in the draft")
        ax.set_ylabel("accepted")
        ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        ax.margins(y=0.22 if crowded else 0.12)
        _legend(ax, colours)

    told = "; ".join(
        f"position {row.position}: "
        + ", ".join(f"{name_of(method)} {row.share(method):.1%}" for method in reversed(methods))
        for row in rows
    )
    alt = f"Bar plot of the share of draft tokens accepted by position. {told}."
    return _plot("acceptance", "Acceptance by position", alt, 3.1, draw)


def _speed(methods: dict[str, Method]) -> Plot:
    look = looks(list(methods))

    def draw(ax: Axes, colours: Palette) -> None:
        _axes(ax, colours)
        shown = list(reversed(methods))
        values = [methods[name].output_tokens_per_s for name in shown]
        bars = ax.barh(
            [name_of(name) for name in shown],
            values,
            0.62,
            color=[getattr(colours, look[name].colour) for name in shown],
        )
        for bar, name in zip(bars, shown, strict=True):
            bar.set_alpha(look[name].alpha)
        labels = [f"{methods[name].output_tokens_per_s:,.1f}  ({methods[name].speedup:.2f}×)" for name in shown]
        ax.bar_label(bars, labels, padding=4, color=colours.ink)
        ax.set_xlim(0, max(values) * 1.45)  # room for the labels
        ax.set_xlabel("output tokens per second")

    told = ", ".join(
        f"{name_of(n)} {m.output_tokens_per_s:,.1f} ({m.speedup:.2f} times plain)" for n, m in methods.items()
    )
    alt = f"Bar plot of output tokens per second. {told}."
    return _plot("speed", "Speed", alt, 1.3 + 0.6 * len(methods), draw)


def _sets(by_set: dict[str, dict[str, Method]], methods: Sequence[str]) -> Plot:
    names, look, apart = list(by_set), looks(methods), 0.68 / len(methods)

    def draw(ax: Axes, colours: Palette) -> None:
        _axes(ax, colours)
        ax.grid(axis="x", color=colours.line, linewidth=0.8)
        for number, method in enumerate(methods):
            offset = ((len(methods) - 1) / 2 - number) * apart
            rows = [
                (len(names) - 1 - i, by_set[name][method]) for i, name in enumerate(names) if method in by_set[name]
            ]
            ax.errorbar(
                [m.acceptance_length for _, m in rows],
                [y + offset for y, _ in rows],
                xerr=(
                    [max(m.acceptance_length - m.acceptance_length_low, 0) for _, m in rows],
                    [max(m.acceptance_length_high - m.acceptance_length, 0) for _, m in rows],
                ),
                fmt=look[method].marker,
                color=getattr(colours, look[method].colour),
                alpha=look[method].alpha,
                elinewidth=2,
                label=name_of(method),
            )
        ax.axvline(1, color=colours.muted, linewidth=1.2, linestyle=(0, (4, 3)), label="plain")
        ax.set_yticks(range(len(names)), list(reversed(names)))
        ax.set_ylim(-0.6, len(names) - 0.4)
        ax.set_xlabel("tokens per target step, 95% interval")
        _legend(ax, colours)

    told = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{name_of(method)} {by_set[name][method].acceptance_length:.2f} ({interval(by_set[name][method])})"
            for method in reversed(methods)
            if method in by_set[name]
        )
        for name in names
    )
    alt = f"Dot plot of acceptance length with its 95% interval by prompt set. {told}. Plain decoding is 1."
    height = 1.3 + 0.25 * len(names) * max(2, len(methods))
    return _plot("sets", "Acceptance length by prompt set", alt, height, draw)


_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))


def _grid(cells: list[Cell]) -> Plot:
    """Speed-up by requests at a time; a line for each method and k, k told by its dashes."""
    lines: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        if cell.method != PLAIN:
            lines.setdefault((cell.method, cell.k), []).append(cell)
    ks = sorted({k for _, k in lines})
    look = looks(list(dict.fromkeys(method for method, _ in lines)))

    def draw(ax: Axes, colours: Palette) -> None:
        _axes(ax, colours)
        ax.grid(axis="y", color=colours.line, linewidth=0.8)
        requests = sorted({cell.concurrency for cell in cells})
        for (method, k), served in lines.items():
            ax.plot(
                [requests.index(cell.concurrency) for cell in served],
                [cell.speedup for cell in served],
                color=getattr(colours, look[method].colour),
                marker=look[method].marker,
                alpha=look[method].alpha,
                linestyle=_DASHES[ks.index(k) % len(_DASHES)],
                label=f"{name_of(method)}, k = {k}",
            )
        ax.axhline(1, color=colours.muted, linewidth=1.2, linestyle=(0, (4, 3)))
        ax.set_xticks(range(len(requests)), [str(r) for r in requests])
        ax.set_xlabel("requests at a time")
        ax.set_ylabel("speed against plain")
        _legend(ax, colours, columns=2)

    told = "; ".join(
        f"{name_of(method)} with k = {k}: "
        + ", ".join(f"{cell.concurrency} requests {cell.speedup:.2f} times" for cell in served)
        for (method, k), served in lines.items()
    )
    return _plot(
        "grid",
        "Speed by requests at a time and k",
        f"Line plot of the speed against plain decoding. {told}.",
        3 + 0.1 * len(lines),  # the legend's rows
        draw,
    )


def draw_plots(results: Results) -> dict[str, Plot]:
    """Draw all plots, by name."""
    bench, by_set, cells = results.benchmark, results.by_set(), results.cells()
    plots = [
        _sets(by_set, results.methods[1:]),
        _acceptance(results),
        _speed(by_set[HELDOUT]),
        *([_grid(cells)] if len(cells) > len(bench.grid) else []),
        _loss_by_step(results.steps),
        _loss(results.epochs),
        _heldout(results.epochs, bench.eagle3.acceptance_length),
    ]
    return {plot.name: plot for plot in plots}
