"""The loop's losses are those that were written down for this class of hardware.

Where a change is meant to alter them: ``python -m tests.golden`` writes this machine's class anew; say why in the commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import hardware_class, kept, losses

# The same instructions, but not always the same kernels: the matrix libraries choose by processor model, and sum in another
# order. That moves a float32 loss in its seventh digit and twenty steps carry it on; a changed formula moves the third.
_SAME_CLASS = 2e-5
# another class's products are rounded otherwise at every step
_OTHER_CLASS = 1e-3


def test_losses_are_those_of_this_hardware(tmp_path: Path) -> None:
    by_class = kept()
    name = hardware_class()
    expected, tolerance = (by_class[name], _SAME_CLASS) if name in by_class else (by_class["cpu-avx2"], _OTHER_CLASS)
    assert losses(tmp_path) == pytest.approx(expected, rel=tolerance), name


def test_every_class_tells_of_the_same_training() -> None:
    by_class = kept()
    assert all(len(values) == 20 for values in by_class.values())
    first = by_class["cpu-avx2"]
    assert all(values == pytest.approx(first, rel=_OTHER_CLASS) for values in by_class.values())
