"""Flash attention over the keys that a mask's intervals name, on TPUs and GPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxvlm.nn.kernels import SAVED
from jaxvlm.nn.kernels.scores import Form
from jaxvlm.nn.mask import Spans

SHARED = 99 * 2**10
"""Bytes of shared memory that a block of threads can have on every NVIDIA GPU since Ampere."""


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: Spans,
    factor: float,
    cap: float = 0.0,
    *,
    platform: str,
    shared: int = SHARED,
    interpret: bool = False,
    sizes: Any = None,
) -> jax.Array:
    """Compute attention with grouped queries; the backward pass is a kernel too.

    Args:
        q: [B, T, N, H] queries.
        k: [B, T, K, H] keys; K divides N.
        v: [B, T, K, H] values.
        spans: the mask, of [1 or B, T].
        factor: scale of the products of queries and keys.
        cap: soft cap ``cap * tanh(score / cap)`` of the scores; 0: none.
        platform: tpu | gpu (NVIDIA's, since Ampere).
        shared: bytes of a GPU's shared memory that a block of threads can have: the device's
            ``shared_memory_per_block_optin``.
        interpret: run the kernel on a CPU, for tests.
        sizes: sizes of blocks, of the platform's module; ``None``: those that suit the shapes.

    Returns:
        [B, T, N, H] in ``q``'s dtype, zeros for a query without keys; the softmax is computed in
        float32.
    """
    length, kernels = q.shape[1], _kernels(platform)
    if sizes is None and platform == "gpu":
        sizes = kernels.sizes_for(q.shape[3], q.dtype, shared)
    elif sizes is None:
        sizes = kernels.sizes_for(length)
    run = functools.partial(_attend, platform, Form(sizes, factor, cap, interpret))
    padded = -(-length // sizes.unit) * sizes.unit
    spans = jax.tree.map(lambda x: _pad(jnp.broadcast_to(x, q.shape[:2]), 1, padded), spans)
    if platform == "gpu":
        return run(q, k, v, spans)
    tokens_last = (_pad(x.transpose(0, 2, 3, 1), 3, padded) for x in (q, k, v))
    return run(*tokens_last, spans)[..., :length].transpose(0, 3, 1, 2)


def _kernels(platform: str) -> Any:
    """Return the platform's module; each is slow to import."""
    if platform == "gpu":
        from jaxvlm.nn.kernels import flash_gpu

        return flash_gpu
    from jaxvlm.nn.kernels import flash_tpu

    return flash_tpu


def _pad(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Append zeros; intervals of zeros are empty."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths) if x.shape[axis] < length else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(platform: str, form: Form, q: Any, k: Any, v: Any, spans: Spans) -> jax.Array:
    return _kernels(platform).forward(q, k, v, spans, form)[0]


def _forward(platform: str, form: Form, q: Any, k: Any, v: Any, spans: Spans) -> Any:
    out, lse = _kernels(platform).forward(q, k, v, spans, form)
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return out, (q, k, v, spans, out, lse)


def _backward(platform: str, form: Form, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, spans, out, lse = kept
    product = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    if platform == "gpu":
        delta = _pad(jnp.sum(product, axis=3).transpose(0, 2, 1), 2, lse.shape[2])
    else:
        delta = jnp.sum(product, axis=2)[:, :, None]
    return *_kernels(platform).backward(q, k, v, spans, d_out, lse, delta, form), None


_attend.defvjp(_forward, _backward)
