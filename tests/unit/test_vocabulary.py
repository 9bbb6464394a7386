"""The draft vocabulary holds the special tokens and the most frequent ones, and its two tables agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from eyas.errors import EyasError
from eyas.files import file_sha256
from eyas.vocabulary import DraftVocabulary, choose, count_tokens, load_vocabulary, save_vocabulary


def counts(values: dict[int, int], vocab_size: int = 16) -> np.ndarray:
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for token, count in values.items():
        counts_V[token] = count
    return counts_V


def test_only_supervised_tokens_are_counted() -> None:
    counted_V = count_tokens([([3, 3, 5, 2], [False, True, True, True]), ([5], [True]), ([], [])], 8)
    assert counted_V.dtype == np.int64
    assert counted_V.tolist() == [0, 0, 1, 1, 0, 2, 0, 0]


def test_a_token_beyond_the_vocabulary_is_named() -> None:
    with pytest.raises(EyasError, match="token id 8 is outside the target's vocabulary of 8"):
        count_tokens([([1, 8], [True, True])], 8)
    assert count_tokens([([1, 8], [True, False])], 8).sum() == 1  # an unsupervised one is not proposed


def test_special_tokens_are_always_in() -> None:
    vocabulary = choose(counts({9: 50, 10: 40, 11: 30}), 4, [15, 0, 15, 999])
    assert vocabulary.target_ids.tolist() == [0, 9, 10, 15]


def test_ties_go_to_the_lower_id() -> None:
    assert choose(counts({12: 5, 4: 5, 8: 5}), 2, []).target_ids.tolist() == [4, 8]


def test_fewer_tokens_than_fit_are_filled_with_the_lowest_ids() -> None:
    vocabulary = choose(counts({9: 3}), 5, [6])
    assert vocabulary.target_ids.tolist() == [0, 1, 2, 6, 9]
    assert choose(counts({}), 16, []).d2t_D.tolist() == [0] * 16


def test_a_draft_vocabulary_larger_than_the_targets_is_refused() -> None:
    with pytest.raises(EyasError, match=r"vocab\.draft_vocab_size is 17.*only 16 tokens; set at most that"):
        choose(counts({}), 17, [])


def test_a_draft_vocabulary_without_room_for_the_special_tokens_is_refused() -> None:
    with pytest.raises(EyasError, match="3 special tokens must be in it"):
        choose(counts({}), 2, [0, 1, 2])


def test_coverage() -> None:
    vocabulary = choose(counts({1: 6, 2: 3, 3: 1}), 2, [])
    assert vocabulary.coverage(vocabulary.counts_V) == pytest.approx(0.9)
    assert vocabulary.coverage(counts({})) == 0.0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_tables_agree_and_nothing_frequent_is_left_out(values: list[int], data: st.DataObject) -> None:
    counts_V = np.asarray(values, dtype=np.int64)
    size = data.draw(st.integers(1, len(values)))
    always = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=size, unique=True))
    vocabulary = choose(counts_V, size, always)
    assert [str(v.dtype) for v in (vocabulary.d2t_D, vocabulary.t2d_V)] == ["int64", "bool"]
    assert (vocabulary.d2t_D.shape, vocabulary.t2d_V.shape) == ((size,), counts_V.shape)
    target_ids = vocabulary.target_ids
    assert np.array_equal(np.flatnonzero(vocabulary.t2d_V), target_ids)  # distinct and ascending
    assert set(always) <= set(target_ids.tolist())
    # vLLM goes from draft to target with d2t, speculators from target to draft by counting t2d
    assert np.array_equal((np.cumsum(vocabulary.t2d_V) - 1)[target_ids], np.arange(size))
    chosen = [i for i in target_ids.tolist() if i not in always]
    left = [i for i in range(len(values)) if not vocabulary.t2d_V[i]]
    if chosen and left:
        assert max((-counts_V[i], i) for i in chosen) < min((-counts_V[i], i) for i in left)


def test_round_trip_and_same_bytes(tmp_path: Path) -> None:
    vocabulary = choose(counts({9: 3, 4: 2}), 5, [15])
    save_vocabulary(tmp_path / "a.safetensors", vocabulary)
    save_vocabulary(tmp_path / "b.safetensors", vocabulary)
    loaded = load_vocabulary(tmp_path / "a.safetensors")
    for name in ("d2t_D", "t2d_V", "counts_V"):
        written, read = getattr(vocabulary, name), getattr(loaded, name)
        assert np.array_equal(written, read)
        assert written.dtype == read.dtype
    assert set(load_file(tmp_path / "a.safetensors")) == {"d2t", "t2d", "counts"}
    assert file_sha256(tmp_path / "a.safetensors") == file_sha256(tmp_path / "b.safetensors")


def contradict(vocabulary: DraftVocabulary, what: str) -> dict[str, np.ndarray]:
    d2t_D, t2d_V = vocabulary.d2t_D.copy(), vocabulary.t2d_V.copy()
    if what == "offset":
        d2t_D[-1] -= 1
    elif what == "absolute ids in place of offsets":
        d2t_D = vocabulary.target_ids
    elif what == "one more in t2d":
        t2d_V[np.flatnonzero(~t2d_V)[0]] = True
    else:
        d2t_D = d2t_D[:-1]
    return {"d2t": d2t_D, "t2d": t2d_V, "counts": vocabulary.counts_V}


@pytest.mark.parametrize("what", ["offset", "absolute ids in place of offsets", "one more in t2d", "short d2t"])
def test_contradicting_tables_are_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "vocab.safetensors"
    save_file(contradict(choose(counts({9: 3, 4: 2}), 5, [15]), what), path)
    with pytest.raises(EyasError, match="d2t and t2d name different tokens"):
        load_vocabulary(path)


def test_a_missing_file_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="run the `vocab` stage"):
        load_vocabulary(tmp_path / "vocab.safetensors")
