"""The prompt sets that a head is measured with, and that training never sees.

Takes the sets' parameters; gives their prompts, whole and in the order of a hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.conversations import bundled
from eyas.conversations.faults import BadRow
from eyas.conversations.rules import validate
from eyas.conversations.sources import read_source, set_name
from eyas.errors import EyasError
from eyas.files import value_hash
from eyas.params import SourceParams

HELDOUT = "heldout"  # the benchmark's name for the profile's own validation prompts


@dataclass(frozen=True)
class Prompt:
    """One prompt of a benchmark set: its user turns."""

    set: str
    prompt_id: str
    category: str
    turns: tuple[str, ...]


def read_benchmark_set(params: SourceParams, parameter: str) -> list[Prompt]:
    """A benchmark set, in hash order, so that its first n prompts are a fair sample.

    Raises:
        EyasError: a faulty row (a set with holes is not comparable), two prompts of one id, no prompt, no file.
    """
    name = set_name(params.source)
    if name == HELDOUT:
        raise EyasError(
            f"{parameter}: {params.source}: the name {HELDOUT} is taken by the profile's validation prompts"
        )
    prompts: dict[str, Prompt] = {}
    for file, number, content in read_source(params, bundled.BENCHMARKS, parameter):
        where = f"{parameter}: {params.source}, {f'{file}, ' if file else ''}row {number}"
        try:
            if isinstance(content, BadRow):
                raise content
            turns = tuple(validate(content)[0].user_turns)
        except BadRow as fault:
            raise EyasError(f"{where}: {fault}; mend or remove it") from None
        place = f"{file}:{number}" if file else str(number)
        identity = next((str(content[key]) for key in ("id", "prompt_id", "question_id") if key in content), place)
        if identity in prompts:
            raise EyasError(f"{where}: a second prompt with the id {identity!r}")
        prompts[identity] = Prompt(name, identity, str(content.get("category") or ""), turns)
    if not prompts:
        raise EyasError(f"{parameter}: {params.source}: no prompts")
    return sorted(prompts.values(), key=lambda p: value_hash([p.set, p.prompt_id]))[: params.cap]


def read_benchmark_sets(sets: Sequence[SourceParams], parameter: str) -> list[Prompt]:
    """All prompts of all sets, set by set.

    Raises:
        EyasError: as `read_benchmark_set`, or two sets of one name.
    """
    prompts: list[Prompt] = []
    names: set[str] = set()
    for number, params in enumerate(sets):
        more = read_benchmark_set(params, f"{parameter}.{number}")
        if more[0].set in names:
            raise EyasError(f"{parameter}.{number}: a second set named {more[0].set!r}")
        names.add(more[0].set)
        prompts += more
    return prompts
