"""The grouped matmul of Qwen3-VL-30B-A3B's experts: the kernel, and XLA's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator_parts import setup
from jaxvlm.nn import grouped_matmul

REAL = {"rows": 32768, "width": 2048, "mlp_dim": 768, "groups": 32}
"""4096 tokens by 8 experts each; a quarter of the 128 experts, as on one of four devices."""
TINY = {"rows": 48, "width": 32, "mlp_dim": 16, "groups": 4}


def matmul(tiny: bool, way: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Time and memory of each direction of a grouped matmul whose rows are dealt out unevenly.

    ``kernel`` is what ``expert_matmul="auto"`` takes, ``xla`` is ``jax.lax.ragged_dot``. The first
    group has a quarter of all rows, the last none. Errors are relative, in the 2-norm,
    against a matmul per group in float32.
    """
    platform = setup.devices(tiny)[0].platform
    shape = TINY if tiny else REAL
    M, K, N, G = shape.values()
    rng = np.random.default_rng(0)
    own = M // 4, *rng.multinomial(M - M // 4, np.full(G - 2, 1 / (G - 2))), 0
    ends = np.cumsum(own)
    sizes = jnp.asarray(own, jnp.int32)
    given = [jnp.asarray(rng.normal(size=s) / 8, dtype) for s in ((M, K), (G, K, N), (M, N))]

    def grouped(rows: Any, w: Any) -> Any:
        if way == "kernel":
            of = "tpu" if platform == "tpu" else "gpu"
            return grouped_matmul.grouped_matmul(rows, w, sizes, of, False, platform == "cpu")
        return grouped_matmul.grouped_matmul(rows, w, sizes, kernel="", tail=False)

    def by_loop(rows: Any, w: Any) -> Any:
        parts = zip(ends, own, w)
        return jnp.concatenate([rows[end - n : end] @ matrix for end, n, matrix in parts])

    def both(matmul: Any) -> Any:
        def run(rows: Any, w: Any, d_out: Any) -> Any:
            out, back = jax.vjp(matmul, rows, w)
            return out, *back(d_out)

        return run

    with jax.default_matmul_precision("highest"):
        exact = jax.jit(both(by_loop))(*(x.astype(jnp.float32) for x in given))
    found = jax.jit(both(grouped))(*given)
    errors = [
        float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for a, b in zip(found, exact, strict=True)
    ]
    # The result is rounded once, and float32's products may be summed in another order.
    bound = 2.0**-7 if dtype == "bfloat16" else 1e-5
    yield {
        "shape": shape,
        "errors": dict(zip(("out", "rows", "matrices"), errors)),
        "bound": bound,
        "within_bound": max(errors) <= bound,
    }
    directions = {
        "forward": (grouped, 2, 1),
        "rows": (lambda *x: both(grouped)(*x)[1], 3, 1),
        "matrices": (lambda *x: both(grouped)(*x)[2], 3, 1),
        "all": (both(grouped), 3, 3),
    }
    for name, (fn, count, times) in directions.items():
        args = given[:count]
        program = jax.jit(fn).lower(*args).compile()
        ms = setup.milliseconds(program, *args, steps=1 if tiny else 10)
        yield {
            name: {
                "median_ms": round(ms, 3),
                "tflop_per_s": round(2 * times * M * K * N / ms / 1e9, 1),
                "temporary_mib": round(program.memory_analysis().temp_size_in_bytes / 2**20, 1),
            }
        }
