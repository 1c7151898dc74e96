"""Text encoder: a transformer over unpacked texts, pooled to one embedding per text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import ConfigError, TextConfig, check_choice, refuse_unread
from jaxvlm.nn.attention import Context
from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.dropout import check_rate, dropout, fold
from jaxvlm.nn.mask import Mask
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.norm import LayerNorm
from jaxvlm.nn.param import Init, affine, fan_in, normal, param, zeros
from jaxvlm.nn.stack import Stack
from jaxvlm.parallel.rules import Axes, shard


class TextEncoder(nnx.Module):
    """Text tower of CLIP and SigLIP (pre-norm), or BERT (post-norm); one text per sequence.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules of the text tower.
        config: dims and variants; ``vocab_size`` must be set.
        attention: attention backend.

    Source: arXiv 2103.00020, 2303.15343, 1810.04805.
    """

    def __init__(self, init: Init, axes: Axes, config: TextConfig, attention: str):
        check(config)
        V, D, T = config.vocab_size, config.width, config.max_length
        self.axes, self.config = axes, config
        self.table = param(init, (V, D), ("vocab", "embed"), normal(0.02))
        self.position = param(init, (T, D), ("position", "embed"), normal(0.02))
        types, words = (config.num_types, D), ("position", "embed")
        self.types = param(init, types, words, normal(0.02)) if config.num_types else None
        # One norm in both variants: after the embeddings, or after the last block.
        self.norm = LayerNorm(init, D, config.norm_eps)
        self.stack = Stack(init, axes, _spec(config, attention), config.depth, config.remat)
        self.w_pool = param(init, (D, D), ("embed", "norm"), fan_in(D)) if config.pooler else None
        self.b_pool = param(init, (D,), ("norm",), zeros) if config.pooler else None

    def __call__(
        self,
        tokens: jax.Array,
        segment: jax.Array,
        positions: jax.Array,
        dtype: Any = jnp.float32,
        types: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the hidden states of all tokens.

        Args:
            tokens: i32[B, T].
            segment: i32[B, T]: 0 is padding, to which no token attends; on either side of the text.
            positions: i32[B, T], indices into the position embedding table.
            dtype: compute dtype.
            types: i32[B, T] token type ids; ``None``: all are 0.
            dropout_keys: u32[B, 2], a key per sequence; ``None``: no dropout.

        Returns:
            [B, T, D] in ``dtype``; padding tokens attend to the text too.

        Raises:
            ValueError: token types for an encoder without a table of them.
        """
        if types is not None and self.types is None:
            raise ValueError("config.dual.text.num_types=0: this encoder has no token types")
        # The sum over embedding tables is rounded to ``dtype`` once, however many tables there are.
        rows = [self.table[...][tokens], self.position[...][positions]]
        if self.types is not None:
            rows.append(self.types[0] if types is None else self.types[...][types])
        x = functools.reduce(jnp.add, (row.astype(jnp.float32) for row in rows))
        x = shard(self.axes, x.astype(dtype), "batch", "stream", "embed")
        x = self.norm(x) if self.config.norm_after else x
        if not (self.config.dropout or self.config.attention_dropout):
            dropout_keys = None
        dropout_keys = fold(dropout_keys, "text")
        x = dropout(x, self.config.dropout, fold(dropout_keys, "embeddings"))
        x, _ = self.stack(x, Context(self._mask(segment), dropout_keys=dropout_keys))
        return x if self.config.norm_after else self.norm(x)

    def pooled(self, x: jax.Array, tokens: jax.Array, segment: jax.Array) -> jax.Array:
        """Pool hidden states into one embedding per text.

        Args:
            x: [B, T, D] hidden states from :meth:`__call__`.
            tokens: i32[B, T].
            segment: i32[B, T]: 0 is padding.

        Returns:
            [B, D].
        """
        real = segment > 0
        if self.config.pool == "mean":
            weight = real.astype(jnp.float32)[:, :, None]
            total = jnp.sum(x.astype(jnp.float32) * weight, axis=1)
            return (total / jnp.maximum(jnp.sum(weight, axis=1), 1)).astype(x.dtype)
        where = PLACES[self.config.pool](real, tokens, self.config.eos_id)
        x = jnp.take_along_axis(x, where[:, None, None], axis=1)[:, 0]
        return jnp.tanh(affine(x, self.w_pool, self.b_pool)) if self.config.pool == "pooler" else x

    def _mask(self, segment: jax.Array) -> Mask:
        # Padding tokens are queries too: the token pooled at the sequence's end may be padding.
        mask = Mask(q_segment=jnp.ones_like(segment), k_segment=jnp.minimum(segment, 1))
        if not self.config.causal:
            return mask
        index = jnp.arange(segment.shape[1], dtype=jnp.int32)[None]
        return mask._replace(q_index=index, k_index=index)


def _first(condition: jax.Array) -> jax.Array:
    """Return i32[B], the first index per sequence where bool[B, T] is true; 0 if none is."""
    return jnp.argmax(condition, axis=1)


def _last(real: jax.Array, _tokens: jax.Array, _eos: int) -> jax.Array:
    return jnp.argmax(jnp.where(real, jnp.arange(real.shape[1]), -1), axis=1)


PLACES: dict[str, Callable[[jax.Array, jax.Array, int], jax.Array]] = {
    "class": lambda real, _tokens, _eos: _first(real),
    "pooler": lambda real, _tokens, _eos: _first(real),
    "last": _last,
    "end": lambda real, _tokens, _eos: jnp.full(real.shape[0], real.shape[1] - 1),
    "largest": lambda real, tokens, _eos: jnp.argmax(jnp.where(real, tokens, -1), axis=1),
    "eos": lambda real, tokens, eos: _first(real & (tokens == eos)),
}
"""``TextConfig.pool`` -> function (bool[B, T] not padding, i32[B, T] tokens, EOS id) -> i32[B],
index of the pooled token."""


def _spec(config: TextConfig, attention: str) -> BlockSpec:
    return BlockSpec.of(
        config,
        num_kv_heads=config.num_heads,
        head_dim=config.width // config.num_heads,
        norm="layer",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        attention=attention,
    )


def check(config: TextConfig, where: str = "config.dual.text") -> None:
    """Check the settings of a text encoder.

    Args:
        config: settings of the encoder.
        where: the settings group that error messages name.

    Raises:
        ConfigError: dims that do not fit together, an unknown value, or an unread setting.
    """
    check_choice(f"{where}.pool", config.pool, ("mean", *PLACES))
    check_choice(f"{where}.activation", config.activation, ACTIVATIONS)
    refuse_unread(config, where)
    for field in ("dropout", "attention_dropout"):
        check_rate(getattr(config, field), f"{where}.{field}")
    for field in ("vocab_size", "depth", "max_length"):
        if getattr(config, field) < 1:
            raise ConfigError(f"{where}.{field}={getattr(config, field)} must be at least 1")
    if config.width % config.num_heads:
        raise ConfigError(
            f"{where}.width={config.width} is not a multiple of num_heads={config.num_heads}"
        )
    if config.pool == "eos" and not 0 <= config.eos_id < config.vocab_size:
        raise ConfigError(f"{where}.eos_id={config.eos_id} is no token id; pool='eos' needs one")
    if config.pool == "pooler" and not config.pooler:
        raise ConfigError(f"{where}.pool='pooler' needs {where}.pooler=True")
