"""cuDNN's packed layout, by a model of it that reads and writes flat memory; what is lowered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import packed_masks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import close, rounding

from jaxvlm.nn.kernels.cudnn import cudnn_attention
from jaxvlm.parallel import compat

B, T, N, K, H = 3, 37, 4, 2, 8


def in_memory(where, arrays, causal, factor):
    """Per listed segment, its results and where in flat memory they belong.

    Args:
        where: lengths, and the offsets of queries and of keys, in elements.
        arrays: queries, keys, values, gradient of the output; each [B, T, heads, H].
    """
    lengths, *offsets = (np.asarray(x).reshape(-1) for x in where)
    begins = [offsets[i] for i in (0, 1, 1, 0)]
    tokens = B * T
    used = int((lengths > 0).sum())
    assert (lengths[:used] > 0).all()
    for begin, x in zip(begins, arrays):
        stride = x.shape[2] * x.shape[3]
        assert (np.diff(begin[:used]) >= lengths[: max(used - 1, 0)] * stride).all()
        assert (begin[used:] == tokens * stride).all()
    for i in range(used):
        size = int(lengths[i])
        parts = []
        for begin, x in zip(begins, arrays):
            heads, dim = x.shape[2:]
            span = np.asarray(x).reshape(-1)[begin[i] : begin[i] + size * heads * dim]
            parts.append(span.reshape(1, size, heads, dim))
        seen = np.tril(np.ones((1, size, size), bool)) if causal else np.ones((1, size, size), bool)
        at = (begins[j][i] for j in (0, 0, 1, 2))  # of the output, of three gradients
        yield zip(at, packed_masks.attention(*parts, seen, factor))


def scattered(numbers, where, arrays, causal, factor):
    """The results of these numbers; memory that nothing was written to is NaN."""
    shapes = [arrays[i].shape for i in (0, 0, 1, 2)]
    out = [np.full(np.prod(s), np.nan, np.float32) for s in shapes]
    for results in in_memory(where, arrays, causal, factor):
        for buffer, (at, x) in zip(out, results):
            buffer[at : at + x.size] = x.reshape(-1)
    return [out[i].reshape(shapes[i]) for i in numbers]


def forward(q, k, v, where, causal, factor):
    def run(q, k, v, *where):
        return scattered([0], where, (q, k, v, np.zeros_like(q)), causal, factor)[0]

    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return jax.pure_callback(run, out, q, k, v, *where), jnp.zeros(())


def backward(q, k, v, where, causal, factor, out, stats, d_out):
    def run(q, k, v, d_out, *where):
        return scattered([1, 2, 3], where, (q, k, v, d_out), causal, factor)

    like = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, k, v)]
    return jax.pure_callback(run, like, q, k, v, d_out, *where)


def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((B, T, n, H)), jnp.float32) for n in (N, K, K, N)]


def results(inputs, segment, causal, most):
    *qkv, d_out = inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "cudnn_forward", forward)
        patch.setattr(compat, "cudnn_backward", backward)
        out, back = jax.vjp(lambda *x: cudnn_attention(*x, segment, causal, 0.3, most), *qkv)
        return out, *back(d_out)


@pytest.mark.parametrize("causal", [False, True])
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_segments_are_read_where_they_lie(causal, data):
    layout = data.draw(packed_masks.layouts(B, T))
    segment, inputs = jnp.asarray(layout["segment"]), arrays()
    dense = packed_masks.mask_of(layout, causal, False, False).spans.dense(T)
    most = max(len(np.unique(row[row > 0])) for row in layout["segment"])
    expected = packed_masks.attention(*inputs, dense, 0.3)
    for a, b in zip(results(inputs, segment, causal, most), expected, strict=True):
        close(a, b, rounding(T), least=1.0)


def test_a_segment_without_room_is_no_number():
    segment = np.repeat([[1, 2, 3, 4], [1, 1, 1, 1], [1, 2, 3, 4]], [10, 9, 9, 9], axis=1)
    out, *_ = results(arrays(), jnp.asarray(segment), False, 2)
    lost = np.zeros((B, T), bool)
    lost[2, 10:] = True  # the seventh of six segments, and those after it
    np.testing.assert_array_equal(np.isnan(out).all((2, 3)), lost)
    np.testing.assert_array_equal(np.isnan(out).any((2, 3)), lost)


def test_offsets_fit():
    q = jax.ShapeDtypeStruct((2**12, 2**11, 2, 128), jnp.bfloat16)
    segment = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
    with pytest.raises(ValueError, match="too many for cuDNN's 32-bit offsets"):
        jax.eval_shape(lambda q, s: cudnn_attention(q, q, q, s, False, 0.1, 4), q, segment)


LOWERED = {
    "whole rows": (577, 64, False, 0, "NO_MASK"),
    "whole rows, causal": (64, 256, True, 0, "CAUSAL"),
    "segments": (576, 72, False, 8, "PADDING"),
    "segments, causal": (1024, 128, True, 5, "PADDING_CAUSAL"),
}


@pytest.mark.parametrize("name", LOWERED)
def test_what_is_lowered(name):
    length, dim, causal, most, kind = LOWERED[name]
    q, k = (jax.ShapeDtypeStruct((2, length, n, dim), jnp.bfloat16) for n in (N, K))
    segment = jax.ShapeDtypeStruct((2, length), jnp.int32) if most else None

    def both(q, k, v, segment):
        out, back = jax.vjp(lambda *x: cudnn_attention(*x, segment, causal, 0.3, most), q, k, v)
        return back(out)

    traced = jax.jit(both).trace(q, k, k, segment)
    text = traced.lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')
    assert re.findall(r"__cudnn\$(\w+)\(", text) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert re.findall(r'"mask_type": "(\w+)"', text) == [kind] * 2
    assert re.findall(r'"max_seg_per_batch": (\d+)', text) == [str(most or 1)] * 2
    assert f"{length}x{length}" not in text
