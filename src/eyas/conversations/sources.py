"""Where rows come from: the bundled catalogue, data sets of the Hugging Face hub, and files under data/input.

Takes a `SourceParams`; gives numbered rows, faulty ones included, in an order that does not depend on the machine.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from eyas.console import Progress
from eyas.conversations import bundled
from eyas.conversations.examine import Row
from eyas.conversations.reading import data_files, read_rows
from eyas.errors import EyasError
from eyas.params import SourceParams

INPUT_FOLDER = Path("data/input")
HUB = "hub:"
Catalogue = dict[str, Callable[[], Iterator[bundled.Row]]]
Advance = Callable[[int], None]


def set_name(source: str) -> str:
    """A short name for a source: the package's, the data set's, the folder's or the file's without its endings."""
    if source.startswith((bundled.PREFIX, HUB)):
        return source.split(":", 1)[1].rsplit("/", 1)[-1]
    return Path(source).name.split(".", 1)[0]


def _bundled(params: SourceParams, catalogue: Catalogue, parameter: str) -> Iterator[Row]:
    name = params.source.removeprefix(bundled.PREFIX)
    if name not in catalogue:
        near = difflib.get_close_matches(name, catalogue, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there is {', '.join(sorted(catalogue))}"
        raise EyasError(f"{parameter}: no bundled package `{name}` here; {hint}")
    for number, row in enumerate(catalogue[name](), 1):
        yield Row(None, number, row)


def _hub(params: SourceParams, parameter: str) -> Iterator[Row]:
    """Rows of a hub data set, streamed; with HF_HUB_OFFLINE set, out of the cache of `datasets`."""
    import datasets  # takes seconds, and most runs need none of it

    name = params.source.removeprefix(HUB)
    part = f"{params.subset or 'default'}/{params.split}"
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            name,
            params.subset,
            split=params.split,
            revision=params.revision,
            streaming=not datasets.config.HF_HUB_OFFLINE,
        )
        # images and sounds stay undecoded: their rows are set aside anyway
        rows = rows.decode(False) if hasattr(rows, "decode") else rows
        size = getattr((rows.info.splits or {}).get(params.split), "num_examples", 0) or 0
        with Progress(f"reading {params.source}", size, "rows") as progress:
            for number, row in enumerate(rows, 1):
                progress.advance()
                yield Row(part, number, dict(row))
    except Exception as error:  # `datasets` lets through whatever its loaders and its network raise
        cause = error.__cause__ or error
        told = f"{type(cause).__name__}: {str(cause).strip().split(chr(10))[0][:300]}"
        raise EyasError(
            f"{parameter}: {params.source} ({part}) could not be loaded: {told}. Check the name, subset, split and revision. "
            f"If the Hugging Face hub cannot be reached from here, download the data set elsewhere "
            f"(`hf download --repo-type dataset {name}`), put its Parquet files into "
            f"{INPUT_FOLDER / set_name(params.source)}/, and name that folder as the source"
        ) from error


def input_files(source: str, parameter: str) -> list[Path]:
    """The files that a path, folder or glob names, sorted; it must be in the folder that DVC watches.

    The check is by name, so that a link in the folder may point anywhere.

    Raises:
        EyasError: somewhere else, or no file.
    """
    path = Path(os.path.normpath(source))
    inside = Path(os.path.relpath(path)) if path.is_absolute() else path
    if not inside.is_relative_to(INPUT_FOLDER):
        raise EyasError(
            f"{parameter}: {source} is not under {INPUT_FOLDER}/, the folder whose changes DVC notices; copy or link it there, "
            f"and name it `{INPUT_FOLDER / path.name}`"
        )
    try:
        return data_files(str(path))
    except EyasError as error:
        raise EyasError(f"{parameter}: {error}") from None


def _files(params: SourceParams, parameter: str, advance: Advance) -> Iterator[Row]:
    files = input_files(params.source, parameter)
    names = [None if len(files) == 1 else os.path.relpath(file, INPUT_FOLDER) for file in files]
    with Progress(f"reading {params.source}", sum(file.stat().st_size for file in files), "bytes") as progress:

        def read(count: int) -> None:
            progress.advance(count)
            advance(count)

        for file, name in zip(files, names, strict=True):
            for number, content in read_rows(file, read):
                yield Row(name, number, content)


def read_source(
    params: SourceParams, catalogue: Catalogue, parameter: str, advance: Advance = lambda _: None
) -> Iterator[Row]:
    """Go through a source.

    Args:
        params: the source.
        catalogue: the bundled packages that may be named.
        parameter: what to call it in errors.
        advance: called with the number of bytes read, where that is known.

    Raises:
        EyasError: an unknown package, a misplaced or missing file, a data set that cannot be loaded.
    """
    if params.source.startswith(bundled.PREFIX):
        return _bundled(params, catalogue, parameter)
    if params.source.startswith(HUB):
        return _hub(params, parameter)
    return _files(params, parameter, advance)
