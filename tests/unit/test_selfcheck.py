"""The self-check passes real states of a real (tiny) target, and catches and names every fault that is planted in them.

Shape legend: T tokens, L layers, H hidden size, B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from eyas.conversations.loops import is_looped
from eyas.errors import EyasError
from eyas.extraction.extract import ALONE, self_check
from eyas.extraction.form import CheckedRow, TokenRow, check_form
from eyas.extraction.reference import reference_states
from eyas.extraction.selfcheck import (
    check_alone,
    check_greedy,
    check_reference,
    check_sampled,
    relative_errors,
    states,
)
from eyas.params import TargetParams
from eyas.store.format import StoreSpec
from eyas.store.spool import RowSpool
from eyas.targets.head import TargetHead, load_head
from tests.tiny import LAYERS as DEPTH
from tests.tiny import START, VOCAB

LAYERS = (0, 1, 2, DEPTH)  # not 3, so that an id that is off by one records a layer that nothing else records
ROWS, PROMPT, ANSWER = 6, 16, 32
Rows = Sequence[CheckedRow]


@dataclass(frozen=True)
class Recording:
    """What a faultless extraction of the tiny target gives."""

    head: TargetHead
    greedy: list[CheckedRow]
    sampled: list[CheckedRow]
    every_layer: dict[str, torch.Tensor]  # by row name, float32 [T, depth + 1, H]

    def reference(self, rows: Rows) -> list[torch.Tensor]:
        return [self.every_layer[row.name][:, list(LAYERS)] for row in rows]


def bits(hidden: torch.Tensor) -> np.ndarray:
    array: np.ndarray = hidden.to(torch.bfloat16).view(torch.uint16).numpy()
    return array


@torch.inference_mode()
def generate(model: torch.nn.Module, seed: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows of equal lengths with their log-probabilities, int32 and float32 [B, T]; greedy where temperature is 0."""
    random = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(3, VOCAB, (ROWS, PROMPT), generator=random)
    ids_BT[:, 0] = START
    logprobs_BT = torch.zeros(ROWS, PROMPT)
    for _ in range(ANSWER):
        logits_BV = model(ids_BT, use_cache=False).logits[:, -1]
        if temperature:
            token_B1 = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=random)
        else:
            token_B1 = logits_BV.argmax(-1, keepdim=True)
        logprobs_BT = torch.cat([logprobs_BT, logits_BV.log_softmax(-1).gather(1, token_B1)], dim=1)
        ids_BT = torch.cat([ids_BT, token_B1], dim=1)
    return ids_BT.int().numpy(), logprobs_BT.numpy()


@pytest.fixture(scope="module")
def recording(tiny_target: Path) -> Recording:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    mask = np.arange(PROMPT + ANSWER) >= PROMPT
    rows: dict[str, list[CheckedRow]] = {"greedy": [], "sampled": []}
    every_layer = {}
    for seed, (kind, temperature) in enumerate([("greedy", 0.0), ("sampled", 0.7)]):
        ids_BT, logprobs_BT = generate(model, seed, temperature)
        recorded = reference_states(tiny_target, ids_BT.tolist(), list(range(DEPTH + 1)), trust_remote_code=False)
        for number, all_TLH in enumerate(recorded):
            name = f"{kind}-{number}"
            every_layer[name] = all_TLH
            hidden_TLH = bits(all_TLH[:, list(LAYERS)])
            rows[kind].append(CheckedRow(name, ids_BT[number], mask, logprobs_BT[number], hidden_TLH))
            assert not is_looped(ids_BT[number].tolist()), "a loop would hide tokens that are late"
    return Recording(load_head(tiny_target), rows["greedy"], rows["sampled"], every_layer)


def verify(
    recording: Recording,
    *,
    greedy: Rows | None = None,
    sampled: Rows | None = None,
    alone: Rows | None = None,
    head: TargetHead | None = None,
) -> dict[str, float]:
    """All checks, in the order in which extraction runs them."""
    greedy, sampled, head = greedy or recording.greedy, sampled or recording.sampled, head or recording.head
    check_form(sampled, LAYERS)
    check_form(greedy, LAYERS)
    parity = check_greedy(greedy, head, LAYERS, engine_rounds=False)
    singles = [row.hidden_TLH for row in (alone or greedy)[:2]]
    return {
        "parity": parity.exact,
        "ties": parity.with_ties,
        "positions": parity.positions,
        "alone": check_alone(greedy[:2], singles, LAYERS),
        "logprob": check_sampled(sampled, head, LAYERS),
        **check_reference(greedy, recording.reference(greedy), LAYERS),
    }


