"""The chunks of a compressed dataset: written past HDF5's own filter, and looked at in the file before HDF5 reads them.

Takes rows uint16 [T, L, H] in order; gives chunks of one layer and a fixed number of tokens, and where they lie.

Legend: T tokens, L layers, H hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from eyas.store.codecs import CHUNK_HEADER_BYTES, LosslessEncoder, is_whole_chunk

_ADVICE_BYTES = 128 << 10  # for one advice Linux reads no more than the disk takes in one request


class ChunkWriter:
    """Gathers rows into chunks, so that each is compressed once, and writes them past HDF5's own filter."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset
        self._encode = LosslessEncoder()
        tokens, _, _ = self._dataset.chunks
        self._chunk_LTH = np.zeros((self._dataset.shape[1], tokens, self._dataset.shape[2]), np.uint16)
        self._written = self._filled = 0

    def __call__(self, states_TLH: NDArray[Any]) -> None:
        """Append a row; the last one of the dataset is written out at once, its chunk filled up with zeros."""
        tokens = self._chunk_LTH.shape[1]
        done = 0
        while done < len(states_TLH):
            count = min(len(states_TLH) - done, tokens - self._filled)
            piece_LTH = states_TLH[done : done + count].swapaxes(0, 1)
            done += count
            if count == tokens:
                self._write(piece_LTH, tokens)
                continue
            self._chunk_LTH[:, self._filled : self._filled + count] = piece_LTH
            self._filled += count
            if self._filled == tokens or self._written + self._filled == len(self._dataset):
                self._chunk_LTH[:, self._filled :] = 0
                self._write(self._chunk_LTH, self._filled)
                self._filled = 0

    def _write(self, chunk_LTH: NDArray[np.uint16], tokens: int) -> None:
        for layer, words_TH in enumerate(chunk_LTH):
            self._dataset.id.write_direct_chunk((self._written, layer, 0), self._encode(words_TH))
        self._written += tokens


class Chunks:
    """Where the chunks of a dataset lie in its file."""

    def __init__(self, dataset: h5py.Dataset, descriptor: int) -> None:
        self._dataset, self._descriptor = dataset, descriptor
        self._places: dict[tuple[int, ...], tuple[int, int, int]] = {}

    def check(self, start: int, end: int) -> None:
        """Compare the headers of these tokens' chunks with what they must say: the filter believes them, and would read past their end.

        Raises:
            ValueError: a chunk is not one of this codec.
            KeyError: a chunk is not there.
        """
        words = self._dataset.chunks[0] * self._dataset.shape[2]
        for (token, layer), (offset, size, mask) in self._between(start, end):
            header = os.pread(self._descriptor, CHUNK_HEADER_BYTES, offset)
            header += os.pread(self._descriptor, 4, offset + CHUNK_HEADER_BYTES + words)
            if mask or not is_whole_chunk(header, size, words):
                raise ValueError(f"the chunk of token {token}, layer {layer} is not one of this codec")

    def prefetch(self, start: int, end: int) -> None:
        """Have the kernel read these tokens' chunks, which lie side by side, into the page cache, many requests at once.

        Raises:
            KeyError: a chunk is not there.
        """
        places = [place for _, place in self._between(start, end)]
        last = max(offset + size for offset, size, _ in places)
        last = min(last, os.fstat(self._descriptor).st_size)  # damage may lead past it
        for position in range(min(offset for offset, _, _ in places), last, _ADVICE_BYTES):
            os.posix_fadvise(self._descriptor, position, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)

    def _between(self, start: int, end: int) -> Iterator[tuple[tuple[int, int], tuple[int, int, int]]]:
        """First token and layer of each chunk that has these tokens; its offset in the file, bytes and filter mask."""
        if not self._places:
            self._dataset.id.chunk_iter(self._note)
        tokens = self._dataset.chunks[0]
        for first in range(start - start % tokens, end, tokens):
            for layer in range(self._dataset.shape[1]):
                yield (first, layer), self._places[first, layer, 0]

    def _note(self, chunk: Any) -> None:
        self._places[tuple(chunk.chunk_offset)] = chunk.byte_offset, chunk.size, chunk.filter_mask
