"""Losses of a fixed little training, kept by class of hardware in ``losses.json``: a change of the numbers is seen, not guessed.

``python -m tests.golden`` writes this machine's classes anew, for a change of the loop that is meant to change its losses.
A GPU has two: float32, and bfloat16 with FlashAttention, as heads are trained there. A CPU's class is of float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch

from eyas.drafting.data import TrainingData
from eyas.drafting.training import fit
from eyas.params import TrainParams
from eyas.targets.head import load_head
from tests.unit.test_drafting_data import make_case, make_store

Autocast = Literal["float32", "bfloat16"]
FILE = Path(__file__).parent / "losses.json"
REFERENCE = "cpu-avx2"
_DIGITS = 7
# two epochs of ten steps
_PARAMS = TrainParams(epochs=2, lr=3e-3, tokens_per_step=64, ttt_steps=3)


def autocasts() -> tuple[Autocast, ...]:
    """Those that this machine has a class for."""
    return ("float32", "bfloat16") if torch.cuda.is_available() else ("float32",)


def hardware_class(autocast: Autocast) -> str:
    """What decides the last bits: the GPU's generation, or the vector instructions that torch uses on the CPU."""
    if torch.cuda.is_available():
        generation = "cuda-sm{}{}".format(*torch.cuda.get_device_capability())
        return generation if autocast == "float32" else f"{generation}-{autocast}"
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"


def losses(folder: Path, autocast: Autocast) -> list[float]:
    """Losses of twenty steps of the real loop on fixed data, on one thread: more of them add in another order."""
    case = make_case(folder, rows=12)
    params = _PARAMS.model_copy(update={"autocast": autocast})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with make_store(folder, case.rows) as reader:
            data = TrainingData(reader, case.rows[1:], case.rows[:1], workers=1)
            training = fit(case.model, data, params, load_head(case.directory), 0.7, folder / "checkpoints")
    finally:
        torch.set_num_threads(threads)
    found = [step.loss for step in training.steps if step.loss is not None]
    assert len(found) == len(training.steps) == 20
    return [float(f"{loss:.{_DIGITS}g}") for loss in found]


def kept() -> dict[str, list[float]]:
    """Losses by class of hardware."""
    content: dict[str, list[float]] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return content
