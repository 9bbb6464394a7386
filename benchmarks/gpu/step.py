"""One training step on a GPU against speculators' own, same head, same batches, in one run.

    python benchmarks/gpu/step.py --out FILE                both shapes, two masks
    python benchmarks/gpu/step.py --profile                 where the project's step spends its time

All take fp32 master weights, bf16 autocast, AdamW (fused), clipping at 1, 8,192 tokens in 8 documents, and three depths; speculators'
forward is compiled and has its flex attention and fused loss, as its trainer runs it. The project's is measured as it is, and with its
feed-forward part in float8. Loss and gradients of the first batch are compared. They take turns of so many steps without a pause; the
median over the turns counts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from common import LAYERS, note, print_table, write_report
from speculators.losses import fused
from training import SHAPES, Shape, make_model

from eyas.drafting.data import Batch
from eyas.drafting.forward import trainable
from eyas.drafting.gradients import Together
from eyas.drafting.loss import head_loss
from eyas.drafting.planning import Plan, make_plan

DEPTHS, _DOCUMENTS, _LENGTH = 3, 8, 1024
_LR = 1e-5
_RIVAL = "speculators"


def make_batches(shape: Shape, share: float, count: int) -> list[Batch]:
    """Random tokens and states; the last ``share`` of each document is supervised."""
    slots = _DOCUMENTS * _LENGTH
    generator = torch.Generator("cuda").manual_seed(1)
    mask = (torch.arange(_LENGTH) >= round((1 - share) * _LENGTH)).repeat(_DOCUMENTS)

    def states(width: int) -> torch.Tensor:
        return torch.randn(slots, width, generator=generator, device="cuda", dtype=torch.bfloat16)

    return [
        Batch(
            torch.randint(shape.vocabulary, (slots,), generator=generator, device="cuda"),
            states((len(LAYERS) - 1) * shape.hidden),
            states(shape.hidden),
            mask,
            torch.arange(1, _LENGTH + 1, device="cuda").repeat(_DOCUMENTS),
            [_LENGTH] * _DOCUMENTS,
            [],
        )
        for _ in range(count)
    ]


def planned_loss(together: Together, batch: Batch, plan: Plan) -> torch.Tensor:
    """The project's loss of a planned batch."""
    with torch.autocast("cuda", torch.bfloat16):
        return head_loss(together.model, together.states(batch, plan, DEPTHS), batch, plan, "kl_div", 1.0, True).loss


def ours(model: Any, float8: bool) -> Callable[[Batch], torch.Tensor]:
    """The project's step; a thread with a stream of its own plans a batch meanwhile for its next turn, as training does."""
    pool, copying = ThreadPoolExecutor(1), torch.cuda.Stream()
    plans: dict[int, Future[Plan]] = {}
    together = Together(model, float8)

    def planned(batch: Batch) -> Plan:
        with torch.cuda.stream(copying):
            plan = make_plan(batch, DEPTHS)
        copying.synchronize()
        return plan

    def loss(batch: Batch) -> torch.Tensor:
        ahead = plans.get(id(batch)) or pool.submit(planned, batch)
        plan = ahead.result()
        plan.indices.record_stream(torch.cuda.current_stream())
        plans[id(batch)] = pool.submit(planned, batch)
        return planned_loss(together, batch, plan)

    return loss


def theirs(model: Any) -> Callable[[Batch], torch.Tensor]:
    # torch's compiler refuses two kernels that share one list of configurations
    fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)
    arguments, _ = model.get_trainer_kwargs(loss_fn="kl_div", ttt_steps=DEPTHS, ttt_step_loss_decay=1.0)
    documents = torch.arange(_DOCUMENTS, device="cuda").repeat_interleave(_LENGTH)[None]

    def loss(batch: Batch) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            _, value, _ = model(
                batch.aux_TA[None],
                batch.input_ids_T[None],
                documents,
                batch.mask_T[None].to("cuda"),
                batch.positions_T[None],
                batch.final_TH[None],
                **arguments,
            )
        return value

    return loss


def gradients(model: Any, loss: Callable[[Batch], torch.Tensor], batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    value = loss(batch)
    value.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return value.item(), found


def stepper(
    model: Any, loss: Callable[[Batch], torch.Tensor], optimizer: torch.optim.Optimizer, guarded: bool
) -> Callable[[Batch], None]:
    """One step; as the two loops do it, loss and norm are read before the weights are changed, or the loss afterwards."""

    def step(batch: Batch) -> None:
        value = loss(batch)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable(model), 1.0)
        if guarded and not (math.isfinite(norm.item()) and math.isfinite(value.item())):
            raise RuntimeError(f"loss {value.item()}, gradient norm {norm.item()}")
        optimizer.step()
        if not guarded:
            value.item()

    return step


