"""Large products of a training step in float8 (e4m3) and in bfloat16: time, and what rounding the inputs costs.

    python benchmarks/gpu/float8.py --out FILE

At the sizes that a step has, inputs rounded beforehand; medians in ms. One scale for a tensor, or one for each row, as
`eyas.drafting.float8` has it; `fast` sums keep fewer bits on the way. `rounding` writes the first input in float8. Errors are relative
to float64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from torch.nn.functional import ScalingType, linear, scaled_mm

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from common import print_table, write_report

from eyas.drafting.float8 import LARGEST, Rounded, rounded

# rows, what is summed over, columns
_PRODUCTS = {
    "Qwen3-8B, output head": (4096, 4096, 32_000),
    "Qwen3-8B, output head, back": (4096, 32_000, 4096),
    "Qwen3-8B, gate": (8192, 4096, 12_288),
    "Qwen3-8B, down": (8192, 12_288, 4096),
    "Kimi-K2.5, output head": (4096, 7168, 32_000),
    "Kimi-K2.5, output head, back": (4096, 32_000, 7168),
    "Kimi-K2.5, gate": (8192, 7168, 12_288),
    "Kimi-K2.5, down": (8192, 12_288, 7168),
}


def milliseconds(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median"))


def by_tensor(x_MK: torch.Tensor) -> Rounded:
    scale = x_MK.abs().amax().float() / LARGEST
    return Rounded((x_MK / scale).to(torch.float8_e4m3fn), scale)


def measure(rows: int, contracted: int, columns: int) -> dict[str, float]:
    a_MK = torch.randn(rows, contracted, device="cuda", dtype=torch.bfloat16)
    b_NK = torch.randn(columns, contracted, device="cuda", dtype=torch.bfloat16)
    exact = a_MK[:64].double() @ b_NK[:256].double().T

    def error(found_MN: torch.Tensor) -> float:
        return float((found_MN[:64, :256].double() - exact).norm() / exact.norm())

    found = {"bfloat16": milliseconds(partial(linear, a_MK, b_NK)), "error in bfloat16": error(linear(a_MK, b_NK))}
    for name, kind, rounding in (
        ("by tensor", ScalingType.TensorWise, by_tensor),
        ("by row", ScalingType.RowWise, rounded),
    ):
        a, b = rounding(a_MK), rounding(b_NK)
        product = partial(scaled_mm, a.values_MK, b.values_MK.T, a.scales_M1, kind, b.scales_M1, kind)
        for sums, fast in (("", False), (", fast", True)):
            found[name + sums] = milliseconds(partial(product, use_fast_accum=fast))
            found[f"error {name}{sums}"] = error(product(use_fast_accum=fast))
    found["rounding by row"] = milliseconds(partial(rounded, a_MK))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found = {name: measure(*sizes) for name, sizes in _PRODUCTS.items()}
    write_report(arguments.out, None, {"sizes": _PRODUCTS, "milliseconds": found})
    columns = list(next(iter(found.values())))
    print_table(("product", *columns), [[key, *[v[c] for c in columns]] for key, v in found.items()])


if __name__ == "__main__":
    main()
