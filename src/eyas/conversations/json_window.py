"""A JSON document that is too large for memory, value by value.

Takes a binary stream; gives its values in turn, or a `BadRow` in place of one that cannot be read but stepped over.
"""

from __future__ import annotations

import codecs
import re
from typing import Any, BinaryIO

from eyas.conversations.faults import BadRow
from eyas.conversations.strict_json import DECODER, malformed

MAX_ROW_BYTES = 16 << 20
_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n\ufeff]*+")
# a whole string, a string that the window cuts off, or what gives a document its structure
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|"|[\[\]{},]', re.DOTALL)


class Broken(Exception):
    """The rest of a file cannot be read; the text says why."""


class Window:
    """The part of a document that is in memory; it grows until the value at its start is whole."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        # bytes that are not UTF-8 become lone surrogates, so that only the row that holds them is lost
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self.text, self.at, self._ended = "", 0, False

    def _grow(self) -> bool:
        if self._ended:
            return False
        content = self._stream.read(max(_CHUNK, len(self.text) - self.at))
        self._ended = not content
        self.text = self.text[self.at :] + self._decode(content, self._ended)
        self.at = 0
        return True

    def peek(self) -> str:
        """The next character that is not white space; empty at the end of the document."""
        while True:
            found = _SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._grow():
                return ""

    def expect(self) -> str:
        """The next character that is not white space.

        Raises:
            Broken: the document ends.
        """
        character = self.peek()
        if not character:
            raise Broken("it ends in the middle of a list or an object")
        return character

    def take(self, character: str) -> bool:
        """Step over the next character, if it is this one."""
        found = self.peek() == character
        self.at += found
        return found

    def skip(self, depth: int = 0) -> None:
        """Step over the rest of a value that cannot be read; ``depth`` brackets of it are open already.

        Raises:
            Broken: the document ends first.
        """
        inside = depth > 0
        if not inside and self.text[self.at] in "]}":  # closes nothing
            self.at += 1
            return
        while True:
            for token in _TOKEN.finditer(self.text, self.at):
                mark = token.group()
                if mark == '"':  # cut off by the window
                    self.at = token.start()
                    break
                if depth == 0 and mark in ",]}":
                    self.at = token.start()
                    return
                self.at = token.end()
                depth += (mark in "[{") - (mark in "]}")
                inside = inside or depth > 0
                if inside and depth == 0:
                    return
            else:
                self.at = len(self.text)
            if len(self.text) - self.at > 4 * MAX_ROW_BYTES or not self._grow():
                raise Broken("a bracket or a quotation mark is missing")

    def opens_objects(self) -> bool:
        """Whether a list of objects opens here."""
        while self.peek() == "[":
            found = _SPACE.match(self.text, self.at + 1)
            end = found.end() if found else self.at + 1
            if end < len(self.text):
                return self.text[end] == "{"
            if not self._grow():
                break
        return False

    def value(self) -> Any:
        """The next value, or a `BadRow` in place of one that cannot be read.

        Raises:
            Broken: nothing after it can be read.
        """
        self.expect()
        while True:
            fault: BadRow | None = None
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                # a number may go on behind the window
                if end < len(self.text) or self._ended:
                    return self._take(value, end)
            except BadRow as duplicate:
                fault = duplicate
            except (ValueError, RecursionError) as error:
                # more text helps only where a bracket is open
                fault = malformed(error) if isinstance(error, RecursionError) or self._is_closed() else None
            if fault is None and len(self.text) - self.at > MAX_ROW_BYTES:
                fault = BadRow("line_too_long", f"more than {MAX_ROW_BYTES} characters")
            if fault is not None:
                self.skip()
                return fault
            if not self._grow():
                raise Broken("it ends in the middle of a value")

    def _take(self, value: Any, end: int) -> Any:
        part, self.at = self.text[self.at : end], end
        if len(part) > MAX_ROW_BYTES:
            return BadRow("line_too_long", f"more than {MAX_ROW_BYTES} characters")
        if not part.isascii():
            try:
                part.encode("utf-8")
            except UnicodeEncodeError as error:
                return BadRow("not_utf8", f"character {error.start} of the row")
        return value

    def _is_closed(self) -> bool:
        """Whether the value's brackets close within the window."""
        depth = 0
        for token in _TOKEN.finditer(self.text, self.at):
            mark = token.group()
            if mark == '"':
                return False
            depth += (mark in "[{") - (mark in "]}")
            if depth <= 0 and len(mark) == 1:
                return True
        return False
