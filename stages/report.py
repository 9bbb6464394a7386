"""Stage `report`: the page that says whether the head is better, and the plots."""

from __future__ import annotations

from pathlib import Path

from eyas.files import atomic_directory
from eyas.params import TargetParams
from eyas.report.page import write_report
from eyas.stage import Stage, stage_main
from eyas.targets.resolve import resolve_target


def run(stage: Stage) -> None:
    """Read all metrics and provenance, write the page."""
    with atomic_directory(stage.data / "report") as folder:
        counts = write_report(stage.metrics, stage.profile, stage.params, _servable(stage.params.target), folder)
    stage.write_metrics(counts)


def _servable(target: TargetParams) -> str:
    """What ``vllm serve`` takes: a bundled target's place below the home folder, or the source as it is given."""
    if not target.source.startswith("bundled:"):
        return target.source
    directory, home = resolve_target(target), Path.home()
    return f"~/{directory.relative_to(home)}" if directory.is_relative_to(home) else str(directory)


if __name__ == "__main__":
    stage_main("report", run)
