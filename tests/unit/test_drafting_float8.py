"""Products in float8 are those of the rounded numbers, on a CPU, and on a GPU where there is one; a head learns by them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from eyas.drafting.data import TrainingData
from eyas.drafting.float8 import Float8Weight, check_float8, linear, product, rounded, rounded_columns
from eyas.drafting.forward import draft_states
from eyas.drafting.loss import head_loss
from eyas.drafting.planning import make_plan
from eyas.drafting.training import fit
from eyas.errors import EyasError
from eyas.params import DraftParams, TrainParams
from eyas.targets.head import load_head

from .test_drafting_data import collate, make_case, make_store

_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def _random(rows: int, columns: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)).to(device, dtype)


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, 784, 10_000])
def test_rows_are_rounded_to_e4m3_by_their_largest_entry(device: str, dtype: torch.dtype, columns: int) -> None:
    x_MK = _random(6, columns, device, dtype) * torch.tensor([1e-20, 1e-3, 1, 3, 1e20, 0], device=device)[:, None].to(
        dtype
    )
    found = rounded(x_MK)
    assert found.values_MK.dtype == torch.float8_e4m3fn
    assert found.scales_M1.shape == (6, 1)
    assert found.values_MK.float().abs().amax(-1).tolist() == [448.0] * 5 + [0.0]
    back_MK = found.values_MK.double() * found.scales_M1.double()
    # three bits of mantissa; below 2**-6 steps of 2**-9
    allowed_MK = x_MK.double().abs() / 16 + found.scales_M1.double() * 2**-10
    assert bool(((back_MK - x_MK.double()).abs() <= allowed_MK * 1.001).all())


@pytest.mark.parametrize("device", _DEVICES)
def test_columns_are_rounded_as_the_transpose_s_rows(device: str) -> None:
    x_NK = _random(80, 144, device)
    x_NK[:, 5] *= 1e6
    found, wanted = rounded_columns(x_NK), rounded(x_NK.T)
    assert found.values_MK.is_contiguous()
    torch.testing.assert_close(found.scales_M1, wanted.scales_M1)
    one, other = found.values_MK.float(), wanted.values_MK.float()
    torch.testing.assert_close(one, other, rtol=1 / 8, atol=2**-9)  # a step: their divisions differ in the last bit
    assert float((one != other).float().mean()) < 0.01


@pytest.mark.parametrize("device", _DEVICES)
def test_what_is_no_number_stays_in_its_row(device: str) -> None:
    x_MK = _random(4, 64, device)
    x_MK[1, 5], x_MK[2, 6] = torch.nan, torch.inf
    seen = product(rounded(x_MK), rounded(_random(16, 64, device)))
    assert seen.isfinite().all(-1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_products_are_of_the_rounded_numbers(device: str, rows: int) -> None:
    a, b = rounded(_random(rows, 64, device)), rounded(_random(48, 64, device))
    exact_MN = (a.values_MK.double() * a.scales_M1) @ (b.values_MK.double() * b.scales_M1).T
    found_MN = product(a, b)
    assert found_MN.dtype == torch.bfloat16
    torch.testing.assert_close(found_MN.double(), exact_MN, rtol=2**-8, atol=2e-2)


@pytest.mark.parametrize("device", _DEVICES)
def test_a_projection_and_its_gradients(device: str) -> None:
    projection = torch.nn.Linear(64, 48, bias=False, device=device)
    x_MK = _random(33, 64, device).requires_grad_()
    slope_MN = _random(33, 48, device)
    called = linear(projection)
    twice_MN = called(x_MK) + called(x_MK)
    twice_MN.backward(slope_MN)
    exact_x = x_MK.detach().double().requires_grad_()
    exact_weight = projection.weight.detach().bfloat16().double().requires_grad_()
    exact_MN = 2 * exact_x @ exact_weight.T
    exact_MN.backward(slope_MN.double())
    assert x_MK.grad is not None
    assert projection.weight.grad is not None
    assert projection.weight.grad.dtype == torch.float32

    def error(found: torch.Tensor, exact: torch.Tensor | None) -> float:
        assert exact is not None
        return float((found.double() - exact).norm() / exact.norm())

    # two inputs, each rounded to one part in 16 at worst: about 0.037 for normal numbers
    assert 0.01 < error(twice_MN.detach(), exact_MN.detach()) < 0.05
    assert 0.01 < error(x_MK.grad, exact_x.grad) < 0.05
    assert error(projection.weight.grad, exact_weight.grad) < 5e-3  # in bfloat16


def test_a_weight_is_rounded_along_what_is_summed_over() -> None:
    """A row of large weights does not cost the others their bits, nor does a column, the way back."""
    for transposed in (False, True):
        weight_NK = _random(48, 64, "cpu")
        weight_NK[:, 3] *= 1e4 if transposed else 1
        weight_NK[7] *= 1 if transposed else 1e4
        given_MK = _random(5, 48 if transposed else 64, "cpu")
        float8 = Float8Weight(weight_NK)
        found = float8.backward(given_MK) if transposed else float8.forward(given_MK)
        exact = given_MK.double() @ (weight_NK.double() if transposed else weight_NK.double().T)
        error_N = (found.double() - exact).norm(dim=0) / exact.norm(dim=0)
        assert float(error_N.max()) < 0.1


@pytest.mark.parametrize("loss", ["kl_div", "ce"])
@pytest.mark.parametrize("layers", [1, 2])
def test_gradients_of_a_step_are_near(tmp_path: Path, loss: str, layers: int) -> None:
    case = make_case(tmp_path, rows=5, draft=DraftParams(num_layers=layers))
    batch = collate(case.rows)
    plan = make_plan(batch, 3)
    found = []
    for float8 in (False, True):
        case.model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            states_KNH = draft_states(case.model, batch, plan, 3, float8)
            out = head_loss(case.model, states_KNH, batch, plan, loss, 1.0, True)
        out.loss.backward()
        weights = [*case.model.layers.parameters(), case.model.fc.weight]
        found.append((out.loss.item(), [w.grad.double().flatten() for w in weights]))
    (one, first), (other, second) = found
    assert one != other
    assert other == pytest.approx(one, rel=0.02)
    cosines = [functional.cosine_similarity(*pair, 0).item() for pair in zip(first, second, strict=True)]
    assert 0.995 < min(cosines) < 0.9999


def test_a_head_learns_as_in_bfloat16(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=12)
    found = {}
    with make_store(tmp_path, case.rows) as reader:
        for name in ("bfloat16", "float8"):
            params = TrainParams(epochs=2, lr=3e-3, tokens_per_step=64, ttt_steps=3, autocast=name)
            model = make_case(tmp_path, rows=12).model
            data = TrainingData(reader, case.rows[1:], case.rows[:1], workers=1)
            training = fit(model, data, params, load_head(case.directory), 0.7, tmp_path / name)
            found[name] = [step.loss for step in training.steps]
    assert found["float8"] != found["bfloat16"]
    assert found["float8"] == pytest.approx(found["bfloat16"], rel=0.02)


def test_sizes_that_cannot_be_are_named(tmp_path: Path) -> None:
    case = make_case(tmp_path, rows=2, draft=DraftParams(intermediate_size=100))
    with pytest.raises(EyasError, match="intermediate size is 100, which is no multiple of 16"):
        check_float8(case.model, torch.device("cpu"))


def test_a_gpu_without_float8_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tmp_path, rows=2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(EyasError, match=r"NVIDIA A100 has compute capability 8\.0, 8\.9 or later is needed"):
        check_float8(case.model, torch.device("cuda"))
