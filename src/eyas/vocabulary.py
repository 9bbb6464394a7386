"""The draft vocabulary: which of the target's tokens the head may propose, chosen by how often they were generated.

Takes counts of supervised tokens; gives `d2t`, `t2d` in the layout of vLLM and speculators.
Shape legend: D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from eyas.errors import EyasError
from eyas.files import atomic_file


@dataclass(frozen=True)
class DraftVocabulary:
    """A draft vocabulary; target id of draft id i is ``i + d2t_D[i]``."""

    d2t_D: np.ndarray  # int64, offsets
    t2d_V: np.ndarray  # bool, whether the target's token has a draft id
    counts_V: np.ndarray  # int64, supervised occurrences in the training split

    @property
    def target_ids(self) -> np.ndarray:
        """Target ids in the order of draft ids, int64 [D]."""
        ids: np.ndarray = np.arange(len(self.d2t_D)) + self.d2t_D
        return ids

    def coverage(self, counts_V: np.ndarray) -> float:
        """Share of the counted tokens that the head can propose."""
        return float(counts_V[self.t2d_V].sum() / max(1, counts_V.sum()))


def count_tokens(rows: Iterable[tuple[Sequence[int], Sequence[bool]]], vocab_size: int) -> np.ndarray:
    """Occurrences of each token among the supervised ones, int64 [V]; rows are (input_ids, loss_mask).

    Raises:
        EyasError: a token id lies outside the target's vocabulary.
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for ids, mask in rows:
        supervised = np.asarray(ids, dtype=np.int64)[np.asarray(mask, dtype=bool)]
        if supervised.size and int(supervised.max()) >= vocab_size:
            raise EyasError(f"token id {int(supervised.max())} is outside the target's vocabulary of {vocab_size}")
        counts_V += np.bincount(supervised, minlength=vocab_size)
    return counts_V


def choose(counts_V: np.ndarray, size: int | None, always: Sequence[int]) -> DraftVocabulary:
    """Special tokens, then the most frequent (lower id first among equals), in the order of their target ids.

    Where fewer tokens occur than fit, the lowest unused ids fill the rest. Without a size, every token of the target's.

    Raises:
        EyasError: the draft vocabulary would be larger than the target's, or smaller than the special tokens.
    """
    vocab_size = len(counts_V)
    size = vocab_size if size is None else size
    if size > vocab_size:
        raise EyasError(
            f"vocab.draft_vocab_size is {size}, but the target has only {vocab_size} tokens; set at most that"
        )
    forced = np.unique(np.asarray([i for i in always if i < vocab_size], dtype=np.int64))
    if len(forced) > size:
        raise EyasError(
            f"vocab.draft_vocab_size is {size}, but the target's {len(forced)} special tokens must be in it"
        )
    order = np.lexsort((np.arange(vocab_size), -counts_V))
    rest = order[~np.isin(order, forced)][: size - len(forced)]
    chosen = np.sort(np.concatenate([forced, rest]))
    t2d_V = np.zeros(vocab_size, dtype=bool)
    t2d_V[chosen] = True
    return DraftVocabulary(chosen - np.arange(size), t2d_V, counts_V)


def save_vocabulary(path: Path, vocabulary: DraftVocabulary) -> None:
    """Write ``d2t``, ``t2d`` and ``counts`` as safetensors."""
    with atomic_file(path) as temporary:
        tensors = {"d2t": vocabulary.d2t_D, "t2d": vocabulary.t2d_V, "counts": vocabulary.counts_V}
        save_file(tensors, temporary)


def load_vocabulary(path: Path) -> DraftVocabulary:
    """Read what `save_vocabulary` wrote.

    Raises:
        EyasError: the file is missing or its parts contradict each other.
    """
    if not path.is_file():
        raise EyasError(f"{path}: no such file; run the `vocab` stage")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise EyasError(f"{path}: not readable ({error}); run the `vocab` stage again") from None
    vocabulary = DraftVocabulary(tensors["d2t"], tensors["t2d"], tensors["counts"])
    if not np.array_equal(np.flatnonzero(vocabulary.t2d_V), vocabulary.target_ids):
        raise EyasError(f"{path}: d2t and t2d name different tokens; run the `vocab` stage again")
    return vocabulary
