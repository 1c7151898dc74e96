"""Attention backends (XLA, cuDNN, flash) and the selection among them.

``xla`` supports every mask. The others support some masks and shapes; ``auto`` skips a backend that
does not support the given ones, and logs its choice and the reasons once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError, check_choice
from jaxvlm.nn.mask import Mask, Spans, of_segments
from jaxvlm.parallel.context_parallel import HIDDEN, ring_attention
from jaxvlm.parallel.per_device import per_device
from jaxvlm.parallel.rules import WHOLE_ROWS, Axes, log_once, shard

BATCHED = ("batch", "seq")
QUERY = ("batch", "seq", "heads", "head_dim")
KEY = ("batch", "seq", "kv_heads", "head_dim")
_PREFERRED = {"gpu": ("cudnn", "flash"), "tpu": ("flash",)}
_PLATFORMS = {"cudnn": ("gpu",), "flash": ("gpu", "tpu")}
_SHORT = 128  # tokens: at most so many are one block, of which nothing can be skipped


class Scores(NamedTuple):
    """Scale and soft cap of attention scores. Static."""

    scale: float = 0.0
    """Factor of the products of queries and keys; 0: ``head_dim ** -0.5``."""
    cap: float = 0.0
    """Soft cap ``cap * tanh(score / cap)``, before the mask; 0: none. Source: Gemma 2, arXiv
    2408.00118."""

    def factor(self, head_dim: int) -> float:
        """Return the factor that products of queries and keys are multiplied by."""
        return self.scale or 1.0 / math.sqrt(head_dim)


_PLAIN = Scores()
Drop = Callable[[jax.Array], jax.Array]
"""Dropout of attention weights [B, K, T, G, S]."""


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    axes: Axes,
    backend: str = "auto",
    scores: Scores = _PLAIN,
    drop: Drop | None = None,
) -> jax.Array:
    """Compute scaled dot-product attention with grouped queries.

    Args:
        q: [B, T, N, H] queries.
        k: [B, S, K, H] keys; K divides N.
        v: [B, S, K, H] values.
        mask: attention mask.
        axes: mesh and sharding rules; the mesh's platform decides what ``auto`` prefers.
        backend: ``auto``, or a name in :data:`BACKENDS`.
        scores: scale and soft cap of the scores.
        drop: dropout of attention weights; only ``xla`` supports it.

    Returns:
        [B, T, N, H] in ``q``'s dtype; the softmax is computed in float32.

    Raises:
        ConfigError: a backend named explicitly does not support these shapes or this mask.
    """
    if k.shape[2] % axes.mesh.shape["tensor"]:  # kv heads would be replicated: repeat per query
        repeat = q.shape[2] // k.shape[2]
        k, v = (shard(axes, jnp.repeat(x, repeat, axis=2), *KEY) for x in (k, v))
    check_backend(backend)
    if axes.splits_rows(q.shape[1]):
        if axes.context != "ulysses" and backend not in ("auto", "xla"):
            raise ConfigError(
                f"attention={backend!r} of config.model or config.dual needs unsplit sequences, "
                f"and config.strategy.context={axes.context!r} splits them; use 'ulysses', which "
                "attends over whole sequences"
            )
        if axes.context == "ring" and q.shape[1] == k.shape[1]:
            if drop is not None:
                raise ConfigError(
                    "config.dual.text.attention_dropout does not work with config.strategy.context="
                    "'ring', where no device holds all attention weights of a token; use 'gather' "
                    "or 'ulysses'"
                )
            return _ring(q, k, v, mask, axes, scores)
        if axes.context == "ulysses" and q.shape[1] == k.shape[1]:
            return _ulysses(q, k, v, mask, axes, backend, scores, drop)
        log_once(f"attention {q.shape} x {k.shape}: xla (queries of split sequences)")
        k, v = (shard(axes, x, "batch", "row", "kv_heads", "head_dim") for x in (k, v))
        return _xla(q, k, v, mask, axes, scores, drop)  # the others need whole sequences of queries
    name = _choose(q, k, mask, axes.platform, backend, scores.cap, drop is not None)
    if name == "xla":
        return _xla(q, k, v, mask, axes, scores, drop)
    return BACKENDS[name](q, k, v, mask, axes, scores)


def _ring(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, axes: Axes, scores: Scores
) -> jax.Array:
    fields = {n: x for n, x in mask._asdict().items() if x is not None and n[:2] in ("q_", "k_")}
    of_queries = {n: x for n, x in fields.items() if n.startswith("q_")}
    of_keys = {n: x for n, x in fields.items() if n.startswith("k_")}
    # A layer's scalars are broadcast to [1, T]: ring attention's function closes over no array.
    for name in ("window", "far_groups"):
        if (x := getattr(mask, name)) is not None:
            of_queries[name] = jnp.broadcast_to(jnp.asarray(x), (1, q.shape[1]))
    run = (q, k, v, of_queries, of_keys, _allowed, axes, scores.factor(q.shape[3]), scores.cap)
    return ring_attention(*run)


def _allowed(of_queries: dict[str, jax.Array], of_keys: dict[str, jax.Array]) -> jax.Array | None:
    scalars = {n: x[0, 0] for n, x in of_queries.items() if not n.startswith("q_")}
    fields: dict[str, Any] = {**of_queries, **of_keys, **scalars}
    return Mask(**fields).dense()


def _ulysses(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    axes: Axes,
    backend: str,
    scores: Scores,
    drop: Drop | None,
) -> jax.Array:
    inside = dataclasses.replace(axes, activations=tuple(WHOLE_ROWS.items()))
    if k.shape[2] % _num_shards(axes):  # fewer kv heads than devices: repeat them per query head
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    q = shard(inside, q, *QUERY)
    k, v = (shard(inside, x, *KEY) for x in (k, v))
    out = attend(q, k, v, mask, inside, backend, scores, drop)
    return shard(axes, shard(inside, out, *QUERY), *QUERY)


def _num_shards(axes: Axes) -> int:
    return math.prod(axes.mesh.shape[a] for a in ("context", "tensor"))


def check_heads(axes: Axes, num_heads: int) -> None:
    """Check that Ulysses attention can split the query heads over devices.

    Raises:
        ConfigError: it cannot; the message has the numbers.
    """
    split = axes.context == "ulysses" and axes.mesh.shape["context"] > 1
    if split and num_heads % _num_shards(axes):
        raise ConfigError(
            f"config.strategy.context='ulysses' splits {num_heads} heads over context x tensor = "
            f"{_num_shards(axes)} devices, which does not divide them; 'ring' and 'gather' take "
            "any number of heads"
        )


def check_platform(axes: Axes, backend: str) -> None:
    """Check that an attention backend runs on the mesh's platform.

    Raises:
        ConfigError: it does not; the message has the platforms.
    """
    platforms = _PLATFORMS.get(backend, (axes.platform,))
    if axes.platform not in platforms:
        raise ConfigError(
            f"config.model (or config.dual).attention={backend!r} runs on "
            f"{' and '.join(platforms)}, not on {axes.platform}; use 'auto'"
        )


def check_backend(name: str, where: str = "config.model") -> None:
    """Check that an attention backend exists.

    Args:
        name: value of the setting.
        where: the settings group that error messages name.

    Raises:
        ConfigError: it does not exist; the message lists those that do.
    """
    check_choice(f"{where}.attention", name, ("auto", *BACKENDS))


def _choose(
    q: jax.Array,
    k: jax.Array,
    mask: Mask,
    platform: str,
    backend: str,
    cap: float = 0.0,
    drops: bool = False,
) -> str:
    check_backend(backend)
    if backend != "auto":
        if refusal := _refusal(backend, q, k, mask, platform, cap, drops):
            raise ConfigError(
                f"config.model (or config.dual).attention={backend!r}: {refusal}; use 'auto'"
            )
        return backend
    name, passed_over = choice(q, k, mask, platform, cap, drops)
    if platform in _PREFERRED:
        why = "; ".join(f"not {other}: {reason}" for other, reason in passed_over.items())
        log_once(f"attention {q.shape} x {k.shape}: {name}" + (f" ({why})" if why else ""))
    return name


def choice(
    q: Any, k: Any, mask: Mask, platform: str, cap: float = 0.0, drops: bool = False
) -> tuple[str, dict[str, str]]:
    """Choose a backend as ``auto`` does.

    Args:
        q: [B, T, N, H] queries; the shape and dtype are read.
        k: [B, S, K, H] keys.
        mask: attention mask.
        platform: cpu | gpu | tpu.
        cap: soft cap of the scores; 0: none.
        drops: attention weights have dropout.

    Returns:
        The backend's name; and those that were passed over, with reasons.
    """
    passed_over: dict[str, str] = {}
    for name in _PREFERRED.get(platform, ()):
        reason = _refusal(name, q, k, mask, platform, cap, drops) or _rather(name, q, platform)
        if not reason:
            return name, passed_over
        passed_over[name] = reason
    return "xla", passed_over


def stores_scores(backend: str, platform: str) -> bool:
    """Whether a train step's attention keeps products of all queries and keys in memory.

    Dropout, and rows of few tokens, may need it on accelerators too.

    Args:
        backend: of the configuration.
        platform: cpu | gpu | tpu.
    """
    return backend == "xla" or (backend == "auto" and platform not in _PREFERRED)


def _refusal(
    backend: str, q: Any, k: Any, mask: Mask, platform: str, cap: float, drops: bool
) -> str:
    """Return why ``backend`` does not support these inputs, or ``""`` if it does."""
    if backend == "xla":
        return ""
    if drops:
        return "it has no dropout"
    if q.shape[1] != k.shape[1]:
        return "queries and keys differ in length"
    plain = mask.q_segment is None and mask.q_group is None and mask.window is None
    if backend == "cudnn":
        return _refusal_of_cudnn(q, plain, cap)
    if mask.spans is None and not plain:
        return "the keys of a query are not known to be consecutive"
    if platform == "tpu" and q.dtype == jnp.float16:
        return "TPUs have no float16"
    return ""


def _refusal_of_cudnn(q: Any, plain: bool, cap: float) -> str:
    if cap:
        return "it has no soft cap"
    if not plain:
        return "it takes whole rows, not packed sequences or windows"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, not {q.dtype}"
    if q.shape[3] % 8 or q.shape[3] > 128:
        return f"cuDNN takes head dims that are multiples of 8 up to 128, not {q.shape[3]}"
    return ""


def _rather(backend: str, q: Any, platform: str) -> str:
    """Return why ``auto`` does not choose a backend that would work, or ``""`` if it does."""
    if backend == "flash" and platform == "tpu" and q.shape[1] <= _SHORT:
        return f"{q.shape[1]} tokens are one block"
    if backend == "flash" and platform == "gpu" and q.dtype == jnp.float32:
        return "its products of float32 are exact and use no tensor cores"
    return ""


def masked_scores(
    q: jax.Array, k: jax.Array, allowed: jax.Array | None, scores: Scores = _PLAIN
) -> jax.Array:
    """Compute the scores whose softmax the plain backend takes.

    Args:
        q: [B, T, N, H] queries.
        k: [B, S, K, H] keys; K divides N.
        allowed: bool[1 or B, T, S]; ``None``: everything is.
        scores: scale and soft cap of the scores.

    Returns:
        f32[B, K, T, G, S]; large and negative, but finite, where a query does not attend to a key.
    """
    # jax.nn.dot_product_attention(implementation="xla") computes the same. On a CPU its gradient
    # takes 1.5 times as long, and so does that of einsums that keep the heads after the tokens.
    B, T, N, H = q.shape
    K, S = k.shape[2:0:-1]
    scaled = q * jnp.asarray(scores.factor(H), q.dtype)
    # Tokens come before the heads of a group: where tokens are sharded, the merged dim still is.
    scaled = scaled.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, -1, H)
    score = jnp.matmul(scaled, k.transpose(0, 2, 3, 1), preferred_element_type=jnp.float32)
    score = score.reshape(B, K, T, N // K, S)
    if scores.cap:
        score = scores.cap * jnp.tanh(score / scores.cap)
    if allowed is None:
        return score
    # Finite, so that a padding query with no allowed key does not become NaN.
    return jnp.where(allowed[:, None, :, None], score, HIDDEN)


def _xla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    _axes: Axes,
    scores: Scores = _PLAIN,
    drop: Drop | None = None,
) -> jax.Array:
    B, T, N, H = q.shape
    K, S = k.shape[2:0:-1]
    score = masked_scores(q, k, mask.dense(), scores)
    weight = jax.nn.softmax(score, axis=-1).astype(v.dtype)
    weight = weight if drop is None else drop(weight)
    out = jnp.matmul(weight.reshape(B, K, -1, S), v.transpose(0, 2, 1, 3))
    return out.reshape(B, K, T, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


def _cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, axes: Axes, scores: Scores = _PLAIN
) -> jax.Array:
    from jaxvlm.nn.kernels.cudnn import cudnn_attention  # NVIDIA only

    causal, factor = mask.q_index is not None, scores.factor(q.shape[3])

    def one_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return cudnn_attention(q, k, v, None, causal, factor)

    return per_device(one_device, axes, [(q, QUERY), (k, KEY), (v, KEY)], (q.shape, QUERY))


def _flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    axes: Axes,
    scores: Scores = _PLAIN,
    interpret: str = "",
) -> jax.Array:
    """Kernels of ours; ``interpret`` names the platform whose kernel runs on a CPU, for tests."""
    from jaxvlm.nn.kernels.flash import SHARED, flash_attention  # Pallas is slow to import

    device = axes.mesh.devices.flat[0]
    run = functools.partial(
        flash_attention,
        factor=scores.factor(q.shape[3]),
        cap=scores.cap,
        platform=interpret or axes.platform,
        shared=getattr(device, "shared_memory_per_block_optin", SHARED),
        interpret=bool(interpret),
    )

    def one_device(q: jax.Array, k: jax.Array, v: jax.Array, *spans: Any) -> jax.Array:
        return run(q, k, v, Spans(*spans))

    spans = mask.spans or of_segments(q.shape[1], mask.q_index is not None)
    rows = [None if x is None else jnp.broadcast_to(x, q.shape[:2]) for x in spans]
    args = [(q, QUERY), (k, KEY), (v, KEY), *((x, BATCHED) for x in rows)]
    return per_device(one_device, axes, args, (q.shape, QUERY))


BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "xla": _xla,
    "cudnn": _cudnn,
    "flash": _flash,
}
"""Name -> backend."""
