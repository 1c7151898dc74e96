"""The language decoder."""

from __future__ import annotations

import jax
from flax import nnx

from jaxvlm.config import ConfigError, DecoderConfig
from jaxvlm.nn.attention import Context
from jaxvlm.nn.embed import Embed
from jaxvlm.nn.kv import KVCache
from jaxvlm.nn.mask import Mask
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.norm import RMSNorm
from jaxvlm.nn.param import Init
from jaxvlm.nn.rope import rope
from jaxvlm.nn.stack import BlockSpec, Stack
from jaxvlm.parallel.rules import Axes


class Decoder(nnx.Module):
    """Llama's decoder (arXiv 2302.13971): RMSNorm, RoPE, grouped queries, SwiGLU.

    Args:
        init: source of parameters.
        axes: mesh and rules of this tower.
        config: dims and variants; ``vocab_size`` set.
        attention: backend name.
    """

    def __init__(self, init: Init, axes: Axes, config: DecoderConfig, attention: str):
        check(config)
        self.config = config
        self.embed = Embed(init, axes, config.vocab_size, config.width, config.tied_embeddings)
        spec = BlockSpec(
            width=config.width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            mlp_dim=config.mlp_dim,
            norm="rms",
            norm_eps=config.norm_eps,
            activation=config.activation,
            gated=True,
            attention=attention,
        )
        self.stack = Stack(init, axes, spec, config.depth, config.remat)
        self.norm = RMSNorm(init, config.width, config.norm_eps)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: Mask,
        kv: KVCache | None = None,
        length: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Hidden states after the last block, before the final norm.

        Args:
            x: [B, T, D] embeddings.
            positions: i32[B, 1, T].
            mask: who may attend to whom.
            kv: caches [L, B, S, K, H] of tokens seen before, or ``None``.
            length: i32[] tokens in ``kv``.

        Returns:
            [B, T, D], and ``kv`` with the new tokens.
        """
        turn = rope(positions, self.config.head_dim, self.config.rope_theta)
        return self.stack(x, Context(mask, turn, length), kv)


def check(config: DecoderConfig) -> None:
    """Refuse dims that do not fit each other.

    Raises:
        ConfigError: which field, and what would do.
    """
    where = "config.model.decoder"
    if config.vocab_size < 1:
        raise ConfigError(f"{where}.vocab_size={config.vocab_size} is not known yet")
    if config.depth < 1:
        raise ConfigError(f"{where}.depth={config.depth}: at least 1 layer")
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{where}.num_heads={config.num_heads} is not a multiple of "
            f"num_kv_heads={config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ConfigError(
            f"{where}.head_dim={config.head_dim} is odd; rotary pairs need an even one"
        )
    if config.activation not in ACTIVATIONS:
        raise ConfigError(
            f"{where}.activation={config.activation!r}; known: {', '.join(ACTIVATIONS)}"
        )
    if config.visual_mask not in ("causal", "prefix"):
        raise ConfigError(f"{where}.visual_mask={config.visual_mask!r}; known: causal, prefix")
