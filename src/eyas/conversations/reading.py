"""JSON lines of unknown quality.

Takes a binary stream; gives one object, or one `BadRow`, for every line that is not blank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from eyas.conversations.faults import BadRow

_MAX_LINE_BYTES = 16 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow("duplicate_key", ascii(next(key for key in keys if keys.count(key) > 1))[:100])
    return content


def parse_line(line: bytes) -> dict[str, Any]:
    """The object that a line holds.

    Raises:
        BadRow: the line holds no object.
    """
    if len(line) > _MAX_LINE_BYTES:
        raise BadRow("line_too_long", f"more than {_MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise BadRow("not_utf8", f"byte {error.start} of the line: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise BadRow("malformed_json", f"column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; a thousand brackets
        raise BadRow("malformed_json", ascii(str(error))[:200]) from None
    if not isinstance(value, dict):
        raise BadRow("not_an_object", f"a JSON {type(value).__name__}")
    return value


def read_lines(stream: BinaryIO, advance: Callable[[int], None]) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Go through JSON lines with bounded memory; never raises `BadRow`, but gives it in place of the object.

    Lines end with ``\\n`` alone: JSON text may hold U+2028 and its like, at which ``str.splitlines`` would cut.

    Args:
        stream: the file, opened in binary mode.
        advance: called with the number of bytes read.

    Yields:
        The line's number, from 1, and its object or what is wrong with it.
    """
    number = 0
    while line := stream.readline(_MAX_LINE_BYTES + 1):
        number += 1
        advance(len(line))
        rest = line
        while len(rest) > _MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(_MAX_LINE_BYTES + 1)
            advance(len(rest))
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line.strip():
            continue
        try:
            yield number, parse_line(line)
        except BadRow as fault:
            yield number, fault
