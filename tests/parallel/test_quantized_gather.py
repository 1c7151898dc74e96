"""All-gather of parameters in int8: rounding errors, and their effect on a run."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from long_runs import assert_ends_alike, losses_of_300_steps

from jaxvlm.config import MeshConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.quantized_gather import BLOCK, gather_in_bytes


@pytest.mark.parametrize("spec", [P(None, "fsdp"), P("fsdp", None), P(None, "fsdp", None)])
def test_each_value_is_off_by_half_a_step_at_most(spec):
    mesh = make_mesh(MeshConfig(1, 8))
    here, there = NamedSharding(mesh, spec), NamedSharding(mesh, P())
    shape = (512, 1024) if len(spec) == 2 else (3, 64, 384)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[:, :8] = 0
    run = jax.jit(gather_in_bytes({"w": here}, {"w": there}), out_shardings={"w": there})
    program = run.lower({"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=here)}).compile()
    assert "s8[" in "".join(line for line in program.as_text().splitlines() if "all-gather" in line)
    found = np.asarray(run({"w": jax.device_put(x, here)})["w"])
    along = max((i for i in range(len(shape)) if spec[i] is None), key=lambda i: shape[i])
    cut = np.moveaxis(x, along, -1)
    size = max(n for n in range(1, BLOCK + 1) if cut.shape[-1] % n == 0)
    largest = np.abs(cut.reshape(-1, size)).max(1, keepdims=True)
    off = np.abs(np.moveaxis(found, along, -1) - cut).reshape(-1, size)
    assert (off <= largest / 254 * 1.001).all() and off.max() > 0


@pytest.mark.long
def test_a_run_of_300_steps_ends_where_the_other_does():
    assert_ends_alike(
        losses_of_300_steps("hpz"), losses_of_300_steps("hpz", param_gather_dtype="int8")
    )