def test_faultless_states_pass(recording: Recording) -> None:
    figures = verify(recording)
    assert figures["positions"] == ROWS * ANSWER
    assert figures["parity"] >= 0.98
    assert figures["ties"] == 1.0
    assert figures["alone"] == 0.0
    assert figures["logprob"] < 0.02
    assert all(0 < figures[str(layer)] < 2.0**-8 for layer in LAYERS)


def other_layers(*recorded: int) -> Callable[[Recording, CheckedRow], CheckedRow]:
    return lambda recording, row: replace(row, hidden_TLH=bits(recording.every_layer[row.name][:, list(recorded)]))


def after_the_norm(recording: Recording, row: CheckedRow) -> CheckedRow:
    hidden_TLH = row.hidden_TLH.copy()
    hidden_TLH[:, -1] = bits(recording.head.normed(recording.every_layer[row.name][:, DEPTH]))
    return replace(row, hidden_TLH=hidden_TLH)


def late(tokens: int) -> Callable[[Recording, CheckedRow], CheckedRow]:
    return lambda _, row: replace(row, hidden_TLH=np.roll(row.hidden_TLH, tokens, axis=0))


def put(value: int, layer: int, tokens: slice = slice(None)) -> Callable[[Recording, CheckedRow], CheckedRow]:
    def plant(_: Recording, row: CheckedRow) -> CheckedRow:
        hidden_TLH = row.hidden_TLH.copy()
        hidden_TLH[tokens, layer] = value
        return replace(row, hidden_TLH=hidden_TLH)

    return plant


def part(tokens: slice = slice(None), layers: slice = slice(None)) -> Callable[[Recording, CheckedRow], CheckedRow]:
    return lambda _, row: replace(row, hidden_TLH=row.hidden_TLH[tokens, layers])


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        pytest.param(
            other_layers(0, 1, 2, 3), "`head_parity`: layer 4 .*: an off-by-one layer id", id="final off by one"
        ),
        pytest.param(other_layers(4, 0, 1, 3), "`head_parity`.* layer 0 is the final one", id="final layer first"),
        pytest.param(other_layers(0, 1, 4, 2), "`head_parity`.* layer 2 is the final one", id="layers swapped"),
        pytest.param(after_the_norm, "`head_parity`.*: the state was stored after the final norm", id="after the norm"),
        pytest.param(late(1), "`head_parity`.*: states are one token late", id="late by one"),
        pytest.param(late(-1), "`head_parity`.*: states are one token", id="early by one"),
        pytest.param(
            part(slice(16, None)), r"`length`.* 48 tokens and .*\[32, 4, 64\].*: prefix caching", id="short rows"
        ),
        pytest.param(put(0, 2), "`nonzero`.* layer 2, token 0 is all zeros.*hybrid", id="zero layer"),
        pytest.param(put(0x8000, 1, slice(40, 41)), "`nonzero`.* layer 1, token 40 is all", id="one token minus zero"),
        pytest.param(put(0x7FC0, 3, slice(5, 6)), "`finite`.* layer 4, token 5 is NaN or infinite.*overflow", id="NaN"),
        pytest.param(put(0xFF80, 0, slice(9, 10)), "`finite`.* layer 0, token 9 is NaN", id="minus infinity"),
        pytest.param(other_layers(0, 1, 1, 4), "`distinct`.*: layers 1 and 2 are equal", id="two layers equal"),
        pytest.param(other_layers(0, 1, 0, 4), "`distinct`.*: layers 0 and 2 are equal", id="two distant layers equal"),
        pytest.param(part(layers=slice(3)), "`length`.* 48 tokens and 4 layers", id="a layer too few"),
    ],
)
def test_a_fault_of_every_row_is_caught_and_named(
    recording: Recording, plant: Callable[[Recording, CheckedRow], CheckedRow], complaint: str
) -> None:
    greedy, sampled = ([plant(recording, row) for row in rows] for rows in (recording.greedy, recording.sampled))
    with pytest.raises(EyasError, match=complaint):
        verify(recording, greedy=greedy, sampled=sampled)


@pytest.mark.parametrize("plant", [put(0x7FC0, 3, slice(5, 6)), put(0, 2), other_layers(0, 1, 1, 4)])
def test_a_fault_of_one_row_names_the_row(
    recording: Recording, plant: Callable[[Recording, CheckedRow], CheckedRow]
) -> None:
    sampled = list(recording.sampled)
    sampled[4] = plant(recording, sampled[4])
    with pytest.raises(EyasError, match="row sampled-4"):
        verify(recording, sampled=sampled)


