"""Programs that generate a token of one sequence move what they need, and no more."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import hlo_costs
from jaxvlm.config import MeshConfig
from jaxvlm.nn.embed import lookup
from jaxvlm.nn.param import contract
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.planner.compiled import collectives, topology

pytestmark = [
    pytest.mark.aot,
    # JAX caches what it compiles for devices that are not here, and can't read it again.
    pytest.mark.filterwarnings(
        "ignore:Error reading persistent compilation cache entry:UserWarning"
    ),
]
CHIPS = {"h200": "h200:1", "v6e": "v6e:1x1", "tensor=2": "h200:2", "tensor=6": "h200:6"}


@functools.cache
def mesh_of(name: str) -> Any:
    devices = topology.devices(CHIPS[name])
    return make_mesh(MeshConfig(data=1, tensor=len(devices)), devices)


def of(*shape: int, dtype: Any = jnp.bfloat16, on: str = "h200", spec: Any = ()) -> Any:
    """An array on chips."""
    place = NamedSharding(mesh_of(on), PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def compiled(run: Any, *args: Any) -> str:
    return str(jax.jit(run).lower(*args).compile().as_text())


def layers_of(x, stack):
    """A layer after the other."""

    def layer(x, w):
        return x + jnp.sum(contract(jnp.tanh(x), w)), None

    return jax.lax.scan(layer, x, stack)[0]


@pytest.mark.parametrize(
    ("chip", "dtype"), [("h200", jnp.bfloat16), ("h200", jnp.int8), ("v6e", jnp.bfloat16)]
)
@pytest.mark.parametrize("shape", [(2048, 2048), (2048, 512), (2048, 11008), (11008, 2048)])
def test_a_layers_matrix_is_read_where_it_lies(shape, chip, dtype):
    layers = 8
    text = compiled(
        layers_of, of(1, 1, shape[0], on=chip), of(layers, *shape, dtype=dtype, on=chip)
    )
    moved = sum(op.times * op.moved for op in hlo_costs.read(text))
    assert 1 <= moved / (layers * math.prod(shape) * dtype.dtype.itemsize) < 1.1


@pytest.mark.parametrize("mesh", ["tensor=2", "tensor=6"])
def test_a_sharded_matrix_is_not_all_gathered(mesh):
    """Its rows are split."""
    x, stack = of(1, 1, 3072, on=mesh), of(4, 3072, 3072, on=mesh, spec=(None, "tensor"))
    text = compiled(layers_of, x, stack)
    sent = collectives.total(collectives.read(text, dict(mesh_of(mesh).shape)))
    assert 0 < sent <= 4 * 3 * 3072 * 4  # bytes: sums in float32, and what is around them


def test_a_sharded_embedding_table_is_not_all_gathered():
    table = of(8192, 512, on="tensor=2", spec=("tensor",))

    def run(table, tokens):
        return lookup(table, tokens, jnp.bfloat16)

    text = compiled(run, table, of(1, 1, dtype=jnp.int32, on="tensor=2"))
    sent = collectives.total(collectives.read(text, dict(mesh_of("tensor=2").shape)))
    assert 0 < sent <= 4 * 512 * 2  # bytes: two rows, all-reduced
