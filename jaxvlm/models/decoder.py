"""Language decoder."""

from __future__ import annotations

from collections.abc import Iterable

import jax
from flax import nnx

from jaxvlm.config import ConfigError, DecoderConfig, check_choice, layer_windows, refuse_unread
from jaxvlm.nn.attention import Context
from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.dropout import check_rate, fold
from jaxvlm.nn.embed import Embed
from jaxvlm.nn.grouped_matmul import MATMULS
from jaxvlm.nn.kv_cache import KVCache, Shared
from jaxvlm.nn.mask import Mask
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.moe import Routed
from jaxvlm.nn.norm import NORMS
from jaxvlm.nn.param import Init
from jaxvlm.nn.rope import SCALINGS, rope
from jaxvlm.nn.stack import BlockOutputs, Local, Stack
from jaxvlm.parallel.rules import Axes
from jaxvlm.types import Out


class Decoder(nnx.Module):
    """Llama's decoder (arXiv 2302.13971) and its descendants, whose differences are settings.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules of the decoder.
        config: dims and variants; ``vocab_size`` must be set.
        attention: attention backend.
    """

    def __init__(self, init: Init, axes: Axes, config: DecoderConfig, attention: str):
        check(config)
        c = self.config = config
        vocabulary = (c.vocab_size, c.width, c.tied_embeddings, c.embed_scale, c.head)
        self.embed = Embed(init, axes, *vocabulary)
        spec = BlockSpec.of(c, gated=True, attention=attention)
        self.stack = Stack(init, axes, spec, c.depth, c.remat, staged=True)
        self.norm = NORMS[c.norm](init, c.width, c.norm_eps)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: Mask,
        kv: KVCache | None = None,
        cached: Shared | None = None,
        deep: jax.Array | None = None,
        first: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
    ) -> tuple[jax.Array, BlockOutputs]:
        """Compute hidden states after the last block, before the final norm.

        Args:
            x: [B, T, D] embeddings.
            positions: i32[B, R, T]; R = 1, or one row for each of ``rope_sections``.
            mask: attention mask.
            kv: KV cache [L, B, S, K, H] of earlier tokens, or ``None``.
            cached: what the layers share of ``kv``.
            deep: [K, B, T, D] added to hidden states after the first K blocks (DeepStack), or
                ``None``.
            first: i32[], number of the first block if the parameters are those of a pipeline
                stage; ``None``: of all blocks.
            dropout_keys: u32[B, 2], a key per sequence; ``None``: no dropout.

        Returns:
            [B, T, D] hidden states; the KV cache with the new tokens, and router statistics.
        """
        c = self.config
        dropout_keys = fold(dropout_keys, "decoder") if c.dropout else None
        sections = (c.rope_sections, c.rope_interleaved)
        rotation = rope(positions, c.head_dim, c.rope_theta, c.rope_scaling, *sections)
        if not any(layer_windows(c)):
            context = Context(mask, rotation, cached, dropout_keys)
            return self.stack(x, context, kv, deep=deep, first=first)
        local_rotation = rotation
        if c.local_rope_theta:
            local_rotation = rope(positions, c.head_dim, c.local_rope_theta)
        # A window limits bidirectional attention of an image (Gemma 3), not of a prompt
        # (PaliGemma 2).
        far_groups = c.visual_mask == "prompt"
        near, far = mask.windowed(c.window, far_groups), mask.windowed(0, far_groups)
        local = Context(near, local_rotation, cached, dropout_keys)
        everywhere = Context(far, rotation, cached, dropout_keys)
        both = Local(local, c.window_pattern)
        return self.stack(x, everywhere, kv, local=both, deep=deep, first=first)

    def out(self, x: jax.Array, routed: Routed | None = None) -> Out:
        """Apply the final norm to hidden states [B, T, D]; collect the inputs of a loss."""
        aux = None
        if routed is not None:
            aux = {"router_load": routed.load, "router_probability": routed.probability}
        return Out(
            hidden=self.norm(x),
            head=self.embed.head(),
            aux=aux,
            logit_cap=self.config.logit_cap or None,
        )


def check(config: DecoderConfig) -> None:
    """Check the decoder's settings.

    Raises:
        ConfigError: dims that do not fit together, an unknown value, or an unread setting.
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
    if config.num_experts and not 1 <= config.experts_per_token <= config.num_experts:
        raise ConfigError(
            f"{where}.experts_per_token={config.experts_per_token}: 1 to "
            f"num_experts={config.num_experts}"
        )
    if config.num_experts and config.mlp_bias:
        raise ConfigError(f"{where}.mlp_bias=True has no meaning with experts")
    if config.tied_embeddings and not config.head:
        raise ConfigError(f"{where}.head=False has no meaning with tied_embeddings=True")
    refuse_unread(config, where)
    if config.dropout:
        check_rate(config.dropout, f"{where}.dropout")
    _check_names(config, where)
    _check_positions(config, where)


def _check_names(config: DecoderConfig, where: str) -> None:
    known: dict[str, Iterable[str]] = {
        "activation": ACTIVATIONS,
        "norm": ("rms", "rms_plus_one"),
        "expert_matmul": MATMULS,
        "visual_mask": ("causal", "prefix", "prompt"),
    }
    for field, names in known.items():
        check_choice(f"{where}.{field}", getattr(config, field), names)


def _check_positions(config: DecoderConfig, where: str) -> None:
    scaling, sections = config.rope_scaling, config.rope_sections
    check_choice(f"{where}.rope_scaling.kind", scaling.kind, SCALINGS)
    refuse_unread(scaling, f"{where}.rope_scaling")
    if scaling.factor <= 0:
        raise ConfigError(f"{where}.rope_scaling.factor={scaling.factor:g} must be above 0")
    if scaling.kind in ("dynamic", "llama3", "yarn") and scaling.original_length < 1:
        raise ConfigError(
            f"{where}.rope_scaling.original_length={scaling.original_length}: kind="
            f"{scaling.kind!r} needs the length that the model was trained on"
        )
    if sections and sum(sections) != config.head_dim // 2:
        raise ConfigError(
            f"{where}.rope_sections={sections} add up to {sum(sections)}, not to half of "
            f"head_dim={config.head_dim}"
        )
    if not config.window_pattern:
        raise ConfigError(f"{where}.window_pattern is empty; (True,) makes every layer local")
    if any(layer_windows(config)) and sections:
        # An image's tokens share one temporal position: no row of positions measures a window.
        raise ConfigError(f"{where}.window={config.window} has no meaning with rope_sections")
