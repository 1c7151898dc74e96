"""Experts' matmuls compiled ahead of time: memory, FLOPs and seconds of compiling, by chip and way.

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m benchmarks.experts_aot [--targets h200:1 ...]

16,384 rows of 2,048 numbers times 8, 32 or 128 matrices of 2,048 x 768 (Qwen3-30B-A3B's), in
bfloat16: the result, the rows' gradient and the matrices'. ``xla`` is ``jax.lax.ragged_dot``,
``kernel`` what :mod:`jaxvlm.nn.grouped_matmul` takes. FLOPs are the compiler's, over one matmul a
row; it counts none of Triton's kernels, nor of cuBLAS' matmuls on GPUs: there the largest array
says it. For the kernel on TPUs it counts what the kernel declares, all tiles that it may visit.
Rows of other targets are kept.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from typing import Any

# With no GPU there is nothing to tune by.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.common import environment, kept, write
from jaxvlm.nn.grouped_matmul import grouped_matmul
from jaxvlm.planner.compiled import topology

NAME = "experts_aot"
ROWS, WIDTH, MLP = 16384, 2048, 768
GROUPS = (8, 32, 128)
TARGETS = ("a100:1", "h100:1", "h200:1", "b200:1", "v5p:2x2x1", "v6e:2x2")


def compiled(target: str, groups: int, way: str) -> dict[str, Any]:
    """A row of the result."""
    here = SingleDeviceSharding(topology.devices(target)[0])

    def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=here)

    platform = "tpu" if target.startswith("v") else "gpu"
    kernel = platform if way == "kernel" else ""

    def matmul(rows: Any, w: Any, sizes: Any) -> Any:
        return grouped_matmul(rows, w, sizes, kernel, tail=False)

    def back(which: int) -> Any:
        return lambda rows, w, sizes, d: jax.vjp(lambda *x: matmul(*x, sizes), rows, w)[1](d)[which]

    given = shape(ROWS, WIDTH), shape(groups, WIDTH, MLP), shape(groups, dtype=jnp.int32)
    d_out = shape(ROWS, MLP)
    row: dict[str, Any] = {"target": target, "groups": groups, "way": way}
    for name, fn, args in (
        ("forward", matmul, given),
        ("rows", back(0), (*given, d_out)),
        ("matrices", back(1), (*given, d_out)),
    ):
        start = time.process_time()
        program = jax.jit(fn).lower(*args).compile()
        flops = (program.cost_analysis() or {}).get("flops", 0.0)
        row[name] = {
            "temporary_mib": round(program.memory_analysis().temp_size_in_bytes / 2**20, 2),
            "flops": round(flops / (2 * ROWS * WIDTH * MLP), 2),
            "largest_array": largest(program.as_text()),
            "compile_cpu_seconds": round(time.process_time() - start, 1),
        }
    return row


def largest(text: str) -> str:
    """The largest array that an instruction of a compiled program writes to memory."""
    main = text[text.index("\nENTRY") :].splitlines()
    lines = "\n".join(line for line in main if " parameter(" not in line)
    found = re.findall(r"= \(?(\w+\[[\d,]+\])", lines)
    return max(found, key=lambda x: math.prod(map(int, re.findall(r"\d+", x.split("[")[1]))))


def main() -> None:
    """Compile for each target, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    args = parser.parse_args()
    rows = [row for row in kept(NAME) if row["target"] not in args.targets]
    for target in args.targets:
        for way in ("xla", "kernel"):
            rows += [compiled(target, groups, way) for groups in GROUPS]
            print(*rows[-len(GROUPS) :], sep="\n", flush=True)
    write(f"{NAME}.json", {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
