"""The list ``active`` of params.yaml: the profiles that this checkout builds."""

from __future__ import annotations

from ruamel.yaml import YAML

from eyas.errors import EyasError
from eyas.files import write_text_atomic
from eyas.params import PARAMS_FILE, load_profile, read_yaml


def active_profiles() -> list[str]:
    """The names in the list.

    Raises:
        EyasError: it is missing or not a list of names.
    """
    content = read_yaml(PARAMS_FILE)
    active = content.get("active") if isinstance(content, dict) else None
    if not isinstance(active, list) or not active or not all(isinstance(name, str) for name in active):
        raise EyasError(f"{PARAMS_FILE}: `active` must list at least one profile, as in `active: [smoke]`")
    return active


def with_active(text: str, profile: str) -> str:
    """The text of params.yaml with one more profile in ``active`` and every other byte as it was.

    Dumping what ruamel read would move comments and blank lines, so it only tells the places.

    Raises:
        EyasError: the list is spread over lines in brackets.
    """
    active = YAML().load(text)["active"]
    lines = text.splitlines(keepends=True)
    last = active.lc.item(len(active) - 1)[0]
    if active.fa.flow_style():
        head, bracket, tail = lines[last].partition("]")
        if last != active.lc.line or not bracket:
            raise EyasError(f"{PARAMS_FILE}: write `active: [...]` on one line, so that `{profile}` can be added")
        lines[last] = f"{head.rstrip()}, {profile}]{tail}"
    else:
        indent = lines[last].partition("-")[0]
        lines.insert(last + 1, f"{indent}- {profile}\n")
    return "".join(lines)


def activate(profile: str) -> bool:
    """Add a profile to the list; false if it was there.

    Raises:
        EyasError: no such profile, or as `active_profiles` and `with_active`.
    """
    load_profile(profile)
    if profile in active_profiles():
        return False
    write_text_atomic(PARAMS_FILE, with_active(PARAMS_FILE.read_text(encoding="utf-8"), profile))
    return True
