"""The page: one HTML file that needs nothing but itself, and the plots as PNG beside it.

Takes `Results` and the profile's parameters; gives ``index.html`` and ``*.png``. Same results, same bytes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from eyas.params import Profile
from eyas.report.figures import draw_plots, looks
from eyas.report.results import Results, read_results
from eyas.report.verdict import advice, by_set, drafting, extraction_checks, interval, judge, name_of

_LABELS = {"reasons": "why rejected", "sources": "kept by source"}


@dataclass(frozen=True)
class Facts:
    """A titled list of label and value; one per level of a metrics file that has values of its own."""

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)


def label(name: str) -> str:
    """``tokens_per_s`` → ``tokens/s``, ``memory_gib`` → ``memory, GiB``."""
    text = re.sub(r"_per_s$", "/s", name)
    text = re.sub(r"_(g|m)ib$", lambda unit: f", {unit[1].upper()}iB", text)
    return _LABELS.get(text, text.replace("_", " ").replace("heldout", "held-out"))


def number(value: Any, name: str = "") -> str:
    """A value for readers: thousands apart, shares in percent, four digits where there is a fraction."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith(("share", "coverage")):
        return f"{value:.1%}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """``3 h 05 min``, ``4 min 12 s`` or ``8.1 s``."""
    if seconds >= 3600:
        return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"
    if seconds >= 60:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{seconds:.1f} s"


def size(count: float) -> str:
    """Bytes in the nearest binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def facts(title: str, values: Mapping[str, Any]) -> Iterator[Facts]:
    """Lay nested metrics out as lists: numbers of one level together, each inner mapping under its own name."""
    rows = [(label(name), number(value, name)) for name, value in values.items() if not isinstance(value, Mapping)]
    if rows:
        yield Facts(title, rows)
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from facts(f"{title}: {label(name)}", value)


def trained_on(results: Results, params: Profile) -> str:
    """One sentence: which head for which target, on how much of what."""
    train, prepare = results.train.model_extra or {}, results.prepare
    answers = (
        "answers that the target itself gave"
        if params.responses.mode == "regenerate"
        else "the answers that the data has"
    )
    layers = params.draft.num_layers
    counts = [
        f"{number(train['supervised_tokens'])} supervised tokens" if "supervised_tokens" in train else "",
        f"{number(train['steps'])} steps" if "steps" in train else "",
    ]
    return (
        f"An EAGLE-3 head of {layers} layer{'s' if layers > 1 else ''} with a vocabulary of {params.vocab.draft_vocab_size:,} tokens for "
        f"{params.target.source}, trained for {len(results.epochs)} epoch{'s' if len(results.epochs) > 1 else ''} on "
        f"{number(prepare.get('train', prepare.get('kept')))} conversations with {answers}"
        + "".join(f", {count}" for count in counts if count)
        + "."
    )


def contamination(results: Results) -> str:
    """What was done so that no benchmark prompt is in training; empty for a profile without benchmark sets."""
    prompts = results.prepare.get("benchmark_prompts", {})
    if not prompts:
        return ""
    held = results.prepare.get("reasons", {}).get("benchmark_prompt", 0)
    return (
        f"Contamination check: {number(sum(prompts.values()))} prompts of {', '.join(sorted(prompts))} were looked for in every user turn, "
        f"near duplicates included; {number(held) if held else 'no'} conversation{'' if held == 1 else 's'} had one"
        f"{' and stayed out of the data' if held else ''}."
    )


def serve_command(profile: str, params: Profile, target: str) -> str:
    """The shell command that serves target and head the way they were measured."""
    speculative = {
        "method": "eagle3",
        "model": f"data/{profile}/draft_head",
        "num_speculative_tokens": params.benchmark.num_speculative_tokens[0],
    }
    # an unquoted ~ is what the shell expands
    name = f"~/{shlex.quote(target[2:])}" if target.startswith("~/") else shlex.quote(target)
    parts = [
        f"vllm serve {name}",
        *([f"--revision {shlex.quote(params.target.revision)}"] if params.target.revision else []),
        *(["--trust-remote-code"] if params.target.trust_remote_code else []),
        *([f"--dtype {params.target.dtype}"] if params.target.dtype != "auto" else []),
        f"--max-model-len {params.target.max_model_len}",
        f"--speculative-config {shlex.quote(json.dumps(speculative))}",
    ]
    return " \\\n  ".join(parts)


