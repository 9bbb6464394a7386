"""bf16 bit patterns to what a shard holds, and back, in NumPy.

``none`` keeps the bits; ``lossless`` rotates them so that a byte shuffle parts exponents (few bits of entropy) from
sign and mantissa (all bits of it); ``fp8`` is e4m3 with one float32 scale for each token and layer.

Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FP8_LARGEST = 448.0
_CHUNK_BYTES = 128 * 1024


def chunk_tokens(hidden_size: int) -> int:
    """Tokens in a chunk of the lossless codec: a power of two from 16 to 256, about 128 KiB.

    So a row of a few hundred tokens costs little more than itself to read; larger chunks give 1 % more ratio.
    """
    fitting = max(1, _CHUNK_BYTES // (2 * hidden_size))
    return min(256, max(16, 1 << (fitting.bit_length() - 1)))


def rotate(hidden_TLH: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Rotate each word left by one: the eight exponent bits come to fill the high byte."""
    rotated_TLH = hidden_TLH << np.uint16(1)
    rotated_TLH |= hidden_TLH >> np.uint16(15)
    return rotated_TLH


def unrotate_in_place(hidden_TLH: NDArray[np.uint16], rows: int = 64) -> None:
    """Undo `rotate`, a few tokens at a time so that the pieces stay in the processor's cache."""
    for start in range(0, len(hidden_TLH), rows):
        piece = hidden_TLH[start : start + rows]
        sign = piece << np.uint16(15)
        piece >>= np.uint16(1)
        piece |= sign


def _to_float32(hidden: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (hidden.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


def float32_to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to e4m3 (``float8_e4m3fn``), ties to even; beyond 448 saturates, NaN and infinities become NaN."""
    magnitude = np.minimum(np.abs(values), np.float32(_FP8_LARGEST))
    bits = magnitude.view(np.uint32)
    rounded = bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))
    normal = (rounded >> np.uint32(20)).astype(np.int32) - (120 << 3)
    subnormal = np.rint(np.where(magnitude < 2.0**-6, magnitude, 0) * np.float32(512)).astype(np.int32)
    code = np.where(magnitude < 2.0**-6, subnormal, normal)
    code = np.where(np.isfinite(values), code, 0x7F)
    signed: NDArray[np.uint8] = (code | (np.signbit(values).astype(np.int32) << 7)).astype(np.uint8)
    return signed


def _e4m3_values() -> NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    value = np.where(code & 0x7F == 0x7F, np.nan, value)
    return np.where(code >= 128, -value, value).astype(np.float32)


E4M3_VALUES = _e4m3_values()


def encode_fp8(hidden_TLH: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes uint8 [T, L, H] and scales float32 [T, L]: the largest finite magnitude of a token and layer becomes 448.

    NaN and infinities become NaN, so that they are still seen as faults.
    """
    values_TLH = _to_float32(hidden_TLH)
    largest_TL = np.where(np.isfinite(values_TLH), np.abs(values_TLH), 0).max(axis=2)
    scale_TL = (largest_TL / np.float32(_FP8_LARGEST)).astype(np.float32)
    # a row of zeros, or one so small that its scale would be denormal and its inverse infinite
    scale_TL[scale_TL < np.finfo(np.float32).tiny] = 1.0
    return float32_to_e4m3(values_TLH / scale_TL[:, :, None]), scale_TL


def decode_fp8(code_TLH: NDArray[np.uint8], scale_TL: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bit patterns of the stored approximation."""
    return _to_bfloat16(E4M3_VALUES[code_TLH] * scale_TL[:, :, None])
