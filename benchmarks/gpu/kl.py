"""The loss's kernels (`eyas.drafting.kl_kernels`) by block and warps, against what the memory allows.

    python benchmarks/gpu/kl.py --out FILE

4,096 rows of 32,000 bfloat16 logits with their gradient, as a chunk of a training step has them; medians. The bound counts each row
once: the teacher reads one, the head's with its gradient reads two and writes one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from common import print_table, write_report

from eyas.drafting import kl_kernels
from eyas.drafting.kl import Teacher, kl_rows, taught

_ROWS, _COLUMNS = 4096, 32_000
_CONFIGURATIONS = ((2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (16384, 32))


def microseconds(run: Callable[[], object]) -> float:
    return 1e3 * float(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"))


def bandwidth() -> float:
    """Bytes a microsecond that a copy on the device moves, read and written."""
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: target.copy_(source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    logits_MV, teacher_MV = torch.randn(2, _ROWS, _COLUMNS, device="cuda").bfloat16().unbind()
    weight = torch.ones((), device="cuda")
    chosen = kl_kernels._BLOCK, kl_kernels._WARPS
    found: dict[str, dict[str, float]] = {}
    for block, warps in _CONFIGURATIONS:
        kl_kernels._BLOCK, kl_kernels._WARPS = block, warps
        teacher: Teacher = taught(teacher_MV, None)
        name = f"{block} columns, {warps} warps" + (" (chosen)" if (block, warps) == chosen else "")
        found[name] = {
            "teacher": microseconds(lambda: taught(teacher_MV, None)),
            "head": microseconds(lambda teacher=teacher: kl_rows(logits_MV, teacher, None, weight, True)),
        }
    rate = bandwidth()
    row_bytes = logits_MV.nbytes
    found["bound"] = {"teacher": row_bytes / rate, "head": 3 * row_bytes / rate}
    write_report(arguments.out, None, {"rows": _ROWS, "columns": _COLUMNS, "microseconds": found})
    print_table(
        ("configuration", "teacher, us", "head, us"), [[key, v["teacher"], v["head"]] for key, v in found.items()]
    )


if __name__ == "__main__":
    main()
