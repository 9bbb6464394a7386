"""Answers that the target has given already: appended as they come, so that a kill costs those in flight.

An answer is found by the hash of what it was given for: the target, the engine, the sampling, the prompt's tokens and the seed. So
conversations that are added later are all that is answered then.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from eyas.files import value_hash

_KEY_DIGITS = 64


@dataclass(frozen=True)
class Answer:
    """What the target wrote."""

    token_ids: list[int]
    logprobs: list[float]  # natural logarithms, one a token
    finish_reason: str  # "stop", or "length" where max_tokens cut it


def answer_key(identity: dict[str, Any], prompt_ids: list[int], seed: int, greedy: bool) -> str:
    """SHA-256, in hex, of all that decides an answer.

    Args:
        identity: JSON values that hold for all answers of a run: target, engine, sampling.
        prompt_ids: what the target reads.
        seed: of the sampling.
        greedy: whether the answer is the most probable one.
    """
    return value_hash([identity, prompt_ids, None if greedy else seed, greedy])


class AnswerLog:
    """A file of answers, a line each: key, CRC-32 of the rest, the answer as JSON. Lines that are not whole count as absent."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._places: dict[bytes, tuple[int, int]] = {}
        self._stream: BinaryIO = path.open("a+b", buffering=0)
        end, line = 0, b"\n"
        with path.open("rb") as lines:
            for line in lines:
                if _content(line) is not None:
                    self._places[bytes.fromhex(line[:_KEY_DIGITS].decode())] = end, len(line)
                end += len(line)
        if not line.endswith(b"\n"):
            self._write(b"\n")

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> Answer | None:
        """The answer, or None where it has not been given yet."""
        place = self._places.get(bytes.fromhex(key))
        if place is None:
            return None
        content = _content(os.pread(self._stream.fileno(), place[1], place[0]))
        if content is None:
            return None
        values = json.loads(content)
        return Answer(values["token_ids"], values["logprobs"], values["finish_reason"])

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer.

        Raises:
            OSError: the disk is full; what was there before is whole.
        """
        content = json.dumps(vars(answer), separators=(",", ":")).encode()
        line = b"%s %08x %s\n" % (key.encode(), zlib.crc32(content), content)
        place = self._stream.seek(0, os.SEEK_END), len(line)
        self._write(line)
        self._places[bytes.fromhex(key)] = place

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._stream.fileno(), data) :]

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _content(line: bytes) -> bytes | None:
    """The answer's JSON of a whole line."""
    parts = line.split(b" ", 2)
    if len(parts) != 3 or len(parts[0]) != _KEY_DIGITS or not line.endswith(b"\n"):
        return None
    content = parts[2][:-1]
    return content if b"%08x" % zlib.crc32(content) == parts[1] else None
