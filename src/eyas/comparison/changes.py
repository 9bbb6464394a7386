"""What changed between two runs beside their figures: parameters by key, code by stage, packages by name.

Takes two `Side`s; gives lines for `Changes`. Parameters and packages are what the runs themselves recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.comparison.sides import Side


@dataclass(frozen=True)
class Changes:
    """Each a mapping from what changed to its value before and after; ``None`` where a side has none."""

    params: dict[str, tuple[Any, Any]]
    code: dict[str, list[str]]
    packages: dict[str, tuple[Any, Any]]
    machine: dict[str, tuple[Any, Any]]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of all that is no mapping or list."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, f"{path}.{key}" if path else str(key))


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)}


def _params(side: Side) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for ran in side.provenance.values():
        sections |= ran.get("params", {})
    return dict(leaves(sections))


def _packages(side: Side) -> dict[str, Any]:
    return {name: version for ran in side.provenance.values() for name, version in ran.get("versions", {}).items()}


def _code(side: Side) -> dict[str, dict[str, str]]:
    return {
        stage: {
            dep["path"]: dep.get("md5", "")
            for dep in entry.get("deps", [])
            if not dep["path"].startswith(("data/", "metrics/"))
        }
        for stage, entry in side.lock.items()
    }


def changes(a: Side, b: Side) -> Changes:
    """Compare what two runs recorded; code can be told only where both sides have a lock."""
    before, after = _code(a), _code(b)
    code = {stage: list(_different(before[stage], after[stage])) for stage in before if stage in after}
    return Changes(
        params=_different(_params(a), _params(b)),
        code={stage: paths for stage, paths in code.items() if paths},
        packages=_different(_packages(a), _packages(b)),
        machine=_different(a.machine, b.machine),
    )
