"""Extraction proves itself right before anything is published.

Takes recorded rows and the target's own norm and head; gives figures for the metrics, or an error that says which
layer, which row and the likely cause. Every check has a name and runs in every run.

Shape legend: T tokens, N checked positions, L layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from eyas.errors import EyasError
from eyas.extraction.form import CheckedRow
from eyas.targets.head import TargetHead

MIN_PARITY = 0.975
MIN_PARITY_TIES = 0.998
MAX_LOGPROB_DIFFERENCE = 0.03
MAX_BATCH_DIFFERENCE = 0.02
MAX_REFERENCE_ERROR = 0.02
_BF16_STEP = 2.0**-8  # least relative distance of neighbouring bfloat16 numbers
_CHUNK = 512
_DIAGNOSIS_PARITY = 0.9


def states(hidden: np.ndarray) -> torch.Tensor:
    """bfloat16 bit patterns (uint16) as a float32 tensor of the same shape."""
    return torch.from_numpy(np.array(hidden)).view(torch.bfloat16).float()


def _supervised(row: CheckedRow, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States [N, H] from which the generated tokens were predicted, and those tokens [N]."""
    positions = np.flatnonzero(row.loss_mask[1:])
    emitted = torch.from_numpy(row.input_ids[positions + 1].astype(np.int64))
    return states(row.hidden_TLH[positions, layer]), emitted


@dataclass(frozen=True)
class Parity:
    """How often stored states pick the token that the engine emitted."""

    exact: float
    with_ties: float
    positions: int
    worst_row: str


def _parity(
    rows: Sequence[CheckedRow],
    head: TargetHead,
    layer: int,
    norm: Callable[[torch.Tensor], torch.Tensor],
    *,
    shift: int = 0,
    engine_rounds: bool = False,
) -> Parity:
    hits = ties = total = 0
    worst, worst_share = "", 2.0
    for row in rows:
        hidden_NH, emitted_N = _supervised(row, layer)
        if shift > 0:
            hidden_NH, emitted_N = hidden_NH[:-shift], emitted_N[shift:]
        elif shift < 0:
            hidden_NH, emitted_N = hidden_NH[-shift:], emitted_N[:shift]
        row_hits = 0
        for start in range(0, len(emitted_N), _CHUNK):
            normed_NH = norm(hidden_NH[start : start + _CHUNK])
            token_N = emitted_N[start : start + _CHUNK]
            top_N = (logits_NV := head.logits(normed_NH)).argmax(-1)
            gap_N = logits_NV.gather(1, top_N[:, None])[:, 0] - logits_NV.gather(1, token_N[:, None])[:, 0]
            row_hits += int((top_N == token_N).sum())
            # Rounding the state to bfloat16 moves each product of the two tokens' logits by about half a step; four
            # standard deviations of that sum is what noise can do.
            spread_NH = normed_NH * (head.head_VH[top_N] - head.head_VH[token_N])
            noise_N = 4 * spread_NH.norm(dim=-1) * _BF16_STEP / 12**0.5
            if (
                engine_rounds
            ):  # an engine that computes in 16 bits rounds its logits too: half a step for each of the two
                noise_N = noise_N + 2 * _BF16_STEP * logits_NV.abs().amax(-1)
            ties += int(((top_N == token_N) | (gap_N <= noise_N)).sum())
        hits += row_hits
        total += len(emitted_N)
        if len(emitted_N) and row_hits / len(emitted_N) < worst_share:
            worst, worst_share = row.name, row_hits / len(emitted_N)
    if not total:
        raise EyasError("self-check `head_parity`: the probe rows hold no generated token")
    return Parity(hits / total, ties / total, total, worst)


