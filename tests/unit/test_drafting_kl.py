"""KL divergence by row is its definition, on a CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from eyas.drafting.kl import kl_rows, taught

_COUNT = 9
_CHOSEN = [1, 3, 4, 8]


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("columns", [777, 20_000])
def test_rows_are_the_divergence_and_its_gradient(
    device: str, dtype: torch.dtype, cap: float | None, chosen: bool, columns: int
) -> None:
    source = torch.Generator().manual_seed(columns)
    teacher_CV = (4 * torch.randn(_COUNT, columns, generator=source)).to(device, dtype)
    rows = _CHOSEN if chosen else list(range(_COUNT))
    logits_MV = (3 * torch.randn(len(rows), columns, generator=source)).to(device, dtype)
    weight = torch.tensor(0.3, device=device)

    wanted_CV = teacher_CV.double() if cap is None else cap * torch.tanh(teacher_CV.double() / cap)
    drafted_MV = logits_MV.double().requires_grad_()
    wanted_MV = wanted_CV[rows].log_softmax(-1)
    kl_M = (wanted_MV.exp() * (wanted_MV - drafted_MV.log_softmax(-1))).sum(-1)
    (slope_MV,) = torch.autograd.grad(0.3 * kl_M.sum(), drafted_MV)

    teacher = taught(teacher_CV, cap)
    assert torch.equal(wanted_CV.gather(1, teacher.best_C[:, None]), wanted_CV.amax(-1, keepdim=True))
    labels_M = torch.tensor(rows, device=device) if chosen else None
    best_M1 = logits_MV.amax(-1, keepdim=True)
    loss_M, predicted_M, absent = kl_rows(logits_MV.clone(), teacher, labels_M, weight, False)
    assert absent is None
    assert torch.equal(logits_MV.gather(1, predicted_M[:, None]), best_M1)
    again_M, _, found_MV = kl_rows(logits_MV, teacher, labels_M, weight, True)
    assert torch.equal(loss_M, again_M)
    assert torch.allclose(loss_M.double(), kl_M, rtol=1e-5, atol=2e-5)
    assert found_MV is not None
    assert found_MV.dtype == dtype
    assert torch.allclose(found_MV.double(), slope_MV, rtol=5e-3 if dtype == torch.bfloat16 else 1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
def test_what_is_no_number_is_seen_in_its_row_alone(device: str) -> None:
    logits_MV = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).to(device)
    teacher = taught(logits_MV.flip(0).contiguous(), None)
    logits_MV[1, 5] = torch.nan
    loss_M, _, _ = kl_rows(logits_MV, teacher, None, torch.tensor(1.0, device=device), True)
    assert loss_M.isnan().tolist() == [False, True, False]
