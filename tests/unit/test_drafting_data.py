"""How rows become batches; and the tiny target and store that the tests of the drafting room share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eyas.drafting.data import Batch, TokenRow, by_key, to_batch, token_rows
from eyas.drafting.feeding import device_batches
from eyas.drafting.heads import make_head
from eyas.errors import EyasError
from eyas.params import DraftParams
from eyas.store.batches import Batch as PlannedBatch
from eyas.store.batches import PackedBatches
from eyas.store.feed import FedBatch
from eyas.store.format import StoreSpec, row_key
from eyas.store.reader import StoreReader
from eyas.store.spool import RowSpool
from eyas.store.writer import publish
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


SPEC = StoreSpec((1, 2, 3, 4), SIZES.hidden, "none", {"engine": "fixed"}, 1)
CPU = torch.device("cpu")


def states_of(row: TokenRow) -> np.ndarray:
    """Random states, uint16 [n, L, H], where a real store would need an extraction."""
    generator = torch.Generator().manual_seed(int(row.input_ids.sum()))
    states = torch.randn(len(row.input_ids), SIZES.layers, SIZES.hidden, generator=generator).bfloat16()
    return states.view(torch.int16).numpy().view(np.uint16)


def pack(rows: Sequence[TokenRow]) -> FedBatch:
    """What the feed gives for these rows."""
    lengths = [len(row.input_ids) for row in rows]
    plan = PlannedBatch(0, tuple(row.key for row in rows), sum(lengths))
    states = np.concatenate([states_of(row) for row in rows])
    return FedBatch(plan, states, np.concatenate([row.input_ids for row in rows]), lengths)


def collate(rows: Sequence[TokenRow]) -> Batch:
    return to_batch(pack(rows), by_key(rows), CPU)


def make_store(folder: Path, rows: Sequence[TokenRow], changed: Mapping[str, np.ndarray] | None = None) -> StoreReader:
    """A published store; ``changed`` has other states for some keys."""
    spool = RowSpool(folder / "work" / "rows", SPEC)
    for row in rows:
        assert spool.write(row.input_ids, (changed or {}).get(row.key, states_of(row))) == row.key
    publish(spool, folder / "store", SPEC, [row.key for row in rows])
    return StoreReader(folder / "store")


def make_row(name: str, ids: np.ndarray, mask: np.ndarray) -> TokenRow:
    return TokenRow(name, row_key(SPEC.fingerprint, ids), ids, mask)


def random_row(random: np.random.Generator, length: int, *, supervise_all: bool = False) -> TokenRow:
    ids = random.integers(3, SIZES.vocab, length).astype(np.int32)
    mask = np.ones(length, dtype=bool)
    if not supervise_all:
        mask[: length // 2] = False
        mask[3 * length // 4 : 3 * length // 4 + 2] = False
    return make_row(f"c{length}", ids, mask)


@dataclass
class Case:
    model: Any
    rows: list[TokenRow]
    directory: Path
    folder: Path


def make_case(tmp_path: Path, *, rows: int, supervise_all: bool = False, draft: DraftParams | None = None) -> Case:
    directory = make_target(tmp_path / "target")
    random = np.random.default_rng(0)
    made = [random_row(random, 24 + 5 * i, supervise_all=supervise_all) for i in range(rows)]
    model = make_head(draft or DraftParams(), directory, "some/target", vocabulary(), [1, 2, 3, 4], ttt_steps=3, seed=0)
    return Case(model, made, directory, tmp_path)


def _row(ids: list[int], mask: str) -> TokenRow:
    return make_row("c", np.array(ids, dtype=np.int32), np.array([c == "1" for c in mask]))


def test_mask_travels_with_the_label_it_weighs() -> None:
    """x0..x9 with mask 0000011111 trains exactly the inputs x5..x9, each beside the state before and its own teacher."""
    row = _row(list(range(100, 110)), "0000011111")
    other = _row([200, 201, 202], "011")
    states = torch.from_numpy(states_of(row).view(np.int16)).view(torch.bfloat16)
    for rows in ([row], [other, row]):
        batch = collate(rows)
        first = batch.input_ids_T.tolist().index(101)
        assert batch.input_ids_T[batch.mask_T].tolist()[-5:] == [105, 106, 107, 108, 109]
        slot = batch.input_ids_T.tolist().index(105)
        assert torch.equal(batch.aux_TA[slot], states[4, :-1].flatten())
        assert torch.equal(batch.final_TH[slot], states[5, -1])
        assert not batch.mask_T[slot - 1]
        assert batch.positions_T[first:].tolist() == list(range(1, 10))


def test_a_masked_first_token_is_never_an_input() -> None:
    assert collate([_row([7, 8, 9], "111")]).input_ids_T.tolist() == [8, 9]


def test_states_are_the_stored_bits() -> None:
    row = random_row(np.random.default_rng(0), 12)
    batch = collate([row])
    bits = torch.cat([batch.aux_TA.unflatten(-1, (-1, SIZES.hidden))[1:], batch.final_TH[:-1, None]], 1)
    assert np.array_equal(bits.view(torch.int16).numpy().view(np.uint16), states_of(row)[1:-1])


@pytest.mark.parametrize("fault", ["other", "longer"])
def test_wrong_tokens_under_a_key_are_an_error(fault: str) -> None:
    random = np.random.default_rng(0)
    rows = [random_row(random, 8), random_row(random, 12)]
    fed = pack(rows)
    if fault == "other":
        fed.input_ids[9] += 1
    else:
        rows[1] = replace(rows[1], input_ids=rows[1].input_ids[:-1], loss_mask=rows[1].loss_mask[:-1])
    with pytest.raises(EyasError, match=rf"{rows[1].key}.*extract"):
        to_batch(fed, by_key(rows), CPU)


def test_conversations_of_the_same_tokens_all_come_each_with_its_own_mask() -> None:
    one, other = _row([7, 8, 9], "011"), _row([5, 6], "01")
    twin = replace(one, conversation_id="twin", loss_mask=np.array([False, False, True]))
    rows = by_key([one, other, twin])
    batch = to_batch(pack([one, other]), rows, CPU)
    assert [row.conversation_id for row in batch.rows] == ["c", "twin", "c"]
    assert batch.lengths == [2, 2, 1]
    assert batch.input_ids_T.tolist() == [8, 9, 8, 9, 6]
    assert batch.mask_T.tolist() == [True, True, False, True, True]
    assert batch.positions_T.tolist() == [1, 2, 1, 2, 1]
    assert torch.equal(batch.aux_TA[:2], batch.aux_TA[2:4])
    assert torch.equal(batch.final_TH[:2], batch.final_TH[2:4])


def test_batches_from_the_store_come_in_order_and_outlive_its_buffers(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [random_row(random, 10 + i) for i in range(12)]
    plan = PackedBatches(make_store(tmp_path, rows), [row.key for row in rows], 40, seed=0, epoch=1)
    with device_batches(plan, by_key(rows), CPU, workers=2, depths=3) as opened:
        batches = [batch for batch, _ in opened]
    assert [[row.key for row in batch.rows] for batch in batches] == [list(planned.keys) for planned in plan]
    for batch in batches:
        expected = collate(batch.rows)
        for name in ("input_ids_T", "aux_TA", "final_TH", "mask_T", "positions_T"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))


class _Gpu:
    """Stands in for CUDA: what is pinned and released, and whether a copy was waited for before the next was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.refuse = refuse
        self.copying = 0
        self.copied: list[int] = []
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr("eyas.drafting.feeding.to_batch", self._to_batch)

    def _to_batch(self, fed: FedBatch, rows: Mapping[str, Sequence[TokenRow]], device: torch.device) -> Batch:
        assert not self.copying
        assert len(self.pinned) == 3
        start = fed.hidden_TLH.ctypes.data
        assert any(begin <= start < begin + size for begin, size in self.pinned.items())
        self.copying += 1
        self.copied.append(fed.batch.position)
        return to_batch(fed, rows, CPU)

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        self.pinned[start] = size
        return 1 if self.refuse else 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.pinned[start]
        return 0

    def record_event(self) -> _Gpu:
        return self

    def wait_event(self, event: _Gpu) -> None: ...

    def synchronize(self) -> None:
        self.copying -= 1


