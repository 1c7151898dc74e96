"""Flash attention's kernels, in interpret mode, against float64; intervals against their mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packed_masks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import UNIT, close, rounding

from jaxvlm.nn.kernels import blocks, flash_gpu, flash_tpu
from jaxvlm.nn.kernels.flash import flash_attention
from jaxvlm.nn.mask import Spans

B, T, N, K = 2, 200, 4, 2
SMALL = {
    "tpu": flash_tpu.Sizes(128, 128, 128),
    "gpu": flash_gpu.Sizes(*(flash_gpu.Block(*x, 4, 2) for x in ((64, 32), (32, 64), (64, 32)))),
}
HALF = 2.0**-9  # a rounding of bfloat16

MASKS = {  # causal, parents, groups, window, groups beyond the window
    "both ways": (False, False, False, 0, False),
    "causal": (True, False, False, 0, False),
    "shared images": (True, True, False, 0, False),
    "groups": (True, True, True, 0, False),
    "window": (True, True, False, 17, False),
    "groups, window": (True, False, True, 17, False),
    "far groups, window": (True, False, True, 17, True),
}


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_intervals_are_the_mask(name, data):
    mask = packed_masks.mask_of(data.draw(packed_masks.layouts(2, 37)), *MASKS[name])
    real = np.asarray(mask.q_segment > 0)[:, :, None]
    found = np.asarray(mask.spans.dense(37))
    np.testing.assert_array_equal(found, np.asarray(mask.dense()) & real)


visits = jax.jit(blocks.visits, static_argnums=(1, 2, 3))


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_each_pair_of_blocks_is_visited_once(name, data):
    spans = packed_masks.mask_of(data.draw(packed_masks.layouts(2, 48)), *MASKS[name]).spans
    dense = np.asarray(spans.dense(48)).reshape(2, 48 // 8, 8, 48 // 4, 4)
    some, every = dense.any((2, 4)), dense.all((2, 4))
    for of_keys in (False, True):
        listed = jax.tree.map(np.asarray, visits(spans, 8, 4, of_keys))
        partial, full = (numbers(x, 12) for x in listed)
        if of_keys:
            partial, full = (np.swapaxes(x, 1, 2)[:, :6] for x in (partial, full))
        assert (partial + full).max(initial=0) <= 1
        assert not (some & (partial + full == 0)).any()
        assert not (full.astype(bool) & ~every).any()
        if not of_keys and spans.parent_start is None:
            np.testing.assert_array_equal(full, every)


def numbers(runs, most):
    """How often each of ``most`` blocks is listed: int[B, n, most]."""
    count = np.zeros((*runs.end.shape[:2], most), int)
    for b, i in np.ndindex(count.shape[:2]):
        for at in range(runs.end[b, i, -1]):
            r = np.argmax(at < runs.end[b, i])
            count[b, i, at + runs.shift[b, i, r]] += 1
    return count


@functools.cache
def run(platform, cap):
    @jax.jit
    def both(q, k, v, d_out, spans):
        fn = functools.partial(
            flash_attention,
            spans=spans,
            factor=0.3,
            cap=cap,
            platform=platform,
            interpret=True,
            sizes=SMALL[platform],
        )
        out, back = jax.vjp(fn, q, k, v)
        return out, *back(d_out)

    return both


@functools.cache
def arrays(dtype, heads=N, kv_heads=K, head_dim=16):
    rng, of_heads = np.random.default_rng(0), (heads, kv_heads, kv_heads, heads)
    return [jnp.asarray(rng.standard_normal((B, T, n, head_dim)), dtype) for n in of_heads]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", SMALL)
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_it_is_the_softmax_over_the_keys_of_the_mask(name, dtype, platform, data):
    spans = packed_masks.mask_of(data.draw(packed_masks.layouts(B, T)), *MASKS[name]).spans
    if spans.parent_start is None and name not in ("both ways", "causal"):
        none = jnp.zeros((B, T), jnp.int32)
        spans = spans._replace(parent_start=none, parent_end=none)  # compiled before
    held(platform, arrays(dtype), spans, 0.0 if spans.parent_start is None else 2.0)


def by_hand(start, end, parent_start=None, parent_end=None):
    """Intervals [B, T] of numbers, or of functions of the query's index."""
    fields = start, end, parent_start, parent_end
    wide = (x(np.arange(T)) if callable(x) else x for x in fields if x is not None)
    return Spans(*(jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B, T)) for x in wide))


EDGES = {
    "all is padding": by_hand(0, 0),
    "a row is padding": by_hand(0, [[0], [T]]),
    "a token a segment": by_hand(lambda i: i, lambda i: i + 1),
    "one query": by_hand(0, lambda i: np.where(i == 130, T, 0)),
    "one key": by_hand(131, 132),
    "every third query": by_hand(lambda i: i // 3, lambda i: np.where(i % 3, 0, i + 1)),
    "the parent's blocks are the own": by_hand(lambda i: i % 64, lambda i: i, 0, lambda i: i % 64),
    "the parent comes after": by_hand(0, lambda i: np.minimum(i + 1, 90), 90, T),
    "parents alone": by_hand(0, 0, lambda i: i // 2, lambda i: np.minimum(i + 70, T)),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("platform", SMALL)
def test_at_the_edges(name, platform):
    spans = EDGES[name]
    held(platform, arrays("float32"), spans, 0.0 if spans.parent_start is None else 2.0)


@pytest.mark.parametrize(
    "heads, head_dim, dtype", [((4, 1), 72, "float32"), ((2, 2), 80, "bfloat16")]
)
@pytest.mark.parametrize("platform", SMALL)
def test_heads(heads, head_dim, dtype, platform):
    spans = by_hand(lambda i: i // 50 * 50, lambda i: i + 1)
    held(platform, arrays(dtype, *heads, head_dim), spans, 0.0)


def held(platform, inputs, spans, cap):
    found = run(platform, cap)(*inputs, spans)
    expected = packed_masks.attention(*inputs, spans.dense(T), 0.3, cap)
    # A score's error is a weight's share; with bfloat16, weights and the gradients of scores are
    # rounded as well, and so is the result.
    q, k = (np.abs(np.asarray(x, np.float64)) for x in inputs[:2])
    size = 0.3 * float(q.sum(-1).max() * k.max())
    coarse = 8 * HALF if inputs[0].dtype == jnp.bfloat16 else 0
    bar = rounding(q.shape[3]) * size + rounding(T) + coarse
    for what, a, b in zip(("out", "q", "k", "v"), found, expected, strict=True):
        close(a, b, bar, what, least=1.0)
    assert bar > UNIT
