"""Layer k is the residual stream that enters layer k; the last is what enters the final norm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.extraction import reference
from eyas.extraction.reference import affordable, entering_states, reference_states
from eyas.targets.head import load_head
from tests.tiny import HIDDEN, LAYERS, tiny_states

ROWS = [[1, 40, 41, 42, 2], [1, 300, 7], [9]]


def test_states_are_what_transformers_shows(tiny_target: Path) -> None:
    layers = [0, 2, LAYERS]
    states = reference_states(tiny_target, ROWS, layers, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    head = load_head(tiny_target)
    for row, hidden_TLH in zip(ROWS, states, strict=True):
        assert hidden_TLH.shape == (len(row), len(layers), HIDDEN)
        assert hidden_TLH.dtype == torch.float32
        with torch.inference_mode():
            output = model(torch.tensor([row]), output_hidden_states=True)
        torch.testing.assert_close(hidden_TLH[:, 0], output.hidden_states[0][0])
        torch.testing.assert_close(hidden_TLH[:, 1], output.hidden_states[2][0])
        # transformers' own last state is after the norm, ours before it
        normed_TH = head.normed(hidden_TLH[:, 2])
        torch.testing.assert_close(normed_TH, output.hidden_states[-1][0])
        torch.testing.assert_close(head.logits(normed_TH), output.logits[0], atol=1e-4, rtol=1e-4)


def test_layers_come_in_the_order_asked_for(tiny_target: Path) -> None:
    (there,) = reference_states(tiny_target, ROWS[:1], [1, 3, 4], trust_remote_code=False)
    (back,) = reference_states(tiny_target, ROWS[:1], [4, 3, 1], trust_remote_code=False)
    assert torch.equal(there, back.flip(1))


def test_a_padded_batch_gives_what_each_row_gives_alone(tiny_target: Path) -> None:
    alone = reference_states(tiny_target, ROWS, [1, LAYERS], trust_remote_code=False)
    decoder = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).get_decoder()
    width = max(map(len, ROWS))
    ids_BT = torch.tensor([row + [0] * (width - len(row)) for row in ROWS])
    states_BTLH = entering_states(decoder, [1, LAYERS], ids_BT)
    assert states_BTLH.shape == (len(ROWS), width, 2, HIDDEN)
    for row_TLH, wanted_TLH in zip(states_BTLH, alone, strict=True):
        torch.testing.assert_close(row_TLH[: len(wanted_TLH)], wanted_TLH, atol=1e-4, rtol=1e-4)


def test_no_hook_is_left_even_when_the_pass_fails(tiny_target: Path) -> None:
    decoder = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).get_decoder()
    entering_states(decoder, [0, LAYERS], torch.tensor(ROWS[:1]))
    with pytest.raises(IndexError):
        entering_states(decoder, [0, LAYERS], torch.tensor([[10**6]]))
    assert not any(module._forward_pre_hooks for module in decoder.modules())


def test_bits_are_the_nearest_bfloat16(tiny_target: Path) -> None:
    (state,) = reference_states(tiny_target, ROWS[:1], [1, 4], trust_remote_code=False)
    (bits,) = tiny_states(tiny_target, ROWS[:1], [1, 4])
    rounded = torch.from_numpy(bits).view(torch.bfloat16)
    assert torch.equal(rounded, state.to(torch.bfloat16))


def test_only_small_targets_are_loaded_twice(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert affordable(tiny_target)
    monkeypatch.setattr(reference, "LARGEST_BYTES", (tiny_target / "model.safetensors").stat().st_size - 1)
    assert not affordable(tiny_target)
