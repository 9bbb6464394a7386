"""The GPU's chain attention (`eyas.drafting.flash`) against the plain one in float64: outputs and gradients, by relative error.

    python benchmarks/gpu/attention.py --out FILE

Uneven documents, grouped heads, partly supervised masks, windows, up to three keys of the chain's own. Exit status 1 where an
error is above what bfloat16 explains.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from common import print_table, write_report

from eyas.drafting.data import Batch
from eyas.drafting.forward import _attend
from eyas.drafting.planning import make_plan

_LENGTHS = [1, 129, 7, 300, 64]
_LIMIT = 1e-2  # bfloat16 operands: 2**-8 a rounding, and several roundings


def plain_batch(share: float) -> Batch:
    slots = sum(_LENGTHS)
    mask = torch.cat([torch.arange(n) >= round((1 - share) * n) for n in _LENGTHS])
    empty = torch.empty(0, device="cuda")
    ids = torch.zeros(slots, dtype=torch.long, device="cuda")
    return Batch(ids, empty, empty, mask, ids, _LENGTHS, [])


def errors(heads: int, kv_heads: int, size: int, share: float, window: int | None, own: int) -> dict[str, float]:
    plan = make_plan(plain_batch(share), own + 1)
    slots, active = sum(_LENGTHS), len(plan.active_N)
    torch.manual_seed(heads + own)
    shapes = [(heads, active, size), (kv_heads, slots, size), (kv_heads, slots, size)]
    shapes += [(kv_heads, active, size)] * (2 * own)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    pull = torch.randn(active, heads * size, device="cuda", dtype=torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in tensors]
        q, keys, values, *rest = leaves
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        out = _attend(q, keys, values, pairs, plan, plan.all_active, size**-0.5, window)
        out.backward(pull.to(dtype))
        # a key that a window has left behind takes no part
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        results.append([out.detach().double(), *[grad.double() for grad in grads]])
    names = ["out", "q", "keys", "values", *(f"own {i}" for i in range(2 * own))]
    return {
        name: ((fast - exact).norm() / exact.norm().clamp_min(1e-30)).item()
        for name, fast, exact in zip(names, *results, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = itertools.product([(8, 8, 112), (8, 2, 128), (4, 1, 64)], [1.0, 0.6], [None, 3, 64], [0, 1, 2, 3])
    found = {
        f"{h}/{k} heads of {d}, {share:.0%}, window {window}, {own} own": errors(h, k, d, share, window, own)
        for (h, k, d), share, window, own in cases
    }
    worst = {case: max(values.values()) for case, values in found.items()}
    write_report(arguments.out, Path(), {"limit": _LIMIT, "results": found})
    shown = sorted(worst.items(), key=lambda pair: -pair[1])[:8]
    print_table(("worst of all cases", "relative error"), [[case, value] for case, value in shown])
    print(f"{len(found)} cases, greatest error {max(worst.values()):.2e}, limit {_LIMIT}")
    sys.exit(max(worst.values()) > _LIMIT)


if __name__ == "__main__":
    main()
