"""bf16 bit patterns to what a shard holds, and back, in NumPy.

``none`` keeps the bits; ``lossless`` rotates them so that a byte shuffle parts exponents (few bits of entropy) from
sign and mantissa (all bits of it); ``fp8`` is e4m3 with one float32 scale for each token and layer.

Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

_FP8_LARGEST = 448.0
_CHUNK_BYTES = 128 * 1024
_PIECE_BYTES = 256 * 1024
# version, version of the inner format, flags, bytes of a word; bytes, bytes of a block, bytes in all
_BLOSC_HEADER = struct.Struct("<BBBBIII")
_BLOSC_FORMAT = 2
_BLOSC_ZSTD_FORMAT = 1
_BLOSC_SHUFFLED = 0x81  # Zstd, bytes shuffled, a stream for each byte of the word
_BLOSC_COPIED = 0x82  # as it is
_BLOSC_LEAST_WORDS = 128  # Blosc parts no smaller block into streams
_STREAMS_AT = _BLOSC_HEADER.size + 4  # after the header, and where the only block begins
CHUNK_HEADER_BYTES = _STREAMS_AT + 4


def chunk_tokens(hidden_size: int) -> int:
    """Tokens in a chunk of the lossless codec: a power of two from 16 to 256, about 128 KiB.

    So a row of a few hundred tokens costs little more than itself to read; larger chunks give 1 % more ratio.
    """
    fitting = max(1, _CHUNK_BYTES // (2 * hidden_size))
    return min(256, max(16, 1 << (fitting.bit_length() - 1)))


class LosslessEncoder:
    """Compresses chunks: a Blosc chunk of one block with two streams, low bytes as they are and high bytes through Zstd.

    The HDF5 filter `Blosc` reads them like its own. They are made here, because Zstd at its fastest level looks for repetitions,
    which exponents have none of; told to look for next to none and to code single bytes, it is three times as fast and packs
    closer. Low bytes (sign and mantissa) are noise and do not shrink at all. Chunk format: c-blosc's README_CHUNK_FORMAT.
    """

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
        )
        self._zstd = zstandard.ZstdCompressor(compression_params=parameters)
        self._make_buffers(())

    def _make_buffers(self, shape: tuple[int, ...]) -> None:
        # kept from chunk to chunk: the page faults of fresh ones cost as much as Zstd does
        words = math.prod(shape)
        self._chunk = memoryview(bytearray(_STREAMS_AT + 8 + 2 * words))
        self._low = np.frombuffer(self._chunk, np.uint8, words, _STREAMS_AT + 4).reshape(shape)
        self._high = np.empty(shape, np.uint8)
        self._shifted = np.empty(shape, np.uint16)
        self._negative = np.empty(shape, np.bool_)

    def __call__(self, words: NDArray[np.uint16]) -> bytes | memoryview:
        """One chunk of words, rotated left by one so that the eight exponent bits fill the high byte.

        A memoryview is overwritten by the next call.
        """
        if words.size < _BLOSC_LEAST_WORDS:
            rotated = (words << np.uint16(1)) | (words >> np.uint16(15))
            return _blosc_header(_BLOSC_COPIED, words.nbytes, _BLOSC_HEADER.size + words.nbytes) + rotated.tobytes()
        if words.shape != self._low.shape:
            self._make_buffers(words.shape)
        # few passes, and narrowing copies: they run in vector registers, which a copy of every other byte does not
        np.less(words.view(np.int16), 0, out=self._negative)
        np.copyto(self._low, words, casting="unsafe")
        np.add(self._low, self._low, out=self._low)
        np.bitwise_or(self._low, self._negative.view(np.uint8), out=self._low)
        np.right_shift(words, 7, out=self._shifted)
        np.copyto(self._high, self._shifted, casting="unsafe")
        high = self._high.data.cast("B")
        packed: bytes | memoryview = self._zstd.compress(high)
        if len(packed) >= len(high):
            packed = high
        end = _STREAMS_AT + 4 + words.size
        total = end + 4 + len(packed)
        header = _blosc_header(_BLOSC_SHUFFLED, words.nbytes, total)
        self._chunk[: _STREAMS_AT + 4] = header + _size(_STREAMS_AT) + _size(words.size)
        self._chunk[end : end + 4] = _size(len(packed))
        self._chunk[end + 4 : total] = packed
        return self._chunk[:total]


def is_whole_chunk(header: bytes, size: int, words: int) -> bool:
    """Whether a chunk of ``size`` bytes is laid out as `LosslessEncoder` does it for so many words.

    ``header`` has its first `CHUNK_HEADER_BYTES`, and the four bytes that follow the first stream of ``words`` bytes.
    """
    if words < _BLOSC_LEAST_WORDS:
        total = _BLOSC_HEADER.size + 2 * words
        return size == total and header[: _BLOSC_HEADER.size] == _blosc_header(_BLOSC_COPIED, 2 * words, total)
    packed = size - _STREAMS_AT - 8 - words
    if not 0 < packed <= words:
        return False
    return header == _blosc_header(_BLOSC_SHUFFLED, 2 * words, size) + _size(_STREAMS_AT) + _size(words) + _size(packed)


def _blosc_header(flags: int, size: int, total: int) -> bytes:
    return _BLOSC_HEADER.pack(_BLOSC_FORMAT, _BLOSC_ZSTD_FORMAT, flags, 2, size, size, total)


def _size(value: int) -> bytes:
    return value.to_bytes(4, "little")


def unrotate_in_place(hidden_TLH: NDArray[np.uint16]) -> None:
    """Rotate each word right by one, a few tokens at a time so that they stay in the processor's cache between the passes."""
    tokens = max(1, _PIECE_BYTES // max(1, hidden_TLH[:1].nbytes))
    for start in range(0, len(hidden_TLH), tokens):
        piece = hidden_TLH[start : start + tokens]
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
