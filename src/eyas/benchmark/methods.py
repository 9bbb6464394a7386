"""The methods that are compared: what drafts, and how vLLM is told.

Takes the benchmark's parameters and the draft head; gives a `Method` for each drafter and number of draft tokens.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.params import BenchmarkParams, ReferenceParams, TargetParams
from eyas.targets.resolve import resolve_target

PLAIN, NGRAM, SUFFIX, EAGLE3 = "plain", "ngram", "suffix", "eagle3"


@dataclass(frozen=True)
class Method:
    """One engine: a drafter with its number of draft tokens a step (``k``, 0 for plain decoding)."""

    name: str
    k: int
    speculative: dict[str, Any] | None

    @property
    def label(self) -> str:
        """For logs and messages: ``eagle3-k3``."""
        return f"{self.name}-k{self.k}" if self.k else self.name


def method_names(params: BenchmarkParams) -> list[str]:
    """The methods, in the order in which they are told: plain decoding first, the trained head last."""
    suffix = [SUFFIX] if params.suffix else []
    return [PLAIN, NGRAM, *suffix, *(reference.name for reference in params.references), EAGLE3]


def resolve_reference(reference: ReferenceParams) -> Path:
    """A published drafter's directory: given, or downloaded from the hub, as targets are.

    Raises:
        EyasError: it cannot be had.
    """
    where = TargetParams(source=reference.source, revision=reference.revision, max_model_len=1)
    try:
        return resolve_target(where)
    except EyasError as error:
        told = str(error).removeprefix("target.source: ")
        raise EyasError(f"benchmark.references, {reference.name}: {told}") from error


def methods(params: BenchmarkParams, head: Path) -> list[Method]:
    """Every method with every number of draft tokens, plain decoding first.

    Raises:
        EyasError: no draft head there, a reference cannot be had, or suffix decoding's package is missing.
    """
    if not (head / "config.json").is_file():
        raise EyasError(f"{head}: no draft head there (config.json is missing); run the train stage first")
    if params.suffix and importlib.util.find_spec("arctic_inference") is None:
        raise EyasError(
            "benchmark.suffix: suffix decoding needs the package arctic-inference, which is not installed; "
            "build it into this environment (docs/benchmark.md has the commands), or set benchmark.suffix to false"
        )
    drafters: dict[str, dict[str, Any]] = {
        NGRAM: {
            "method": "ngram",
            "prompt_lookup_min": params.ngram_lookup_min,
            "prompt_lookup_max": params.ngram_lookup_max,
        },
        # its trees keep no earlier answer: a repeat would find its own, and prompts are served more than once
        SUFFIX: {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
        **{r.name: {"method": r.method, "model": str(resolve_reference(r))} for r in params.references},
        EAGLE3: {"method": "eagle3", "model": str(head)},
    }
    return [Method(PLAIN, 0, None)] + [
        Method(name, k, drafters[name] | {"num_speculative_tokens": k})
        for name in method_names(params)[1:]
        for k in params.num_speculative_tokens
    ]
