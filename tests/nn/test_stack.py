"""Blocks run in parts, one after the other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import TINY
from flax import nnx

from jaxvlm.nn.attention import Context
from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.mask import Mask
from jaxvlm.nn.param import Init
from jaxvlm.nn.stack import Block, Local, Stack
from jaxvlm.parallel.rules import Axes

DEPTH, LENGTH = 4, 6


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_parts_of_a_stack_are_the_whole_and_a_block_is_traced_once(remat, monkeypatch):
    spec = BlockSpec.of(TINY.decoder, gated=True, attention="xla")
    spec = dataclasses.replace(spec, qk_norm=False)
    axes = Axes(
        jax.make_mesh((1,) * 6, ("data", "fsdp", "tensor", "context", "expert", "pipeline"))
    )
    stack = Stack(Init(nnx.Rngs(params=0)), axes, spec, DEPTH, remat)
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, spec.width))
    at = jnp.arange(LENGTH)[None]
    every, near = (
        Context(Mask(at, at, q_position=at, k_position=at, window=n)) for n in (LENGTH, 2)
    )
    local = Local(near, (True, False))
    whole, _ = stack(x, every, local=local)
    traced, plain = [], Block.__call__
    monkeypatch.setattr(Block, "__call__", lambda *given: traced.append(1) or plain(*given))
    run = stack.within(every, local)
    half, _ = run(x, skip_last=2)
    found, _ = run(half, skip_first=2)
    assert len(traced) == 1
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
    alone, _ = run(x, skip_last=DEPTH - 1)  # a local layer and no other
    all_near, _ = stack(x, near)
    first, _ = stack.within(near)(x, skip_last=DEPTH - 1)
    np.testing.assert_allclose(alone, first, rtol=1e-5, atol=1e-5)
    assert not np.allclose(all_near, whole)