@pytest.mark.parametrize("layer", [1, 2])
def test_an_auxiliary_layer_off_by_one_is_caught_by_the_reference(recording: Recording, layer: int) -> None:
    recorded = list(LAYERS)
    recorded[layer] += 1
    plant = other_layers(*(recorded if layer == 2 else [0, 3, 2, 4]))
    with pytest.raises(EyasError, match=f"`reference`: layer {layer} .*layer ids off by one"):
        verify(recording, greedy=[plant(recording, row) for row in recording.greedy])


def test_the_wrong_norm_convention_is_caught_and_named(recording: Recording) -> None:
    with pytest.raises(EyasError, match=r"`head_parity`.*: wrong norm convention"):
        verify(recording, head=replace(recording.head, unit_offset=True))


def test_a_head_that_is_taken_for_tied_is_caught(recording: Recording, tiny_target: Path) -> None:
    with safe_open(tiny_target / "model.safetensors", "pt") as file:
        embeddings_VH = file.get_tensor("model.embed_tokens.weight").float()
    with pytest.raises(EyasError, match=r"`head_parity`.* an output head that is tied to other weights"):
        verify(recording, head=replace(recording.head, head_VH=embeddings_VH))


def with_states_of(rows: Rows, others: Sequence[int]) -> list[CheckedRow]:
    return [replace(row, hidden_TLH=rows[other].hidden_TLH) for row, other in zip(rows, others, strict=True)]


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([1, 0], id="a batch of two"),
        pytest.param([5, 0, 1, 2, 3, 4], id="one on"),
        pytest.param([1, 2, 3, 4, 5, 0], id="one back"),
        pytest.param([5, 4, 3, 2, 1, 0], id="reversed"),
        pytest.param([0, 4, 2, 3, 1, 5], id="two of six"),
    ],
)
def test_swapped_rows_of_equal_lengths_are_caught_and_named(recording: Recording, others: list[int]) -> None:
    greedy = with_states_of(recording.greedy[: len(others)], others)
    with pytest.raises(EyasError, match=r"`head_parity`.*: rows of a batch came back in the wrong order"):
        verify(recording, greedy=greedy)


def test_swapped_sampled_rows_are_caught(recording: Recording) -> None:
    with pytest.raises(EyasError, match=r"`logprob`.*look at row sampled-(1|4)"):
        verify(recording, sampled=with_states_of(recording.sampled, [0, 4, 2, 3, 1, 5]))