def _likely_cause(rows: Sequence[CheckedRow], head: TargetHead, layers: Sequence[int]) -> str:
    """Try the known faults on the same states and name the one that explains them."""
    last = len(layers) - 1
    other_norm = replace(head, unit_offset=not head.unit_offset)

    def norm_free(hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH

    trials: list[tuple[str, Callable[[], Parity]]] = [
        ("the state was stored after the final norm, not before it", partial(_parity, rows, head, last, norm_free)),
        (
            "wrong norm convention (Gemma-like norms multiply by 1 + weight, others by weight)",
            partial(_parity, rows, head, last, other_norm.normed),
        ),
        ("states are one token early", partial(_parity, rows, head, last, head.normed, shift=1)),
        ("states are one token late", partial(_parity, rows, head, last, head.normed, shift=-1)),
        *(
            (
                f"layers are in the wrong order: layer {layer} is the final one",
                partial(_parity, rows, head, index, head.normed),
            )
            for index, layer in enumerate(layers[:-1])
        ),
    ]
    for cause, trial in trials:
        if trial().exact >= _DIAGNOSIS_PARITY:
            return cause
    if _mixed_up(rows, head, last):
        return "rows of a batch came back in the wrong order"
    return "an off-by-one layer id, rows mixed up in a batch, or an output head that is tied to other weights"


def _mixed_up(rows: Sequence[CheckedRow], head: TargetHead, layer: int) -> bool:
    """Whether a row that fails holds another row's states."""
    for row in rows:
        if _parity([row], head, layer, head.normed).exact >= _DIAGNOSIS_PARITY:
            continue
        for other in rows:
            if other is not row and len(other.input_ids) == len(row.input_ids):
                taken = replace(row, hidden_TLH=other.hidden_TLH)
                if _parity([taken], head, layer, head.normed).exact >= _DIAGNOSIS_PARITY:
                    return True
    return False


def check_greedy(rows: Sequence[CheckedRow], head: TargetHead, layers: Sequence[int], *, engine_rounds: bool) -> Parity:
    """Check `head_parity`: final states of greedy rows, through the target's norm and head, pick the emitted tokens.

    Args:
        rows: greedy probe rows.
        head: the target's norm and output head.
        layers: recorded layer ids.
        engine_rounds: whether the engine computes in 16 bits, so that its logits tie more often.

    Raises:
        EyasError: fewer than 97.5 % do, or fewer than 99.8 % with ties within bfloat16 noise counted.
    """
    parity = _parity(rows, head, len(layers) - 1, head.normed, engine_rounds=engine_rounds)
    if parity.exact < MIN_PARITY or parity.with_ties < MIN_PARITY_TIES:
        raise EyasError(
            f"self-check `head_parity`: layer {layers[-1]} picks the emitted token at {parity.exact:.4f} of "
            f"{parity.positions} greedy positions ({parity.with_ties:.4f} with near-ties; needed {MIN_PARITY} and "
            f"{MIN_PARITY_TIES}; worst row {parity.worst_row}); likely cause: {_likely_cause(rows, head, layers)}"
        )
    return parity


def check_sampled(rows: Sequence[CheckedRow], head: TargetHead, layers: Sequence[int]) -> float:
    """Check `logprob`: mean absolute difference of re-derived and engine log-probabilities of sampled tokens (nats).

    Raises:
        EyasError: it is above 0.03.
    """
    by_row: list[torch.Tensor] = []
    checked: list[CheckedRow] = []
    for row in rows:
        hidden_NH, emitted_N = _supervised(row, len(layers) - 1)
        engine_N = torch.from_numpy(row.logprobs[np.flatnonzero(row.loss_mask[1:]) + 1])
        own: list[torch.Tensor] = []
        for start in range(0, len(emitted_N), _CHUNK):
            part = slice(start, start + _CHUNK)
            logits_NV = head.logits(head.normed(hidden_NH[part]))
            own.append(logits_NV.gather(1, emitted_N[part, None])[:, 0] - logits_NV.logsumexp(-1))
        if own:
            by_row.append((torch.cat(own) - engine_N).abs())
            checked.append(row)
    if not by_row:
        raise EyasError("self-check `logprob`: the rows hold no generated token")
    difference = float(torch.cat(by_row).mean())
    if not difference <= MAX_LOGPROB_DIFFERENCE:
        worst = max(zip(checked, by_row, strict=True), key=lambda pair: float(pair[1].mean()))[0].name
        raise EyasError(
            f"self-check `logprob`: re-derived log-probabilities differ from the engine's by {difference:.4f} nats on "
            f"average (at most {MAX_LOGPROB_DIFFERENCE}; look at row {worst}); likely cause: responses come "
            "from another target, engine or compute type than the states"
        )
    return difference


def relative_errors(hidden_TLH: torch.Tensor, reference_TLH: torch.Tensor) -> list[float]:
    """Relative error per layer: Frobenius norm of the difference over that of the reference; float32 inputs."""
    return [
        float((hidden_TLH[:, i] - reference_TLH[:, i]).norm() / reference_TLH[:, i].norm().clamp_min(1e-30))
        for i in range(reference_TLH.shape[1])
    ]


def check_alone(batched: Sequence[CheckedRow], alone: Sequence[np.ndarray], layers: Sequence[int]) -> float:
    """Check `alone`: a row recorded alone equals the same row recorded in a batch; returns the largest relative error.

    Raises:
        EyasError: a layer differs by more than bfloat16 noise (2 %).
    """
    worst = 0.0
    for row, single_TLH in zip(batched, alone, strict=True):
        if single_TLH.shape != row.hidden_TLH.shape:
            raise EyasError(
                f"self-check `alone`: row {row.name}: states of shape {list(single_TLH.shape)} alone and "
                f"{list(row.hidden_TLH.shape)} in a batch; likely cause: prefix caching was on"
            )
        for layer, error in zip(layers, relative_errors(states(row.hidden_TLH), states(single_TLH)), strict=True):
            worst = max(worst, error)
            if not error <= MAX_BATCH_DIFFERENCE:
                raise EyasError(
                    f"self-check `alone`: row {row.name}, layer {layer}: recorded alone and in a batch it differs by "
                    f"{error:.3f} (at most {MAX_BATCH_DIFFERENCE}); likely cause: rows mixed up in a batch, or chunked "
                    "prefill"
                )
    return worst


def check_reference(
    rows: Sequence[CheckedRow], references: Sequence[torch.Tensor], layers: Sequence[int]
) -> dict[str, float]:
    """Check `reference`: relative error per layer against states [T, L, H] from transformers in float32.

    Raises:
        EyasError: a layer is off by more than 2 %.
    """
    own_TLH = torch.cat([states(row.hidden_TLH) for row in rows])
    errors = relative_errors(own_TLH, torch.cat(list(references)))
    for layer, error in zip(layers, errors, strict=True):
        if not error <= MAX_REFERENCE_ERROR:
            raise EyasError(
                f"self-check `reference`: layer {layer} differs from transformers' float32 states by {error:.3f} (at "
                f"most {MAX_REFERENCE_ERROR}); likely cause: layer ids off by one, or a compute type that loses too much"
            )
    return {str(layer): error for layer, error in zip(layers, errors, strict=True)}
