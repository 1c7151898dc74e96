"""Uses of JAX's private API, all in one file.

cuDNN's attention has no public access to its packed layout, nor without a GPU to compile for it.
``jax.distributed`` has no public access to its key-value store; Orbax uses it in the same way. How
a scan's equation divides its inputs differs between versions. Checked with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed


def scan_inputs(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and carries of a scan's equation, from its parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # jax 0.12
    return len(list(consts)), len(list(carries))


def coordinator_host() -> str:
    """Return the host part of the coordinator's address, without the brackets of IPv6."""
    address = distributed.global_state.coordinator_address or ""
    return address.rsplit(":", 1)[0].strip("[]")


def put(key: str, value: str) -> None:
    """Store a value in the key-value store that every process can read."""
    _client().key_value_set(key, value)


def get(key: str, timeout_s: float) -> str:
    """Return a value of the key-value store; blocks until some process has put it.

    Raises:
        RuntimeError: no process put it within ``timeout_s`` seconds.
    """
    return _client().blocking_key_value_get(key, int(timeout_s * 1000))


def cudnn_forward(
    q: Any, k: Any, v: Any, where: Any, causal: bool, factor: float
) -> tuple[Any, Any]:
    """Call cuDNN's attention; no gradient is defined.

    Args:
        q: [B, T, N, H].
        k: [B, S, K, H].
        v: [B, S, K, H].
        where: ``None``: rows are whole. Else i32[B, M], lengths of the segments of all rows; and
            i32[B, M + 1] twice, where they start in ``q`` and ``k``, in elements; M is at least 2.
        causal: a query attends to no later key.
        factor: scale of the products of queries and keys.

    Returns:
        [B, T, N, H]; and statistics f32[B * M, N, T] for :func:`cudnn_backward`.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    args, static = _cudnn(q, where, causal, factor)
    call = cudnn._dot_product_attention_fwd_p
    return tuple(call.bind(q, k, v, *args, **static, is_training=True))


def cudnn_backward(
    q: Any,
    k: Any,
    v: Any,
    where: Any,
    causal: bool,
    factor: float,
    out: Any,
    stats: Any,
    d_out: Any,
) -> tuple[Any, Any, Any]:
    """Return the gradients of queries, keys and values; arguments as :func:`cudnn_forward`'s."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    args, static = _cudnn(q, where, causal, factor)
    call = cudnn._dot_product_attention_bwd_p
    return tuple(call.bind(q, k, v, *args, stats, out, d_out, **static))


def _cudnn(q: Any, where: Any, causal: bool, factor: float) -> tuple[list[Any], dict[str, Any]]:
    """Bias, lengths, offsets and pages; static arguments."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    kinds = cudnn.MaskType
    none = jax.numpy.zeros(0, q.dtype)
    if where is None:
        kind = kinds.CAUSAL if causal else kinds.NO_MASK
        given = [none] * 4
    else:
        kind = kinds.PADDING_CAUSAL if causal else kinds.PADDING
        lengths, of_queries, of_keys = where
        given = [lengths, lengths, of_queries, of_keys]
    static = {
        "scale": factor,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # a bias; its gradient
        "mask_type": kind,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    return [none, *given, none, none], static


def _client():
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized")
    return client
