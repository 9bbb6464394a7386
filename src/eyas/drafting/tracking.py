"""Series while the training runs, for people who watch: DVCLive, TensorBoard, Weights & Biases, as machine.yaml asks.

Takes rows of columns; missing values are left out. What is tracked decides nothing, and no package is imported unasked.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from eyas.errors import EyasError
from eyas.files import write_text_atomic

_PACKAGES = {"dvclive": "dvclive", "tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
_TSV = Path("plots", "metrics")


class _Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _DvcLive:
    """Series as TSV files that `dvc plots` and its editor extensions read."""

    def __init__(self, package: Any, folder: Path, resumed: bool) -> None:
        # the last values come anew with the next row, and a file that a kill left half written would not be read
        (folder / "metrics.json").unlink(missing_ok=True)
        self._live = package.Live(str(folder), resume=resumed, save_dvc_exp=False, dvcyaml=None, report=None)
        # what a kill undid is done, and logged, once more
        self._earlier = {str(p.relative_to(folder / _TSV).with_suffix("")): p for p in (folder / _TSV).rglob("*.tsv")}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._live.step = step
        for name, value in values.items():
            if name in self._earlier:
                _cut(self._earlier.pop(name), step)
            self._live.log_metric(name, value)
        self._live.make_summary()

    def close(self) -> None:
        self._live.end()


def _cut(series: Path, step: int) -> None:
    """Leave the header and the lines of earlier steps in a series; nothing where there are none."""
    header, *lines = series.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
    # a line without its end was being written when the process was killed
    kept = [line for line in lines if line.endswith("\n") and int(line.split("\t")[0]) < step]
    if kept:
        write_text_atomic(series, header + "".join(kept))
    else:
        series.unlink()


class _TensorBoard:
    def __init__(self, package: Any, folder: Path, steps: int) -> None:
        self._writer = package.SummaryWriter(str(folder), purge_step=steps + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, package: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = package.init(project="eyas", dir=str(folder), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def _open(name: str, folder: Path, steps: int) -> _Tracker:
    try:
        package = importlib.import_module(_PACKAGES[name])
    except ImportError as error:
        raise EyasError(
            f"machine.yaml: track: {name}: the package is missing ({error}); install it, or leave it out"
        ) from None
    if name == "dvclive":
        return _DvcLive(package, folder / name, steps > 0)
    return _TensorBoard(package, folder / name, steps) if name == "tensorboard" else _WandB(package, folder / name)


class Trackers:
    """Those that are asked for; a context manager."""

    def __init__(self, names: Sequence[str], folder: Path, steps: int) -> None:
        """Open them.

        Args:
            names: of the trackers.
            folder: each one's files are below it.
            steps: that the training has done already.

        Raises:
            EyasError: a package is missing.
        """
        self._trackers = [_open(name, folder, steps) for name in names]

    def log(self, prefix: str, step: int, row: Mapping[str, Any]) -> None:
        """Send one row; ``prefix`` is ``step`` or ``epoch``, and its series are ``steps/…`` or ``epochs/…``."""
        # the plural: DVCLive has a `step` of its own in its summary
        values = {f"{prefix}s/{name}": value for name, value in row.items() if value is not None and name != "step"}
        for tracker in self._trackers:
            tracker.log(step, values)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in self._trackers:
            tracker.close()
