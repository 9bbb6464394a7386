"""The loop's losses are those that were written down for this class of hardware.

Where a change is meant to alter them: ``python -m tests.golden`` writes this machine's classes anew; say why in the commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.drafting import flash
from tests.golden import REFERENCE, Autocast, autocasts, hardware_class, kept, losses

# The same instructions, but not always the same kernels: the matrix libraries choose by processor model, and sum in another
# order. That moves a float32 loss in its seventh digit and twenty steps carry it on; a changed formula moves the third.
_SAME_CLASS = 2e-5
# another class's products are rounded otherwise at every step
_OTHER_CLASS = {"float32": 1e-3, "bfloat16": 5e-3}


def _autocast(name: str) -> str:
    return "bfloat16" if name.endswith("bfloat16") else "float32"


@pytest.mark.parametrize("autocast", autocasts())
def test_losses_are_those_of_this_hardware(tmp_path: Path, autocast: Autocast) -> None:
    by_class = kept()
    name = hardware_class(autocast)
    expected, tolerance = (
        (by_class[name], _SAME_CLASS) if name in by_class else (by_class[REFERENCE], _OTHER_CLASS[autocast])
    )
    assert losses(tmp_path, autocast) == pytest.approx(expected, rel=tolerance), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_s_bfloat16_class_is_of_flash_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = flash._flash_forward

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return forward(*given, **named)

    monkeypatch.setattr(flash, "_flash_forward", counted)
    losses(tmp_path, "bfloat16")
    assert calls


def test_every_class_tells_of_the_same_training() -> None:
    by_class = kept()
    assert all(len(values) == 20 for values in by_class.values())
    for name, values in by_class.items():
        assert values == pytest.approx(by_class[REFERENCE], rel=_OTHER_CLASS[_autocast(name)]), name
