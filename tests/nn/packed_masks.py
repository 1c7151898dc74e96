"""Masks of packed sequences, drawn at random, and attention by their definition in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxvlm.nn.mask import Mask, of_segments, within_window


@st.composite
def layouts(draw, batch: int, length: int):
    """Segments, parents, groups and positions, each i32[batch, length], as packing makes them."""
    fields = {n: np.zeros((batch, length), np.int32) for n in ("segment", "parent", "group")}
    position = np.zeros((batch, length), np.int32)
    for b in range(batch):
        at, number = 0, 0
        while at < length and draw(st.integers(0, 9)):  # else the rest is padding
            first = number + 1
            size = draw(st.integers(1, length - at))
            before = 0
            for child in range(draw(st.integers(0, 3)) + 1):
                if at >= length:
                    break
                here = slice(at, at + min(size, length - at))
                count = here.stop - here.start
                number += 1
                fields["segment"][b, here] = number
                fields["parent"][b, here] = first if child else 0
                if child == 1:  # children continue their parent
                    before = position[b, at - 1] + 1
                position[b, here] = before + np.arange(count)
                begin, end = sorted(draw(st.integers(0, count)) for _ in range(2))
                fields["group"][b, at + begin : at + end] = number
                at, size = here.stop, draw(st.integers(1, length))
    return fields | {"position": position}


def mask_of(layout, causal, parents, groups, window=0, far=False) -> Mask:
    """The mask as ids, and the same as intervals of keys in its field ``spans``."""
    length = layout["segment"].shape[1]
    ids = {n: jnp.asarray(x) for n, x in layout.items()}
    index = jnp.arange(length, dtype=jnp.int32)[None] if causal else None
    group = ids["group"] if groups and causal else None
    parent = ids["parent"] if parents else None
    spans = of_segments(length, causal, ids["segment"], parent, group)
    if window:
        spans = within_window(spans, window, ids["position"], group if far else None)
    return Mask(
        q_index=index,
        k_index=index,
        q_segment=ids["segment"],
        k_segment=ids["segment"],
        q_parent=parent,
        q_group=group,
        k_group=group,
        window=window or None,
        q_position=ids["position"],
        k_position=ids["position"],
        far_groups=int(far) if window else None,
        spans=spans,
    )


def attention(q, k, v, d_out, dense, factor, cap=0.0):
    """Output and gradients of queries, keys, values, in float64; q is [B, T, N, H].

    A query without keys gets zeros.
    """
    q, k, v, d_out = (np.asarray(x).astype(np.float64) for x in (q, k, v, d_out))
    group = q.shape[2] // k.shape[2]
    wide = [np.repeat(x, group, axis=2) for x in (k, v)]
    product = factor * np.einsum("btnh,bsnh->bnts", q, wide[0])
    score = cap * np.tanh(product / cap) if cap else product
    slope = 1 - np.square(score / cap) if cap else 1.0
    seen = np.asarray(dense)[:, None]
    most = np.max(np.where(seen, score, -1e30), axis=-1, keepdims=True)
    weight = np.exp(np.where(seen, score - most, -np.inf))
    weight /= np.maximum(weight.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bnts,bsnh->btnh", weight, wide[1])
    d_weight = np.einsum("btnh,bsnh->bnts", d_out, wide[1])
    d_score = weight * (d_weight - np.sum(weight * d_weight, -1, keepdims=True)) * slope * factor
    d_q = np.einsum("bnts,bsnh->btnh", d_score, wide[0])
    d_k = np.einsum("bnts,btnh->bsnh", d_score, q)
    d_v = np.einsum("bnts,btnh->bsnh", weight, d_out)
    d_k, d_v = (x.reshape(*k.shape[:3], group, -1).sum(3) for x in (d_k, d_v))
    return out, d_q, d_k, d_v
