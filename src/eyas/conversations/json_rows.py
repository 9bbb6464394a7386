"""Rows of JSON lines and of JSON documents, read with bounded memory.

Takes a binary stream; gives one object, or one `BadRow`, for every row. What comes after a row that is merely faulty is still read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from eyas.conversations.faults import BadRow
from eyas.conversations.json_window import MAX_ROW_BYTES, Broken, Window
from eyas.conversations.shapes import looks_like_row
from eyas.conversations.strict_json import parse_json

Row = dict[str, Any] | BadRow

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_ELEMENTS = 1 << 16  # of a list that is part of a row


def parse_line(line: bytes) -> dict[str, Any]:
    """The object that a line holds.

    Raises:
        BadRow: the line holds no object.
    """
    if len(line) > MAX_ROW_BYTES:
        raise BadRow("line_too_long", f"more than {MAX_ROW_BYTES} bytes")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("not_utf8", f"byte {error.start} of the line: {error.reason}") from None
    return as_object(parse_json(text))


def as_object(value: Any) -> dict[str, Any]:
    """The value itself, if it is an object.

    Raises:
        BadRow: it is something else.
    """
    if not isinstance(value, dict):
        raise BadRow("not_an_object", f"a JSON {type(value).__name__}")
    return value


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, Row]]:
    """Go through JSON lines; never raises `BadRow`, but gives it in place of the object.

    Lines end with ``\\n`` alone: JSON text may hold U+2028 and its like, at which ``str.splitlines`` would cut.

    Yields:
        The line's number, from 1, and its object or what is wrong with it; blank lines are counted, but not given.
    """
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_ROW_BYTES + 1)
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line.strip():
            continue
        try:
            yield number, parse_line(line)
        except BadRow as fault:
            yield number, fault


def _elements(window: Window) -> Iterator[Any]:
    """The elements, or faults, up to the end of a list that is open."""
    while window.expect() != "]":
        if not window.take(","):
            yield window.value()
    window.take("]")


def _whole_list(elements: Iterable[Any]) -> tuple[list[Any], BadRow | None]:
    """A list that belongs to a row, and the first fault in it; of an endless one no more than fits is kept."""
    values: list[Any] = []
    fault = None
    for value in elements:
        if isinstance(value, BadRow):
            fault = fault or value
        elif len(values) < _MAX_ELEMENTS:
            values.append(value)
        else:
            fault = fault or BadRow("line_too_long", f"a list of more than {_MAX_ELEMENTS} objects")
    return values, fault


def _list_rows(values: Iterable[Any]) -> Iterator[Row]:
    for value in values:
        if isinstance(value, (dict, BadRow)):
            yield value
        else:
            yield BadRow("not_an_object", f"a JSON {type(value).__name__}")


def _is_list_of_rows(key: str, first: Any) -> bool:
    """Whether the key of a document holds its rows, to judge by the first; else it belongs to the one row that the document is."""
    return isinstance(first, dict) and (looks_like_row(first) or key in ("data", "rows"))


def _until_readable(elements: Iterator[Any]) -> list[Any]:
    """The first elements, up to and with one that can be read."""
    head = []
    for value in elements:
        head.append(value)
        if not isinstance(value, BadRow):
            break
    return head


def _object_rows(window: Window) -> Iterator[Row]:
    """The rows of an object that is open: those of the list that it holds, or itself."""
    row: dict[str, Any] = {}
    fault: BadRow | None = None
    lists = 0
    while window.expect() != "}":
        if window.take(","):
            continue
        key = window.value()
        if not isinstance(key, str) or not window.take(":"):
            yield BadRow("malformed_json", f"no key and colon after {ascii(list(row)[-1:])[:100]}")
            window.skip(1)
            return
        if window.opens_objects():
            window.take("[")
            elements = _elements(window)
            head = _until_readable(elements)
            if _is_list_of_rows(key, head[-1]):
                lists += 1
                for listed in _list_rows(itertools.chain(head, elements)):
                    yield listed if lists == 1 else BadRow("second_list", f"{ascii(key)[:100]} is another list of rows")
                continue
            value, bad = _whole_list(itertools.chain(head, elements))
            fault = fault or bad
        else:
            value = window.value()
            fault = fault or (value if isinstance(value, BadRow) else None)
        if key in row:
            fault = fault or BadRow("duplicate_key", ascii(key)[:100])
        row[key] = value
    window.take("}")
    if fault or not lists:
        yield fault or row


def read_document(stream: BinaryIO) -> Iterator[tuple[int, Row]]:
    """Go through a JSON document: a list of objects, an object that holds one such list, or one object after the other.

    Yields:
        The row's number, from 1, and its object or what is wrong with it.
    """
    window = Window(stream)
    number = 0
    try:
        while window.peek():
            if window.take(","):
                continue
            if window.take("["):
                rows = _list_rows(_elements(window))
            elif window.take("{"):
                rows = _object_rows(window)
            else:
                rows = _list_rows([window.value()])
            for row in rows:
                number += 1
                yield number, row
    except Broken as error:
        yield number + 1, BadRow("unreadable_rest", str(error))
