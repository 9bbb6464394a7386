"""Loss and gradient of a trained head against float64: the project's step and speculators' own forward, in float32 and bfloat16.

    python benchmarks/drafting/gradients.py smoke --out FILE        at the root of a checkout whose `train` has run

The reference is speculators' own forward with all weights and inputs in float64. One packed batch of the training rows; on a GPU if
there is one. Exit status 1 where the project's gradient is further from the reference than a cosine of 0.999.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import torch
from common import print_table, write_report
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from torch.nn.functional import cosine_similarity

from eyas.drafting.data import Batch, by_key
from eyas.drafting.feeding import device_batches
from eyas.drafting.forward import draft_states, trainable
from eyas.drafting.global_batch import selected
from eyas.drafting.inputs import load_inputs
from eyas.drafting.loss import head_loss
from eyas.drafting.planning import make_plan
from eyas.drafting.ranks import training_device
from eyas.params import Profile, TrainParams, load_machine, load_profile
from eyas.store.batches import PackedBatches

_LEAST = 0.999
Loss = Callable[[Eagle3DraftModel, Batch, TrainParams], torch.Tensor]


def trained(params: Profile, data: Path, tokens: int) -> tuple[Eagle3DraftModel, Batch]:
    """The profile's trained head, and a packed batch of so many tokens."""
    machine, device = load_machine(), training_device()
    made = load_inputs(data, machine, params.target, params.draft, params.train, params.responses.temperature, 1)
    made.model.load_state_dict(load_file(data / "draft_head" / "model.safetensors"), strict=False)
    rows = by_key(made.data.train)
    plan = selected(PackedBatches(made.data.reader, list(rows), tokens, params.train.seed, 0), [0])
    with made.data.reader, device_batches(plan, rows, device, 1, params.train.ttt_steps) as batches:
        batch, _ = next(batches)
    return made.model.to(device).train(), batch


def ours(model: Eagle3DraftModel, batch: Batch, params: TrainParams) -> torch.Tensor:
    """The project's loss."""
    plan = make_plan(batch, params.ttt_steps)
    states_KNH = draft_states(model, batch, plan, params.ttt_steps)
    return head_loss(model, states_KNH, batch, plan, params.loss, params.ttt_decay, True).loss


def theirs(model: Eagle3DraftModel, batch: Batch, params: TrainParams) -> torch.Tensor:
    """The loss by speculators' forward, in the type of the weights."""
    kind, device = model.fc.weight.dtype, batch.aux_TA.device
    documents = torch.arange(len(batch.lengths), device=device).repeat_interleave(
        torch.tensor(batch.lengths, device=device)
    )
    _, loss, _ = model(
        hidden_states=batch.aux_TA.to(kind)[None],
        input_ids=batch.input_ids_T[None],
        document_ids=documents[None],
        loss_mask=batch.mask_T.to(device)[None],
        position_ids=batch.positions_T[None],
        verifier_last_hidden_states=batch.final_TH.to(kind)[None],
        ttt_steps=params.ttt_steps,
        ttt_step_loss_decay=params.ttt_decay,
        loss_config=resolve_loss_config(params.loss, "eager"),
    )
    value: torch.Tensor = loss
    return value


def differentiated(
    model: Eagle3DraftModel, batch: Batch, params: TrainParams, loss: Loss, bfloat16: bool
) -> tuple[float, list[torch.Tensor]]:
    """Loss, and the gradients of the trained weights in float64, flat."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(batch.aux_TA.device.type, torch.bfloat16, enabled=bfloat16):
        value = loss(model, batch, params)
    value.backward()
    return value.item(), [weight.grad.double().flatten() for weight in trainable(model) if weight.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--tokens", type=int, default=2048, help="of the batch, at most")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    profile, data = load_profile(arguments.name), Path("data") / arguments.name
    model, batch = trained(profile, data, arguments.tokens)
    exact_loss, exact = differentiated(copy.deepcopy(model).double(), batch, profile.train, theirs, False)
    results: dict[str, Any] = {}
    for name, loss in (("eyas", ours), ("speculators", theirs)):
        for kind in ("float32", "bfloat16"):
            value, found = differentiated(model, batch, profile.train, loss, kind == "bfloat16")
            by_weight = [cosine_similarity(one, other, 0).item() for one, other in zip(found, exact, strict=True)]
            results[f"{name}, {kind}"] = {
                "loss": value,
                "loss_off": abs(value / exact_loss - 1),
                "cosine": cosine_similarity(torch.cat(found), torch.cat(exact), 0).item(),
                "least_cosine_of_a_weight": min(by_weight),
                "norm_off": abs((torch.cat(found).norm() / torch.cat(exact).norm()).item() - 1),
            }
    settings = {"profile": arguments.name, "tokens": sum(batch.lengths), "supervised": int(batch.mask_T.sum())}
    write_report(arguments.out, None, {"settings": settings, "float64_loss": exact_loss, "results": results})
    header = ("step", "loss off", "gradient cosine", "least of a weight", "norm off")
    names = ("loss_off", "cosine", "least_cosine_of_a_weight", "norm_off")
    print_table(header, ([step, *(f"{found[name]:.2e}" if "off" in name else f"{found[name]:.6f}" for name in names)]
                         for step, found in results.items()))  # fmt: skip
    if min(found["cosine"] for step, found in results.items() if step.startswith("eyas")) < _LEAST:
        sys.exit(f"the project's gradient is further from float64 than a cosine of {_LEAST}")


if __name__ == "__main__":
    main()
