"""Losses of a fixed little training, kept by class of hardware in ``losses.json``: a change of the numbers is seen, not guessed.

``python -m tests.golden`` writes this machine's class anew, for a change of the loop that is meant to change its losses.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from eyas.drafting.data import TrainingData
from eyas.drafting.training import fit
from eyas.params import TrainParams
from eyas.targets.head import load_head
from tests.unit.test_drafting_data import make_case, make_store

FILE = Path(__file__).parent / "losses.json"
_DIGITS = 7
# two epochs of ten steps; float32, whose noise is a thousandth of what a changed formula does
_PARAMS = TrainParams(epochs=2, lr=3e-3, tokens_per_step=64, ttt_steps=3, autocast="float32")


def hardware_class() -> str:
    """What decides the last bits: the GPU's generation, or the vector instructions that torch uses on the CPU."""
    if torch.cuda.is_available():
        return "cuda-sm{}{}".format(*torch.cuda.get_device_capability())
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"


def losses(folder: Path) -> list[float]:
    """Losses of twenty steps of the real loop on fixed data, on one thread: more of them add in another order."""
    case = make_case(folder, rows=12)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with make_store(folder, case.rows) as reader:
            data = TrainingData(reader, case.rows[1:], case.rows[:1], workers=1)
            training = fit(case.model, data, _PARAMS, load_head(case.directory), 0.7, folder / "checkpoints")
    finally:
        torch.set_num_threads(threads)
    found = [step.loss for step in training.steps if step.loss is not None]
    assert len(found) == len(training.steps) == 20
    return [float(f"{loss:.{_DIGITS}g}") for loss in found]


def kept() -> dict[str, list[float]]:
    """Losses by class of hardware."""
    content: dict[str, list[float]] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return content