def test_to_a_gpu_two_batches_go_ahead_from_pinned_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    rows = [random_row(random, 30 + i) for i in range(12)]
    plan = PackedBatches(make_store(tmp_path, rows), [row.key for row in rows], 50, seed=0, epoch=1)
    gpu = _Gpu(monkeypatch)
    with device_batches(plan, by_key(rows), torch.device("cuda"), workers=2, depths=3) as opened:
        for number, (batch, _) in enumerate(opened):
            assert [row.key for row in batch.rows] == list(plan[number].keys)
            assert len(gpu.copied) <= number + 3
    assert gpu.copied == list(range(len(plan)))
    assert not gpu.pinned
    with device_batches(plan, by_key(rows), torch.device("cuda"), workers=2, depths=3) as opened:
        next(opened)
    assert not gpu.pinned
    assert len(gpu.copied) < len(plan) + 4
    with pytest.raises(EyasError, match="stopped"):
        with device_batches(plan, by_key(rows), torch.device("cuda"), workers=2, depths=3) as opened:
            next(opened)
            raise EyasError("stopped")
    assert not gpu.pinned
    refusing = _Gpu(monkeypatch, refuse=True)
    with pytest.raises(EyasError, match=r"cannot pin.*tokens_per_pack"):
        with device_batches(plan, by_key(rows), torch.device("cuda"), workers=2, depths=3):
            pass
    assert not refusing.copied


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