def _provenance(results: Results) -> list[Facts]:
    """What all stages share, said once; where stages differ, each value with its stages."""

    def told(values: dict[str, str]) -> str:
        different = sorted(set(values.values()))
        if len(different) == 1:
            return different[0]
        return "; ".join(f"{value} ({', '.join(s for s in values if values[s] == value)})" for value in different)

    ran = results.provenance
    described = list(dict.fromkeys(name for stage in ran.values() for name in stage.machine))
    packages = sorted({package for stage in ran.values() for package in stage.versions})
    return [
        Facts(
            "Run",
            [
                ("git commit", told({name: stage.git_commit for name, stage in ran.items()})),
                *((label(name), told({n: number(s.machine.get(name)) for n, s in ran.items()})) for name in described),
            ],
        ),
        Facts(
            "Versions",
            [
                (package, told({n: s.versions[package] for n, s in ran.items() if package in s.versions}))
                for package in packages
            ],
        ),
    ]


def render(results: Results, params: Profile, target: str) -> tuple[str, dict[str, bytes]]:
    """Make the page's HTML and its plots.

    Returns:
        The HTML, and the PNG bytes by file name.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"duration": duration, "size": size, "number": number}
    environment.filters |= {"interval": interval, "name_of": name_of}
    plots = draw_plots(results)
    html = environment.get_template("page.html.j2").render(
        results=results,
        params=params,
        parameters=json.dumps(params.model_dump(mode="json"), indent=2, ensure_ascii=False),
        verdict=judge(results, params.benchmark.num_speculative_tokens[0]),
        methods=results.methods,
        looks=looks(results.methods),
        sets=results.by_set(),
        set_verdicts=by_set(results),
        drafting=drafting(results),
        advice=advice(results),
        cells=results.cells(),
        plots=plots,
        checks=extraction_checks(results.extract),
        extracted=list(facts("Extraction", results.extract.model_extra or {})),
        data=[
            # sources have a table of their own
            *facts("Conversations", {name: value for name, value in results.prepare.items() if name != "by_source"}),
            *facts("Responses", results.respond),
            *facts("Tokens", results.encode),
        ],
        trained=trained_on(results, params),
        contamination=contamination(results),
        sources=results.prepare.get("by_source", {}),
        vocabulary=list(facts("Draft vocabulary", results.vocab.model_dump())),
        training=list(facts("Training", results.train.model_dump())),
        stored=results.extract.tokens * results.extract.bytes_per_token,
        wall=sum(stage.wall_seconds for stage in results.provenance.values()),
        provenance=_provenance(results),
        command=serve_command(results.profile, params, target),
    )
    return html, {f"{plot.name}.png": plot.png for plot in plots.values()}


def write_report(metrics: Path, profile: str, params: Profile, target: str, folder: Path) -> dict[str, int]:
    """Write ``index.html`` and the plots into ``folder``.

    Args:
        metrics: ``metrics/<profile>``.
        profile: its name.
        params: its parameters.
        target: what ``vllm serve`` is to be given: a directory or a hub id.
        folder: an existing, empty directory.

    Returns:
        How many plots and bytes were written.

    Raises:
        EyasError: see `read_results`.
    """
    html, images = render(read_results(metrics, profile), params, target)
    (folder / "index.html").write_text(html, encoding="utf-8")
    for name, png in images.items():
        (folder / name).write_bytes(png)
    return {"plots": len(images), "bytes": len(html.encode()) + sum(map(len, images.values()))}
