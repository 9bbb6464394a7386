"""Merging `dvc.lock` stage by stage, and taking one profile's stages out of it; the text of a stage is never rewritten."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError
from eyas.keeping.cache import read_lock

_STAGE = re.compile(r"""^  ["']?([^\s"':#][^"':]*)["']?:\s*$""")
_HEAD = "schema: '2.0'\nstages:\n"
Blocks = dict[str, str]


@dataclass(frozen=True)
class Merged:
    """A merged lock; stages that both sides built differently stand in it between conflict markers."""

    text: str
    conflicts: tuple[str, ...]


def stage_blocks(text: str, where: str) -> Blocks:
    """The text of each stage, by its name.

    Raises:
        EyasError: the file is no lock, or not laid out as DVC does it.
    """
    stages = read_lock(text, where)
    blocks: Blocks = {}
    name = None
    for line in text.splitlines(keepends=True):
        found = _STAGE.match(line)
        if found:
            name = found[1]
            blocks[name] = line
        elif name is not None and (line.startswith("   ") or not line.strip()):
            blocks[name] += line
        else:
            name = None
    # read again on its own, so that a layout that this does not understand is refused and never merged wrongly
    if blocks.keys() != stages.keys() or any(
        read_lock(_HEAD + block, where)[n] != stages[n] for n, block in blocks.items()
    ):
        raise EyasError(f"{where}: not laid out as DVC does it; merge it by hand, or let `dvc repro` write it anew")
    return blocks


def lock_text(blocks: Blocks) -> str:
    """A whole lock from the text of its stages."""
    return _HEAD + "".join(blocks.values()) if blocks else "schema: '2.0'\n"


def merge_locks(base: str, ours: str, theirs: str) -> Merged:
    """Three-way merge: what one side changed is taken from it, what both changed alike is taken once, the rest conflicts.

    Raises:
        EyasError: one of the three is no lock.
    """
    old, mine, other = (
        stage_blocks(text, where)
        for text, where in ((base, "base"), (ours, "our dvc.lock"), (theirs, "their dvc.lock"))
    )
    merged: Blocks = {}
    conflicts = []
    for name in [*mine, *(n for n in other if n not in mine)]:
        before, left, right = old.get(name), mine.get(name), other.get(name)
        if left == right or right == before:
            chosen = left
        elif left == before:
            chosen = right
        else:
            conflicts.append(name)
            chosen = f"<<<<<<< ours\n{left or ''}=======\n{right or ''}>>>>>>> theirs\n"
        if chosen is not None:
            merged[name] = chosen
    return Merged(lock_text(merged), tuple(conflicts))


def merge_files(base: Path, ours: Path, theirs: Path) -> tuple[str, ...]:
    """What Git calls: merge into ``ours`` and give the names of the stages that conflict.

    Raises:
        EyasError: one of the files is no lock; ``ours`` is as it was.
    """
    merged = merge_locks(*(path.read_text(encoding="utf-8") for path in (base, ours, theirs)))
    ours.write_text(merged.text, encoding="utf-8")  # Git's own temporary file, by its own name
    return merged.conflicts


def with_stages_of(profile: str, committed: str, present: str) -> str:
    """The committed lock with one profile's stages as they are at present, and those of the other profiles untouched."""
    old, new = stage_blocks(committed, "HEAD's dvc.lock"), stage_blocks(present, "dvc.lock")
    mine = f"@{profile}"
    kept = {name: block for name, block in old.items() if not name.endswith(mine)}
    taken = {name: block for name, block in new.items() if name.endswith(mine)}
    order = [*new, *(name for name in old if name not in new)]
    return lock_text({name: (kept | taken)[name] for name in order if name in kept | taken})
