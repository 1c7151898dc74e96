"""Dropout masks: the share of values kept, and what masks are a function of."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.nn import attention_backends
from jaxvlm.nn.dropout import check_rate, dropout, fold
from jaxvlm.nn.mask import Mask
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.train.dropout_keys import seeded
from jaxvlm.types import Batch, Pairs

ROWS, RATE = 8, 0.3


def keys(seed=0, step=0, rows=ROWS):
    tokens = jnp.zeros((rows, 4), jnp.int32)
    return seeded(seed)(jnp.int32(step), Batch(tokens, None, None, None)).dropout_keys


@functools.partial(jax.jit, static_argnums=(1, 2))
def drawn(noise, shape, rate):
    return dropout(jnp.ones(shape), rate, noise)


def kept(noise, shape=(ROWS, 16, 32), rate=RATE):
    return np.asarray(drawn(noise, shape, rate))


@pytest.mark.parametrize("rate", [0.05, 0.9])
def test_what_is_kept_is_scaled_and_the_rest_is_zero(rate):
    mask = kept(fold(keys(), "here"), (ROWS, 64, 64), rate)
    assert set(np.unique(mask)) == {0.0, np.float32(1) / np.float32(1 - rate)}
    share = (mask > 0).mean(axis=(1, 2))
    assert np.all(np.abs(share - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / 64**2))


def test_no_two_rows_steps_seeds_or_places_have_one_mask():
    noise = keys()
    masks = [*kept(noise), *kept(keys(step=1)), *kept(keys(seed=1))]
    for place in ("attn", "mlp", 0, 1, "decoder/stack/blocks/attn/wq"):
        masks += [*kept(fold(noise, place)), *kept(fold(fold(noise, place), 1))]
    masks += [*kept(noise, (2 * ROWS, 16, 32))]  # two images a row
    assert len({x.tobytes() for x in masks}) == len(masks) == (3 + 10 + 2) * ROWS
    # Independent: two masks agree as often as chance has it.
    pairs = np.stack(masks[::2]) > 0, np.stack(masks[1::2]) > 0
    same, size = (1 - RATE) ** 2 + RATE**2, pairs[0].size
    assert abs((pairs[0] == pairs[1]).mean() - same) < 4 * np.sqrt(same * (1 - same) / size)


def test_a_mask_is_the_rows_own_wherever_it_lies():
    """A part of the batch, a longer sequence, or a mesh: no bit differs."""
    noise = keys()
    mask = kept(noise)
    assert np.array_equal(kept(noise[3:5], (2, 16, 32)), mask[3:5])
    assert np.array_equal(kept(noise, (ROWS, 24, 32))[:, :16], mask)
    mesh = make_mesh(MeshConfig(data=4, context=2), jax.devices())
    rows = jax.device_put(noise, batch_sharding(mesh))
    assert np.array_equal(kept(rows), mask)
    own = jax.shard_map(
        lambda n: dropout(jnp.ones((len(n), 16, 32)), RATE, n),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("data"),
        out_specs=jax.sharding.PartitionSpec("data"),
        check_vma=False,
    )
    assert np.array_equal(jax.jit(own)(rows), mask)


def test_each_side_of_a_pair_has_keys_of_its_own():
    there = jnp.ones((3, 2), bool)
    nothing = Batch(None, None, None, None)
    made = seeded(0)(jnp.int32(5), Pairs(nothing, nothing, there, None, None))
    assert made.query.dropout_keys.shape == (3, 2) and made.document.dropout_keys.shape == (3, 2, 2)
    both = np.concatenate([made.query.dropout_keys, made.document.dropout_keys.reshape(-1, 2)])
    assert len({x.tobytes() for x in both}) == 9
    # More negatives in the batch change no key of an example.
    more = seeded(0)(jnp.int32(5), Pairs(nothing, nothing, jnp.ones((3, 4), bool), None, None))
    assert np.array_equal(more.query.dropout_keys, made.query.dropout_keys)
    assert np.array_equal(more.document.dropout_keys[:, :2], made.document.dropout_keys)


def test_no_key_or_no_rate_is_no_dropout():
    x = jnp.ones((ROWS, 4))
    assert dropout(x, RATE, None) is x and dropout(x, 0.0, keys()) is x
    assert fold(None, "attn") is None
    with pytest.raises(ValueError, match="5 items are not a multiple of 2 keys"):
        dropout(jnp.ones((5, 4)), RATE, keys()[:2])
    for rate in (-0.1, 1.0, float("nan")):
        with pytest.raises(
            ConfigError, match=r"here=.*: a dropout rate is at least 0 \(off\) and below 1"
        ):
            check_rate(rate, "here")


def test_shares_are_dropped_where_xla_has_them_all():
    rows = [jnp.ones((2, 4, 2, 8), jnp.float32)] * 3
    axes = Axes(make_mesh(MeshConfig(1), jax.devices()[:1]))

    def run(backend="auto", axes=axes):
        return attention_backends.attend(*rows, Mask(), axes, backend, drop=lambda share: 2 * share)

    assert np.array_equal(run(), 2 * np.asarray(attention_backends.attend(*rows, Mask(), axes)))
    with pytest.raises(ConfigError, match="attention='flash': it has no dropout; use 'auto'"):
        run("flash")
    mesh = make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2])
    with pytest.raises(ConfigError, match=r"attention_dropout does not work with .*'ring'"):
        run(axes=Axes(mesh, context="ring"))
