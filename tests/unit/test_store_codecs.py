from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch

from eyas.store.codecs import (
    E4M3_VALUES,
    LosslessEncoder,
    chunk_tokens,
    decode_fp8,
    encode_fp8,
    float32_to_e4m3,
    unrotate_in_place,
)

ALL_WORDS = np.arange(65536, dtype=np.uint16).reshape(-1, 2, 16)


def blosc(chunk: bytes | memoryview, words: np.ndarray, folder: Path) -> np.ndarray:
    """What the HDF5 filter makes of a chunk."""
    with h5py.File(folder / "chunk.h5", "w") as file:
        filters = hdf5plugin.Blosc(cname="zstd", clevel=1, shuffle=hdf5plugin.Blosc.SHUFFLE)
        dataset = file.create_dataset("words", words.shape, "<u2", chunks=words.shape, **filters)
        dataset.id.write_direct_chunk((0,) * words.ndim, chunk)
    with h5py.File(folder / "chunk.h5") as file:
        return file["words"][()]


def test_every_word_comes_back_through_the_filter(tmp_path: Path) -> None:
    read = blosc(LosslessEncoder()(ALL_WORDS), ALL_WORDS, tmp_path)
    assert len(np.unique(read)) == 65536
    assert np.array_equal(read >> 8, (ALL_WORDS >> 7) & 0xFF)  # the exponent has a byte of its own
    unrotate_in_place(read)
    assert np.array_equal(read, ALL_WORDS)


@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (16, 7168), (64, 576), (3, 7)])
@pytest.mark.parametrize("kind", ["noise", "zeros", "states"])
def test_any_chunk_comes_back_through_the_filter(tmp_path: Path, shape: tuple[int, int], kind: str) -> None:
    source = np.random.default_rng(0)
    words = source.integers(0, 65536, shape, dtype=np.uint16)
    if kind == "states":
        words = (source.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    words *= np.uint16(kind != "zeros")
    chunk = LosslessEncoder()(words)
    assert len(chunk) <= words.nbytes + 28
    if kind == "states" and words.size > 10_000:
        assert words.nbytes / len(chunk) > 1.4
    read = blosc(chunk, words, tmp_path)
    unrotate_in_place(read)
    assert np.array_equal(read, words)


def test_an_encoder_gives_the_same_for_any_order_and_stride_of_chunks() -> None:
    source = np.random.default_rng(0)
    rows = source.integers(0, 65536, (40, 3, 96), dtype=np.uint16)
    encode = LosslessEncoder()
    for words in (rows[:16, 1], rows[16:40, 2], rows[:1, 0], rows[:16, 0], rows[:16, 1]):
        assert bytes(encode(words)) == bytes(LosslessEncoder()(words.copy()))


@pytest.mark.parametrize(("hidden", "tokens"), [(1, 256), (576, 64), (2048, 32), (4096, 16), (7168, 16)])
def test_chunks_have_128_kibibytes_within_limits(hidden: int, tokens: int) -> None:
    assert chunk_tokens(hidden) == tokens


def test_e4m3_values_are_torchs() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3_VALUES, theirs, equal_nan=True)


def test_e4m3_rounding_is_torchs_for_every_bf16_in_range() -> None:
    values = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) <= 448)]
    between = np.nextafter(values, np.float32(0))
    for tried in (values, between):
        theirs = torch.from_numpy(tried.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert np.array_equal(float32_to_e4m3(tried), theirs)


def test_e4m3_saturates_and_keeps_faults_visible() -> None:
    codes = float32_to_e4m3(np.array([1e9, -1e9, np.nan, np.inf, -np.inf, -0.0], dtype=np.float32))
    assert E4M3_VALUES[codes[:2]].tolist() == [448, -448]
    assert np.isnan(E4M3_VALUES[codes[2:5]]).all()
    assert codes[5] == 0x80


def test_fp8_error_is_within_half_a_step_of_the_scale() -> None:
    values = np.random.default_rng(0).normal(0, 3, (64, 3, 128)).astype(np.float32)
    hidden_TLH = (values.view(np.uint32) >> 16).astype(np.uint16)
    exact = (hidden_TLH.astype(np.uint32) << 16).view(np.float32)
    code_TLH, scale_TL = encode_fp8(hidden_TLH)
    back = (decode_fp8(code_TLH, scale_TL).astype(np.uint32) << 16).view(np.float32)
    # half of e4m3's last bit (1/16), bf16's own rounding (1/256), and the subnormal step of the scale
    limit = np.abs(exact) * (1 / 16 + 1 / 256) + scale_TL[:, :, None] * 2.0**-10
    assert (np.abs(back - exact) <= limit).all()


def test_fp8_of_zeros_and_of_the_smallest_values() -> None:
    hidden_TLH = np.zeros((2, 1, 4), np.uint16)
    hidden_TLH[1] = 1
    code_TLH, scale_TL = encode_fp8(hidden_TLH)
    assert np.isfinite(scale_TL).all()
    assert not decode_fp8(code_TLH, scale_TL).any()
