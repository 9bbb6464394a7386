"""The checks that every new row must pass: its length, and states that are finite, non-zero and distinct by layer.

They need no target and no engine, so that processes which start in a moment can share the work.

Shape legend: T tokens, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from eyas.errors import EyasError
from eyas.store.format import StoreSpec, row_key
from eyas.store.spool import RowSpool


@dataclass(frozen=True)
class TokenRow:
    """What extraction needs of a row of the tokens table."""

    name: str
    probe: bool
    input_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]  # of the supervised tokens; NaN where the data holds the answer

    @property
    def generated(self) -> bool:
        """Whether the engine wrote any of its supervised tokens, rather than the data."""
        return any(mask and value == value for mask, value in zip(self.loss_mask, self.logprobs, strict=True))


@dataclass(frozen=True)
class CheckedRow:
    """One recorded row with what the engine said when it generated it."""

    name: str  # shown in errors
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T]
    hidden_TLH: np.ndarray  # uint16, bfloat16 bit patterns


def check_form(rows: Sequence[CheckedRow], layers: Sequence[int]) -> None:
    """Named checks `length`, `finite`, `nonzero`, `distinct` on every row.

    Raises:
        EyasError: naming the row, the layer and the likely cause.
    """
    for row in rows:
        tokens, recorded = len(row.input_ids), row.hidden_TLH.shape
        if recorded[:2] != (tokens, len(layers)):
            if recorded[1] != len(layers):
                cause = "the engine records other layers than were asked for"
            else:
                cause = "prefix caching was on" if recorded[0] < tokens else "rows were mixed up in a batch"
            raise EyasError(
                f"self-check `length`: row {row.name} has {tokens} tokens and {len(layers)} layers, but states of shape "
                f"{list(recorded)} were recorded; likely cause: {cause}"
            )
        exponent = row.hidden_TLH & 0x7F80
        for index, layer in enumerate(layers):
            if (exponent[:, index] == 0x7F80).any():
                position = int(np.argwhere(exponent[:, index] == 0x7F80)[0, 0])
                raise EyasError(
                    f"self-check `finite`: row {row.name}, layer {layer}, token {position} is NaN or infinite; likely "
                    "cause: overflow in the engine's compute type"
                )
            zero = ~(row.hidden_TLH[:, index] & 0x7FFF).any(axis=-1)
            if zero.any():
                raise EyasError(
                    f"self-check `nonzero`: row {row.name}, layer {layer}, token {int(zero.argmax())} is all zeros; "
                    "likely cause: the engine did not fill its hidden-state cache (hybrid targets, or a wrong slot)"
                )
        for first, second in combinations(range(len(layers)), 2):
            if np.array_equal(row.hidden_TLH[:, first], row.hidden_TLH[:, second]):
                raise EyasError(
                    f"self-check `distinct`: row {row.name}: layers {layers[first]} and {layers[second]} are equal; "
                    "likely cause: the engine does not know one of these layer ids"
                )


def check_rows(spool: RowSpool, spec: StoreSpec, rows: Sequence[TokenRow]) -> int:
    """`check_form` on rows of a spool, one at a time; gives their number.

    Raises:
        EyasError: as `check_form`; a row that is not there.
    """
    for row in rows:
        check_form([checked_row(spool, spec, row)], spec.layers)
    return len(rows)


def checked_row(spool: RowSpool, spec: StoreSpec, row: TokenRow) -> CheckedRow:
    """What the spool has of a row, with what the tokens table says of it."""
    input_ids, hidden_TLH = spool.read(row_key(spec.fingerprint, row.input_ids))
    return CheckedRow(
        row.name, input_ids, np.asarray(row.loss_mask), np.asarray(row.logprobs, dtype=np.float32), hidden_TLH
    )
