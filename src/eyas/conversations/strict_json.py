"""JSON with one meaning: the standard library's parser, and a key that is named twice is a fault.

Numbers stay as Python reads them (NaN and infinities too, which `shapes` and `tools` deal with where they matter).
"""

from __future__ import annotations

import json
from typing import Any

from eyas.conversations.faults import BadRow


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow("duplicate_key", ascii(next(key for key in keys if keys.count(key) > 1))[:100])
    return content


DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def malformed(error: ValueError | RecursionError) -> BadRow:
    """The fault that an error of `DECODER` stands for."""
    if isinstance(error, json.JSONDecodeError):
        return BadRow("malformed_json", f"column {error.colno}: {error.msg}")
    # a number of thousands of digits; a thousand brackets
    return BadRow("malformed_json", ascii(str(error))[:200])


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        BadRow: ``malformed_json`` or ``duplicate_key``.
    """
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise malformed(error) from None
