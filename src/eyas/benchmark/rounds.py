"""Who serves what, and when: rounds over all engines, so that drift hits all methods alike.

Takes methods and a `Setting`; gives `Runs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from eyas.benchmark.losslessness import Difference, find_differences, with_gaps
from eyas.benchmark.methods import Method
from eyas.benchmark.process import EngineProcess, Setting
from eyas.benchmark.prompts import HELDOUT
from eyas.benchmark.runs import Cell, Runs, Served
from eyas.console import Progress, console
from eyas.stage import on_cpu_engine


@dataclass(frozen=True)
class Outcome:
    """All that was served.

    Attributes:
        differences: answers that are not plain decoding's.
        interleaved: whether every method was served in each round.
    """

    runs: Runs
    differences: list[Difference]
    interleaved: bool


def engines_at_a_time(setting: Setting, count: int) -> int:
    """How many of so many engines live together."""
    wanted = setting.machine.benchmark_engines or (count if on_cpu_engine() else 1)
    return min(wanted, count)


def sharing(setting: Setting, engines: int) -> Setting:
    """The setting with the GPUs' memory divided among engines."""
    if on_cpu_engine() or engines == 1:
        return setting
    share = setting.machine.gpu_memory_utilization / engines
    return replace(setting, machine=setting.machine.model_copy(update={"gpu_memory_utilization": share}))


def serve_all(methods: Sequence[Method], setting: Setting, repeats: int, main_k: int) -> Outcome:
    """Serve every set with every method, plain decoding first in the list, some times.

    Benchmark sets are served at the first concurrency and ``main_k`` alone, the held-out prompts at each.

    Raises:
        EyasError: an engine did not start, failed, or miscounts.
    """
    lot = engines_at_a_time(setting, len(methods))
    setting = sharing(setting, lot)
    served: dict[Cell, Served] = {}
    lots = [methods[start : start + lot] for start in range(0, len(methods), lot)]
    for some in lots:
        with ExitStack() as stack:
            engines = _start(some, setting, stack)
            answers = sum(len(index) for method in some for _, index in _cells(method, setting, main_k)) * repeats
            with Progress("benchmark", answers, "answers") as progress:
                for turn in range(repeats):
                    _round(engines, turn, setting, main_k, served, progress)
            if len(lots) == 1:
                return Outcome(served, with_gaps(find_differences(served), engines[0]), interleaved=True)
    if differences := find_differences(served):
        with ExitStack() as stack:
            # plain decoding, which settles what differs, has ended long ago
            differences = with_gaps(differences, _start(methods[:1], setting, stack)[0])
    return Outcome(served, differences, interleaved=False)


def _start(methods: Sequence[Method], setting: Setting, stack: ExitStack) -> list[EngineProcess]:
    """Start engines: all at once on a CPU, where a start is mostly imports; one after another on GPUs, whose free memory each measures."""
    console.print(f"benchmark: starting {', '.join(m.label for m in methods)} …")
    engines = []
    for method in methods:
        engines.append(stack.enter_context(EngineProcess(method, setting)))
        if not on_cpu_engine():
            engines[-1].wait()
    for engine in engines if on_cpu_engine() else []:
        engine.wait()
    return engines


def _cells(method: Method, setting: Setting, main_k: int) -> Iterator[tuple[Cell, list[int]]]:
    """Cells of a method, with the indices of their prompts."""
    for name in dict.fromkeys(p.set for p in setting.prompts):
        index = [i for i, p in enumerate(setting.prompts) if p.set == name]
        main = method.k in (0, main_k)
        for concurrency in setting.concurrency if name == HELDOUT else setting.concurrency[: int(main)]:
            yield Cell(method.name, method.k, concurrency, name), index


def _round(
    engines: Sequence[EngineProcess],
    turn: int,
    setting: Setting,
    main_k: int,
    served: dict[Cell, Served],
    progress: Progress,
) -> None:
    """Serve everything once: set by set, one engine after the other, each round beginning with another."""
    first = turn % len(engines)
    work = [(list(_cells(engine.method, setting, main_k)), engine) for engine in [*engines[first:], *engines[:first]]]
    places = list(dict.fromkeys((cell.set, cell.concurrency) for cells, _ in work for cell, _ in cells))
    for place in places:
        for cells, engine in work:
            for cell, index in cells:
                if (cell.set, cell.concurrency) == place:
                    repeat = engine.serve(index, cell.concurrency, progress.advance)
                    entry = served.setdefault(cell, Served([setting.prompts[i] for i in index], []))
                    entry.repeats.append(repeat)
