"""A vLLM server's Prometheus page: its counters of speculative decoding, summed over its engines.

Takes the page's text; gives `PageCounters`. The text format is Prometheus' exposition format 0.0.4.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from eyas.benchmark.acceptance import Counters
from eyas.errors import EyasError

_LINE = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')
_DRAFT = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class PageCounters:
    """What a server has counted since its start.

    Attributes:
        positions: tokens that it drafts at most, 0 if it drafts none.
        speculation: of speculative decoding.
        answers: finished requests.
        tokens: generated tokens.
    """

    positions: int
    speculation: Counters
    answers: int
    tokens: int

    def __sub__(self, earlier: PageCounters) -> PageCounters:
        """What was counted since ``earlier``."""
        return PageCounters(
            self.positions,
            self.speculation - earlier.speculation,
            self.answers - earlier.answers,
            self.tokens - earlier.tokens,
        )


def read_counters(page: str, where: str) -> PageCounters:
    """The counters of a page.

    Raises:
        EyasError: it is no page of a vLLM that counts.
    """
    totals: Counter[str] = Counter()
    by_position: Counter[int] = Counter()
    for line in page.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match[1].removesuffix("_total"), match[2] or "", match[3]
        position = _POSITION.search(labels)
        if name == f"{_DRAFT}accepted_tokens_per_pos" and position:
            by_position[int(position[1])] += int(float(value))
        elif name in _WANTED:
            totals[name] += int(float(value))
    if "vllm:generation_tokens" not in totals:
        raise EyasError(
            f"{where}: no vLLM counters there; start the server without --disable-log-stats, and let nothing hide /metrics"
        )
    positions = max(by_position, default=-1) + 1
    return PageCounters(
        positions,
        Counters(
            totals[f"{_DRAFT}drafts"],
            totals[f"{_DRAFT}draft_tokens"],
            totals[f"{_DRAFT}accepted_tokens"],
            [by_position[i] for i in range(positions)],
        ),
        totals["vllm:request_success"],
        totals["vllm:generation_tokens"],
    )


_WANTED = {
    "vllm:generation_tokens",
    "vllm:request_success",
    f"{_DRAFT}drafts",
    f"{_DRAFT}draft_tokens",
    f"{_DRAFT}accepted_tokens",
}