def measure(name: str, share: float, steps: int, rounds: int) -> dict[str, Any]:
    shape = SHAPES[name]
    batches = make_batches(shape, share, 4)
    model, rounding = (make_model(shape, torch.device("cuda")) for _ in range(2))
    rival = make_model(shape, torch.device("cuda"), attention="simple_flex_attention")
    for other in (rounding, rival):
        other.load_state_dict(model.state_dict())
    variants = {
        "eyas": (model, ours(model, False)),
        "float8": (rounding, ours(rounding, True)),
        _RIVAL: (rival, theirs(rival)),
    }
    found: dict[str, Any] = {"first_batch": compared(variants, batches[0])}
    runs = {
        key: stepper(
            head,
            loss,
            torch.optim.AdamW(trainable(head), lr=_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
            key != _RIVAL,
        )
        for key, (head, loss) in variants.items()
    }
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    peaks: dict[str, float] = {}
    for key, step in runs.items():
        for batch in batches[:3]:
            step(batch)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(batches[3])
        # the other variants' weights and moments are held meanwhile, and are not its own
        peaks[key] = (torch.cuda.max_memory_allocated() - held) / 2**30
    for _ in range(rounds):
        for key, step in runs.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for number in range(steps):
                step(batches[number % len(batches)])
            torch.cuda.synchronize()
            seconds[key].append((time.perf_counter() - began) / steps)
    slots = _DOCUMENTS * _LENGTH
    found["tokens_per_s"] = {key: slots / statistics.median(values) for key, values in seconds.items()}
    found["above_held_gib"] = peaks
    rate = found["tokens_per_s"]
    found["ratio"] = {key: rate[key] / rate[_RIVAL] for key in rate if key != _RIVAL}
    found["step_seconds"] = {key: [round(value, 5) for value in values] for key, values in seconds.items()}
    note(f"{name}, {share:.0%} supervised: {rate}, ratios {found['ratio']}, {found['first_batch']}, {peaks}")
    return found


def compared(variants: dict[str, tuple[Any, Callable[[Batch], torch.Tensor]]], batch: Batch) -> dict[str, Any]:
    """Losses of a batch, and the least cosine of a weight's gradient with the rival's."""
    losses, cosines = {}, {}
    losses[_RIVAL], reference = gradients(*variants[_RIVAL], batch)
    for key in (name for name in variants if name != _RIVAL):
        losses[key], own = gradients(*variants[key], batch)
        cosines[key] = min(
            functional.cosine_similarity(own[n].flatten(), reference[n].flatten(), 0).item() for n in own
        )
    return {"loss": losses, "least_gradient_cosine": cosines}


def profile(name: str, share: float, float8: bool) -> None:
    shape = SHAPES[name]
    model = make_model(shape, torch.device("cuda"))
    batch = make_batches(shape, share, 1)[0]
    optimizer = torch.optim.AdamW(trainable(model), lr=_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    step = stepper(model, ours(model, float8), optimizer, True)
    for _ in range(3):
        step(batch)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        began = time.perf_counter()
        step(batch)
        torch.cuda.synchronize()
        taken = time.perf_counter() - began
    print(f"{name}, {share:.0%}: {taken * 1e3:.1f} ms with the profiler")
    there = torch.autograd.DeviceType.CUDA
    ran = [event for event in profiler.events() if event.device_type == there and not event.is_user_annotation]
    ran.sort(key=lambda event: event.time_range.start)
    kernels: dict[str, list[float]] = {}
    for event in ran:
        kernels.setdefault(event.name[:110], []).append(event.time_range.elapsed_us() / 1e3)
    print(f"kernels {sum(map(sum, kernels.values())):.1f} ms")
    for kernel, times in sorted(kernels.items(), key=lambda pair: -sum(pair[1]))[:40]:
        print(f"{sum(times):8.2f} ms {len(times):5d}  {kernel}")
    waits = [
        ((later.time_range.start - event.time_range.end) / 1e3, event, later)
        for event, later in itertools.pairwise(ran)
    ]
    print(f"between kernels {sum(wait for wait, *_ in waits if wait > 0):.1f} ms; the longest:")
    for wait, event, later in sorted(waits, key=lambda found: -found[0])[:12]:
        at = (event.time_range.end - ran[0].time_range.start) / 1e3
        print(f"{wait:8.2f} ms at {at:6.1f}  {event.name[:60]} -> {later.name[:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["kimi-k2.5", "qwen3-8b"])
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.6], help="supervised shares")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", nargs="?", const="bfloat16", choices=("bfloat16", "float8"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if arguments.profile:
        for name in arguments.shapes:
            profile(name, arguments.shares[0], arguments.profile == "float8")
        return
    results: dict[str, dict[str, Any]] = {}
    for name, share in itertools.product(arguments.shapes, arguments.shares):
        results[f"{name}, {share:.0%} supervised"] = measure(name, share, arguments.steps, arguments.rounds)
        # each time: a run that is cut short keeps what it has
        write_report(arguments.out, Path(), {"results": results})
    print_table(
        ("shape", "eyas tokens/s", "float8", _RIVAL, "ratio", "float8", "cosine", "float8"),
        [
            [key, *r["tokens_per_s"].values(), *r["ratio"].values()]
            + [r["first_batch"]["least_gradient_cosine"][name] for name in r["ratio"]]
            for key, r in results.items()
        ],
    )


if __name__ == "__main__":
    main()
