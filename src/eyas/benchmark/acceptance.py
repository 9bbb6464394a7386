"""Bookkeeping of served prompts: what each target step drafted, accepted and emitted.

Takes what vLLM says of a request step by step; gives counts that must agree with vLLM's own counters.

Words: a *target step* is one forward pass of the target for one prompt after its prefill; a *drafted step* is a target
step that verified at least one drafted token (n-gram drafts only where it finds a match, a draft head always). The
prefill and the token that comes with it count nowhere: they are the same for every method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas.errors import EyasError


@dataclass(frozen=True)
class Counters:
    """Totals over many prompts, as vLLM counts them too.

    An accepted token that lies behind the end of the answer (its end-of-turn token, or the limit of tokens) counts
    as accepted, though it is not emitted.
    """

    drafted_steps: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_position: list[int]

    def __sub__(self, earlier: Counters) -> Counters:
        """What was counted since ``earlier``."""
        return Counters(
            self.drafted_steps - earlier.drafted_steps,
            self.drafted_tokens - earlier.drafted_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            [a - b for a, b in zip(self.accepted_by_position, earlier.accepted_by_position, strict=True)],
        )


@dataclass
class Trace:
    """One served prompt.

    Attributes:
        token_ids: the answer.
        step_tokens: tokens that each step emitted, in order; the first step is the prefill.
        drafted: drafted tokens of each drafted step, in order.
        accepted: accepted tokens of each drafted step, in order.
        first_s: seconds from handing the prompt over to its first token.
        last_s: … to its last.
        share_s: its part of the wall time: each step's time, divided among the prompts that got tokens from it.
    """

    token_ids: list[int] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    share_s: float = 0.0

    @property
    def target_steps(self) -> int:
        """Target steps, drafted or not, without the prefill."""
        return len(self.step_tokens) - 1

    @property
    def emitted(self) -> int:
        """Tokens that the target steps emitted, without the prefill's."""
        return sum(self.step_tokens[1:])

    @property
    def per_token_s(self) -> float | None:
        """Time per output token behind the first, where there is one."""
        return (self.last_s - self.first_s) / (len(self.token_ids) - 1) if len(self.token_ids) > 1 else None


def count(traces: Sequence[Trace], positions: int) -> Counters:
    """Add up what the prompts' drafted steps say; ``positions`` is the number of tokens that are drafted at most."""
    accepted = [a for trace in traces for a in trace.accepted]
    return Counters(
        drafted_steps=len(accepted),
        drafted_tokens=sum(sum(trace.drafted) for trace in traces),
        accepted_tokens=sum(accepted),
        accepted_by_position=[sum(a > position for a in accepted) for position in range(positions)],
    )


def check_trace(trace: Trace, name: str) -> None:
    """Check one prompt: every step emits one token of the target's own and what it accepted; only the last is cut.

    Raises:
        EyasError: the emitted tokens are not what the steps add up to.
    """
    unemitted = trace.target_steps + sum(trace.accepted) - trace.emitted
    may_be_cut = trace.accepted[-1] if trace.accepted else 0
    if (
        sum(trace.step_tokens) != len(trace.token_ids)
        or not 0 <= unemitted <= may_be_cut
        or len(trace.drafted) != len(trace.accepted)
        or len(trace.drafted) > trace.target_steps
        or any(a > d for a, d in zip(trace.accepted, trace.drafted, strict=True))
    ):
        raise EyasError(
            f"{name}: {trace.target_steps} target steps with {sum(trace.accepted)} accepted tokens cannot have emitted "
            f"{trace.emitted} tokens; this vLLM counts steps in a way that Eyas does not know, use the locked version"
        )


def check_counters(counted: Counters, reported: Counters, name: str) -> None:
    """Check the prompts' sums against vLLM's own counters.

    Raises:
        EyasError: they disagree.
    """
    if counted != reported:
        raise EyasError(
            f"{name}: Eyas counted {counted}, vLLM {reported}; no acceptance can be reported. Something else used the "
            f"engine meanwhile, or this vLLM counts in another way: use the locked version"
        )
