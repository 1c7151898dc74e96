"""A digest depends on every bit and not on the sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import skip_without_float8
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvlm.checkpoint.digest import digests, is_finite, snapshot

DTYPES = ["float32", "bfloat16", "int32", "uint8", "int8", "bool", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_changes_the_digest(dtype):
    if dtype.startswith("float8"):
        skip_without_float8()
    base = np.arange(24).astype(np.uint8) % 2 if dtype == "bool" else np.arange(24)
    sound = np.asarray(jnp.asarray(base).astype(dtype)).reshape(2, 3, 4)
    words = sound.view(np.uint8).reshape(-1)
    bits = [0] if dtype == "bool" else range(8)
    changed = []
    for byte in range(0, len(words), 7):
        for bit in bits:
            flipped = words.copy()
            flipped[byte] ^= 1 << bit
            changed.append(jnp.asarray(flipped.view(sound.dtype).reshape(sound.shape)))
    found = digests([jnp.asarray(sound), *changed])
    assert found[0] not in found[1:]


def test_sharding_and_copying_keep_the_digest():
    x = jax.random.normal(jax.random.key(0), (16, 8), jnp.float32)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    specs = [
        PartitionSpec(),
        PartitionSpec("a", "b"),
        PartitionSpec("b"),
        PartitionSpec(("a", "b")),
    ]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for spec in specs]
    values, copies = snapshot([x, *placed])
    assert len(set(values)) == 1
    assert digests(copies) == values
    assert all(a is not b for a, b in zip(copies, [x, *placed]))
    assert copies[2].sharding == placed[1].sharding


def test_order_and_zeros():
    x = jnp.arange(1, 65, dtype=jnp.float32)
    swapped = jnp.concatenate([x[32:], x[:32]])
    first, second, empty = digests([x, swapped, jnp.zeros((0, 3))])
    assert first != second
    assert empty == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_one_value_that_is_not_finite_is_found(dtype):
    values = np.zeros((3, 2**20), jnp.dtype(dtype))
    assert is_finite(values)
    if dtype != "int8":
        for at, value in (((0, 0), np.nan), ((2, -1), np.inf), ((1, 7), -np.inf)):
            values[:] = 0
            values[at] = value
            assert not is_finite(values)
