"""Programs that generate a token of one sequence on GPUs move what they need, and no more."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import hlo_costs
from jaxvlm.config import MeshConfig
from jaxvlm.inference import generate
from jaxvlm.nn.embed import lookup
from jaxvlm.nn.param import contract
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.planner.compiled import collectives, topology
from jaxvlm.types import Out

pytestmark = [
    pytest.mark.aot,
    # JAX caches what it compiles for devices that are not here, and can't read it again.
    pytest.mark.filterwarnings(
        "ignore:Error reading persistent compilation cache entry:UserWarning"
    ),
]
MESH = {n: make_mesh(MeshConfig(tensor=n), topology.devices(f"h200:{n}")) for n in (1, 2)}


def of(*shape: int, dtype: Any = jnp.bfloat16, tensor: int = 1, spec: Any = ()) -> Any:
    """An array on H200s."""
    place = NamedSharding(MESH[tensor], PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def compiled(run: Any, *args: Any) -> str:
    return str(jax.jit(run).lower(*args).compile().as_text())


def test_the_output_matrix_is_not_copied():
    def sample(hidden, table):
        greedy, unused = generate.Sampling(), jnp.zeros((), jnp.int32)
        return generate._sample(Out(hidden, table.T), greedy, unused, unused)

    found = hlo_costs.arrays(compiled(sample, of(1, 3, 512), of(8192, 512)))
    assert ("bf16", (8192, 512)) in {x[:2] for x in found}
    assert not [x for x in found if x[0] == "f32" and set(x[1]) >= {8192, 512}]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("shape", [(2048, 2048), (2048, 512), (2048, 11008), (11008, 2048)])
def test_a_layers_matrix_is_read_where_it_lies(shape, dtype):
    layers = 8

    def run(x, stack):
        def layer(x, w):
            return x + jnp.sum(contract(jnp.tanh(x), w)), None

        return jax.lax.scan(layer, x, stack)[0]

    text = compiled(run, of(1, 1, shape[0]), of(layers, *shape, dtype=dtype))
    moved = sum(op.times * op.moved for op in hlo_costs.read(text))
    assert 1 <= moved / (layers * math.prod(shape) * dtype.dtype.itemsize) < 1.1


def test_a_sharded_embedding_table_is_not_all_gathered():
    table = of(8192, 512, tensor=2, spec=("tensor",))

    def run(table, tokens):
        return lookup(table, tokens, jnp.bfloat16)

    text = compiled(run, table, of(1, 1, dtype=jnp.int32, tensor=2))
    sent = collectives.total(collectives.read(text, dict(MESH[2].shape)))
    assert 0 < sent <= 4 * 512 * 2  # bytes: two rows, all-reduced