@pytest.mark.parametrize(
    "change", [lambda lp: lp / 0.7, lambda lp: lp - 0.05, lambda lp: lp * np.nan, lambda lp: np.roll(lp, 1)]
)
def test_wrong_log_probabilities_are_caught_and_named(
    recording: Recording, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    sampled = [replace(row, logprobs=change(row.logprobs)) for row in recording.sampled]
    with pytest.raises(EyasError, match=r"`logprob`.*responses come from another target, engine or compute type"):
        verify(recording, sampled=sampled)


def test_a_row_that_differs_alone_is_caught_and_named(recording: Recording) -> None:
    noisy = recording.every_layer["greedy-1"].clone()
    noisy[:, 2] *= 1 + 0.05 * torch.randn(noisy[:, 2].shape, generator=torch.Generator().manual_seed(0))
    alone = [recording.greedy[0], replace(recording.greedy[1], hidden_TLH=bits(noisy[:, list(LAYERS)]))]
    with pytest.raises(EyasError, match=r"`alone`: row greedy-1, layer 2: .*(rows mixed up in a batch|chunked)"):
        verify(recording, alone=alone)


def test_a_short_row_alone_is_caught(recording: Recording) -> None:
    alone = [part(slice(16, None))(recording, row) for row in recording.greedy]
    with pytest.raises(EyasError, match="row greedy-0"):
        verify(recording, alone=alone)


def test_noise_of_bfloat16_passes_between_alone_and_batch(recording: Recording) -> None:
    noisy = [recording.every_layer[row.name][:, list(LAYERS)] * (1 + 2.0**-9) for row in recording.greedy]
    alone = [replace(row, hidden_TLH=bits(n)) for row, n in zip(recording.greedy, noisy, strict=True)]
    assert 0 < verify(recording, alone=alone)["alone"] < 0.01


@pytest.mark.parametrize("check", [partial(check_greedy, engine_rounds=False), check_sampled])
def test_rows_without_generated_tokens_prove_nothing(recording: Recording, check: Callable[..., object]) -> None:
    rows = [replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in recording.greedy]
    with pytest.raises(EyasError, match="hold no generated token"):
        check(rows, recording.head, LAYERS)


def two_token_rows(gap: float, close: int, total: int) -> tuple[list[CheckedRow], TargetHead]:
    """Token 0 is emitted throughout; at ``close`` of the positions its logit is lower than token 1's by ``gap``."""
    head = TargetHead(torch.ones(2), 0.0, False, torch.eye(2))
    state_T2 = torch.tensor([[1.0, 0.0]] * (total - close) + [[1.0 - gap, 1.0]] * close + [[1.0, 0.0]])
    hidden_TLH = bits(torch.stack([state_T2 * 0.5, state_T2], dim=1))
    mask = np.arange(total + 1) > 0
    ids, logprobs = np.zeros(total + 1, dtype=np.int32), np.zeros(total + 1, dtype=np.float32)
    return [CheckedRow("row", ids, mask, logprobs, hidden_TLH)], head


def test_near_ties_are_counted_apart() -> None:
    parity = check_greedy(*two_token_rows(2.0**-8, 2, 100), (0, 1), engine_rounds=False)
    assert (parity.exact, parity.with_ties, parity.positions) == (0.98, 1.0, 100)


def test_an_engine_that_rounds_ties_more_often() -> None:
    rows, head = two_token_rows(3 * 2.0**-8, 2, 100)
    with pytest.raises(EyasError, match=r"0\.9800 with near-ties"):
        check_greedy(rows, head, (0, 1), engine_rounds=False)
    assert check_greedy(rows, head, (0, 1), engine_rounds=True).with_ties == 1.0


def test_a_clear_miss_is_no_near_tie() -> None:
    with pytest.raises(EyasError, match=r"at 0\.9900 of 100 greedy positions \(0\.9900 with near-ties"):
        check_greedy(*two_token_rows(0.25, 1, 100), (0, 1), engine_rounds=False)


def test_too_many_near_ties_are_an_error() -> None:
    with pytest.raises(EyasError, match=r"at 0\.9700 of 100 greedy positions \(1\.0000 with near-ties"):
        check_greedy(*two_token_rows(2.0**-8, 3, 100), (0, 1), engine_rounds=False)


def test_bits_become_the_floats_they_stand_for() -> None:
    assert states(np.array([[0x3F80, 0xC000]], dtype=np.uint16)).tolist() == [[1.0, -2.0]]


def test_relative_errors_are_by_layer() -> None:
    reference_TLH = torch.ones(3, 2, 4)
    own_TLH = reference_TLH.clone()
    own_TLH[:, 1] = 1.5
    assert relative_errors(own_TLH, reference_TLH) == [0.0, 0.5]


def token_row(row: CheckedRow, *, probe: bool = False, kept: bool = False) -> TokenRow:
    logprobs = np.where(row.loss_mask & kept, np.nan, row.logprobs)
    return TokenRow(row.name, probe, row.input_ids.tolist(), row.loss_mask.tolist(), logprobs.tolist())


@pytest.mark.parametrize("generated", [0, 2, ROWS])
def test_rows_whose_answers_the_data_holds_have_no_log_probabilities_to_check(
    recording: Recording, tiny_target: Path, tmp_path: Path, generated: int
) -> None:
    spec = StoreSpec(LAYERS, recording.greedy[0].hidden_TLH.shape[2], "none", {"engine": "fixed"}, 1)
    for folder in (tmp_path / "rows", tmp_path / ALONE):
        for row in [*recording.greedy, *recording.sampled]:
            RowSpool(folder, spec).write(row.input_ids, row.hidden_TLH)
    probes = [token_row(row, probe=True) for row in recording.greedy]
    sampled = [token_row(row, kept=number >= generated) for number, row in enumerate(recording.sampled)]
    assert [row.generated for row in sampled] == [number < generated for number in range(ROWS)]
    target = TargetParams(source=str(tiny_target), dtype="float32", max_model_len=512)
    figures = self_check(tiny_target, target, tmp_path, spec, [*sampled, *probes], workers=1)
    checked = recording.sampled[:generated] or recording.greedy
    assert figures["logprob_difference"] == check_sampled(checked, recording.head, LAYERS)
    torn = replace(sampled[0], logprobs=[*sampled[0].logprobs[:-1], -9.0])
    with pytest.raises(
        EyasError, match=r"`logprob`"
    ):  # an answer that the engine knows in part is no answer of the data's
        self_check(tiny_target, target, tmp_path, spec, [torn, *sampled[1:], *probes], workers=1)
