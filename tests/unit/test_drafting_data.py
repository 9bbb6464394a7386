"""How rows become batches; and the tiny target and store that the tests of the drafting room share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eyas.drafting.data import RowReader, TokenRow, batches, collate, pack, token_rows
from eyas.drafting.heads import make_head
from eyas.errors import EyasError
from eyas.params import DraftParams
from eyas.vocabulary import DraftVocabulary, choose


@dataclass(frozen=True)
class Sizes:
    hidden: int = 64
    layers: int = 4
    vocab: int = 512
    draft_vocab: int = 128


SIZES = Sizes()


def make_target(directory: Path, *, tied: bool = True) -> Path:
    """A tiny random Llama in Hugging Face layout."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": SIZES.hidden,
        "intermediate_size": 96, "num_hidden_layers": SIZES.layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "vocab_size": SIZES.vocab,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": tied,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.randn(SIZES.vocab, SIZES.hidden, generator=generator),
        "model.norm.weight": 1 + 0.1 * torch.randn(SIZES.hidden, generator=generator),
    }
    if not tied:
        tensors["lm_head.weight"] = torch.randn(SIZES.vocab, SIZES.hidden, generator=generator)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def vocabulary() -> DraftVocabulary:
    counts = np.random.default_rng(1).integers(0, 50, SIZES.vocab)
    return choose(counts, SIZES.draft_vocab, [0, 1, 2])


@dataclass(frozen=True)
class Stored:
    input_ids: np.ndarray
    hidden_TLH: np.ndarray


class MemoryStore:
    """Random states by key, where the store on disk would need an extraction."""

    def __init__(self) -> None:
        self.rows: dict[str, Stored] = {}

    def add(self, row: TokenRow) -> None:
        generator = torch.Generator().manual_seed(int(row.input_ids.sum()))
        states = torch.randn(len(row.input_ids), SIZES.layers, SIZES.hidden, generator=generator).bfloat16()
        self.rows[row.key] = Stored(row.input_ids, states.view(torch.int16).numpy().view(np.uint16))

    def read(self, key: str) -> Stored:
        return self.rows[key]


def random_row(random: np.random.Generator, length: int, *, supervise_all: bool = False) -> TokenRow:
    ids = random.integers(3, SIZES.vocab, length).astype(np.int32)
    mask = np.ones(length, dtype=bool)
    if not supervise_all:
        mask[: length // 2] = False
        mask[3 * length // 4 : 3 * length // 4 + 2] = False
    return TokenRow(f"c{length}", f"key{length}-{ids[0]}", ids, mask)


@dataclass
class Case:
    model: Any
    store: MemoryStore
    rows: list[TokenRow]
    directory: Path


def make_case(tmp_path: Path, *, rows: int, supervise_all: bool = False, draft: DraftParams | None = None) -> Case:
    directory = make_target(tmp_path / "target")
    random = np.random.default_rng(0)
    made = [random_row(random, 24 + 5 * i, supervise_all=supervise_all) for i in range(rows)]
    store = MemoryStore()
    for row in made:
        store.add(row)
    model = make_head(draft or DraftParams(), directory, "some/target", vocabulary(), [1, 2, 3, 4], ttt_steps=3, seed=0)
    return Case(model, store, made, directory)


def _row(ids: list[int], mask: str) -> TokenRow:
    weighs = np.array([c == "1" for c in mask])
    return TokenRow("c", "k", np.array(ids, dtype=np.int32), weighs)


def test_mask_travels_with_the_label_it_weighs() -> None:
    """x0..x9 with mask 0000011111 trains exactly the inputs x5..x9, each beside the state before and its own teacher."""
    row = _row(list(range(100, 110)), "0000011111")
    store = MemoryStore()
    store.add(row)
    states = torch.from_numpy(store.read("k").hidden_TLH.view(np.int16)).view(torch.bfloat16)
    batch = collate(store, [row])
    assert batch.input_ids_T[batch.mask_T].tolist() == [105, 106, 107, 108, 109]
    slot = batch.input_ids_T.tolist().index(105)
    assert torch.equal(batch.aux_TA[slot], states[4, :-1].flatten())
    assert torch.equal(batch.final_TH[slot], states[5, -1])
    assert not batch.mask_T[slot - 1]
    assert batch.positions_T.tolist() == list(range(1, 10))


def test_a_masked_first_token_is_never_an_input() -> None:
    row = _row([7, 8, 9], "111")
    store = MemoryStore()
    store.add(row)
    assert collate(store, [row]).input_ids_T.tolist() == [8, 9]


def test_states_are_the_stored_bits() -> None:
    row = random_row(np.random.default_rng(0), 12)
    store = MemoryStore()
    store.add(row)
    batch = collate(store, [row])
    bits = torch.cat([batch.aux_TA.unflatten(-1, (-1, SIZES.hidden))[1:], batch.final_TH[:-1, None]], 1)
    assert np.array_equal(bits.view(torch.int16).numpy().view(np.uint16), store.read(row.key).hidden_TLH[1:-1])


def test_wrong_tokens_under_a_key_are_an_error() -> None:
    row = random_row(np.random.default_rng(0), 12)
    store = MemoryStore()
    store.add(row)
    store.rows[row.key] = Stored(row.input_ids[::-1], store.rows[row.key].hidden_TLH)
    with pytest.raises(EyasError, match="extract"):
        collate(store, [row])


def test_packs_hold_whole_rows_once_within_the_limit() -> None:
    random = np.random.default_rng(0)
    rows = [random_row(random, int(n)) for n in random.integers(8, 60, 40)]
    rows.append(random_row(random, 200))
    for seed in (None, 3):
        packs = pack(rows, 100, seed)
        assert sorted(id(r) for p in packs for r in p) == sorted(id(r) for r in rows)
        assert all(len(p) == 1 or sum(r.slots for r in p) <= 100 for p in packs)
    assert pack(rows, 100, 3) == pack(rows, 100, 3)
    assert pack(rows, 100, 3) != pack(rows, 100, 4)


def test_batches_come_in_order() -> None:
    random = np.random.default_rng(0)
    rows = [random_row(random, 10 + i) for i in range(6)]
    store: MemoryStore = MemoryStore()
    for row in rows:
        store.add(row)
    reader: RowReader = store
    seen = [b.rows[0].conversation_id for b in batches(reader, [[r] for r in rows], torch.device("cpu"))]
    assert seen == [r.conversation_id for r in rows]


def test_rows_of_a_split() -> None:
    def row(split: str, ids: list[int], mask: list[bool], kind: str = "sampled") -> dict[str, Any]:
        return {"conversation_id": split, "split": split, "kind": kind, "input_ids": ids, "loss_mask": mask}

    table = [
        row("train", [1, 2], [False, True]),
        row("train", [3, 4], [True, False]),
        row("validation", [5, 6], [False, True], "greedy_probe"),
    ]
    assert [r.key for r in token_rows(table, "train", str)] == ["[1, 2]"]
    with pytest.raises(EyasError, match="validation"):
        token_rows(table, "validation", str)
