"""Vision-language model: vision encoder, connector, decoder."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import (
    ConfigError,
    ModelConfig,
    RelevanceConfig,
    check_choice,
    encoder_blocks,
)
from jaxvlm.grid_order import MORTON, ROW_MAJOR, Order, convert, tiled
from jaxvlm.models import relevance
from jaxvlm.models.connector import Connector
from jaxvlm.models.decoder import Decoder
from jaxvlm.models.grid import token_index
from jaxvlm.models.texture import CHANNELS, texture
from jaxvlm.models.vit import VisionTop, ViT, normalised, num_patches
from jaxvlm.nn.attention_backends import check_backend
from jaxvlm.nn.embed import image_places, mix_tokens, place_tokens, token_places
from jaxvlm.nn.kv_cache import KVCache, Shared
from jaxvlm.nn.mask import Mask, batch_mask
from jaxvlm.nn.moe import Routed
from jaxvlm.nn.param import Init
from jaxvlm.parallel.rules import Axes, shard
from jaxvlm.types import NEWLINE, Batch, Out

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def check(config: ModelConfig) -> None:
    """Check that the connector fits the vision encoder before it and the decoder after it.

    Raises:
        ConfigError: it does not; the message names the setting and why.
    """
    vision, connector, where = config.vision, config.connector, "config.model.connector"
    side, merge = vision.image_size // vision.patch_size, connector.merge
    if not vision.packed and (merge < 1 or side % merge):
        raise ConfigError(
            f"{where}.merge={merge} does not divide the {side} x {side} patches of an image"
        )
    if vision.packed and merge != vision.merge_block:
        raise ConfigError(
            f"{where}.merge={merge} is not config.model.vision.merge_block={vision.merge_block}"
        )
    if connector.deepstack_levels and connector.deepstack_levels + 1 != len(vision.feature_layers):
        raise ConfigError(
            f"{where}.deepstack_levels={connector.deepstack_levels} needs "
            f"{connector.deepstack_levels + 1} config.model.vision.feature_layers, not "
            f"{len(vision.feature_layers)}"
        )
    if connector.deepstack_levels > config.decoder.depth:
        raise ConfigError(
            f"{where}.deepstack_levels={connector.deepstack_levels}, but the decoder has "
            f"{config.decoder.depth} layers"
        )
    if connector.newline and (vision.packed or connector.deepstack_levels):
        raise ConfigError(
            f"{where}.newline=True takes images of one size, and {where}.deepstack_levels=0"
        )
    if connector.video_pool and (not connector.newline or merge > 1 or side % connector.video_pool):
        raise ConfigError(
            f"{where}.video_pool={connector.video_pool} has to divide the {side} x {side} patches "
            f"of an image, and takes {where}.newline=True and {where}.merge=1"
        )
    if vision.keep_class_token and merge > 1:
        raise ConfigError(f"{where}.merge={merge} takes patches alone, without the class token")
    if connector.relevance != RelevanceConfig():
        relevance.check(connector.relevance, side)
    if connector.relevance.budget:
        for name, other in (
            ("config.model.vision.packed", vision.packed),
            ("config.model.vision.keep_class_token", vision.keep_class_token),
            (f"{where}.merge", merge > 1),
            (f"{where}.deepstack_levels", connector.deepstack_levels),
            (f"{where}.newline", connector.newline),
        ):
            if other:
                raise ConfigError(
                    f"{where}.relevance.budget={connector.relevance.budget} takes the patches of "
                    f"images of one size as they are: leave {name} at its default"
                )


def num_visual_tokens(config: ModelConfig) -> int:
    """Return the number of visual tokens per tile; an image of one tile takes as many positions.

    Raises:
        ConfigError: images may have any size, so that there is no such number; or as :func:`check`.
    """
    check(config)
    vision, connector = config.vision, config.connector
    if vision.packed:
        raise ConfigError(
            "config.model.vision.packed=True: how many tokens an image takes depends on its size"
        )
    if connector.relevance.budget:
        return connector.relevance.budget
    side = vision.image_size // vision.patch_size
    return (side // connector.merge) ** 2 + vision.keep_class_token


class Stream(NamedTuple):
    """Values passed between :meth:`VLM.pre`, :meth:`VLM.blocks` and :meth:`VLM.post`."""

    x: Any
    """[B, T, D] residual stream."""
    positions: Any
    """i32[B, R, T]."""
    mask: Mask
    kv: KVCache | None = None
    cached: Shared | None = None
    """What the layers share of ``kv``."""
    routed: Routed | None = None
    """Router statistics, with a leading dim of layers."""
    deep: Any = None
    """[K, B, T, D]: what DeepStack adds to hidden states after the decoder's first K blocks."""
    dropout_keys: Any = None
    """u32[B, 2]: as ``Batch.dropout_keys``."""


def _encode(
    vision: ViT,
    config: ModelConfig,
    pixels: jax.Array,
    grid: jax.Array | None = None,
    dropout_keys: jax.Array | None = None,
) -> jax.Array:
    x = normalised(pixels, config.vision)
    with jax.named_scope("vision"):
        return vision(x.astype(DTYPES[config.dtype]), grid, dropout_keys)


def _features(vision: ViT, config: ModelConfig, batch: Batch) -> jax.Array | None:
    """Encode images of one size as [B * I, P, D], packed patches as [B, P, D].

    D is :func:`encoder_width`.
    """
    if batch.patches is not None:
        return _encode(vision, config, batch.patches, batch.grid, batch.dropout_keys)
    if batch.pixels is None:
        return None
    pixels = batch.pixels.reshape(-1, *batch.pixels.shape[2:])
    features = _encode(vision, config, pixels, dropout_keys=batch.dropout_keys)
    if not config.connector.relevance.budget:
        return features
    # Concatenated to the features, so that who caches or sends them needs no pixels later.
    channels = texture(pixels, config.vision.patch_size).astype(features.dtype)
    # Frozen blocks keep the class token, which has no texture.
    class_token = features.shape[1] - channels.shape[1]
    channels = jnp.pad(channels, ((0, 0), (class_token, 0), (0, 0)))
    return _reorder(jnp.concatenate([features, channels], axis=-1), encoder_token_order(config))


def encoded(vision: ViT, config: ModelConfig, batch: Batch) -> jax.Array | None:
    """Compute ``Batch.features`` of a batch; ``None`` if it has no images."""
    features = _features(vision, config, batch)
    if features is None or batch.pixels is None:
        return features
    return features.reshape(*batch.pixels.shape[:2], *features.shape[1:])


def _run_vision_top(
    top: VisionTop,
    config: ModelConfig,
    features: jax.Array,
    grid: jax.Array | None = None,
    dropout_keys: jax.Array | None = None,
) -> jax.Array:
    """Run the blocks above the frozen ones on the frozen blocks' features."""
    hidden_width = config.vision.width * len(encoder_blocks(config.vision))
    with jax.named_scope("vision_top"):
        tokens = top(features[..., :hidden_width], grid, dropout_keys)
    if features.shape[-1] == hidden_width:
        return tokens
    channels = features[:, -tokens.shape[1] :, hidden_width:]
    return _reorder(jnp.concatenate([tokens, channels], axis=-1), MORTON)


def _reorder(x: jax.Array, order: Order) -> jax.Array:
    """Convert tokens [B, P, D] of square images from row-major order to ``order``."""
    side = round(x.shape[1] ** 0.5)
    return x if order == ROW_MAJOR else convert(x, ROW_MAJOR, order, side, side)


def encoder_token_order(config: ModelConfig) -> Order:
    """Return the order of an image's patches in ``Batch.features``, after the class token if any.

    Morton order if relevance pools them, so that tokens are cached in the order in which they are
    read; but row-major with frozen blocks, as the blocks above them read row-major tokens.
    """
    if config.vision.packed:
        return tiled(config.vision.merge_block)
    pooled = config.connector.relevance.budget > 0 and not config.vision.frozen_blocks
    return MORTON if pooled else ROW_MAJOR


def encoder_width(config: ModelConfig) -> int:
    """Return D of ``Batch.features``: the layers it has, and texture if relevance reads it."""
    hidden_width = config.vision.width * len(encoder_blocks(config.vision))
    return hidden_width + CHANNELS * (config.connector.relevance.budget > 0)


def encoder_tokens(config: ModelConfig) -> int:
    """Return P of ``Batch.features``, for an image of one size or a tile."""
    vision = config.vision
    first = vision.class_token if vision.frozen_blocks else vision.keep_class_token
    return num_patches(vision) + first


class VLM(nnx.Module):
    """Vision-language model, as ``post(blocks(pre(batch)))`` so that a pipeline can split it.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules by submodule: ``vision``, ``vision_top``, ``connector``,
            ``decoder``.
        config: dims and variants.
    """

    def __init__(self, init: Init, axes: dict[str, Axes], config: ModelConfig):
        check_choice("config.model.dtype", config.dtype, DTYPES)
        check_backend(config.attention)
        check(config)
        self.config, self.axes = config, axes["decoder"]
        self.vision = ViT(init, axes["vision"], config.vision, config.attention)
        has_top, of_vision = config.vision.frozen_blocks > 0, (config.vision, config.attention)
        self.vision_top = VisionTop(init, axes["vision_top"], *of_vision) if has_top else None
        taps = max(1, len(config.vision.feature_layers))
        widths = (taps * config.vision.width, config.decoder.width)
        self.connector = Connector(init, axes["connector"], config.connector, *widths)
        self.decoder = Decoder(init, axes["decoder"], config.decoder, config.attention)

    def __call__(self, batch: Batch) -> Out:
        """Run the forward pass over a batch."""
        return self.post(self.blocks(self.pre(batch)))

    def encode(self, pixels: jax.Array, grid: jax.Array | None = None) -> jax.Array:
        """Run the vision encoder, without the connector.

        Args:
            pixels: values in 0..255, [B, H, W, 3] or packed patches [B, P, patch_dim].
            grid: i32[B, I, 3] (t, h, w) of the images in each sequence of packed patches.

        Returns:
            [B, P, D_vision].
        """
        features = _encode(self.vision, self.config, pixels, grid)
        if self.vision_top is None:
            return features
        return _run_vision_top(self.vision_top, self.config, features, grid)

    def pre(self, batch: Batch) -> Stream:
        """Embed the tokens, encode the images, and insert visual tokens into the sequences."""
        x = self.decoder.embed(batch.tokens, DTYPES[self.config.dtype])
        tokens, deep = self._tokens(batch), None
        if tokens is not None:
            packed, pooling = self.config.vision.packed, self.config.connector.relevance
            with jax.named_scope("connector"):
                reads_query = pooling.budget > 0 and pooling.query
                query = relevance.question(x, batch, pooling.budget) if reads_query else None
                visual = self.connector(tokens, packed, query)
                levels = self.connector.deep(tokens, packed) if self.connector.levels else None
            count = visual.shape[1]
            B, _, D = x.shape
            visual, source = visual.reshape(B, -1, D), batch.image_source
            if source is not None:
                index = token_places(source[..., 0], visual.shape[1])
            elif packed:
                block = self.config.vision.merge_block
                index = token_index(batch.grid, batch.image_start, count, block)
            else:
                index = image_places(batch.image_start, count, x.shape[1])
            if batch.image_weight is not None:
                x = mix_tokens(x, visual, source, batch.image_weight)
            else:
                x = place_tokens(x, visual, index)
            if self.connector.newline is not None:
                if source is None:
                    raise ValueError("connector.newline=True needs batches with image_source")
                end = self.connector.newline[...].astype(x.dtype)
                x = jnp.where(source[..., :1] == NEWLINE, end, x)
            if levels is not None:
                levels, empty = levels.reshape(len(levels), B, -1, D), jnp.zeros_like(x)
                deep = jnp.stack([place_tokens(empty, level, index) for level in levels])
        x = shard(self.axes, x, "batch", "stream", "embed")
        keys = batch.dropout_keys
        return Stream(x, batch.positions, batch_mask(batch), deep=deep, dropout_keys=keys)

    def _tokens(self, batch: Batch) -> jax.Array | None:
        features = batch.features
        if features is None:
            features = _features(self.vision, self.config, batch)
        elif not self.config.vision.packed:
            features = features.reshape(-1, *features.shape[2:])
        if features is None or self.vision_top is None:
            return features
        rest = (features, batch.grid, batch.dropout_keys)
        return _run_vision_top(self.vision_top, self.config, *rest)

    def blocks(self, stream: Stream, first: jax.Array | None = None) -> Stream:
        """Run the decoder's layers, or those of a pipeline stage that starts at layer ``first``."""
        with jax.named_scope("decoder"):
            s = stream
            rest = (s.kv, s.cached, s.deep, first, s.dropout_keys)
            x, side = self.decoder(s.x, s.positions, s.mask, *rest)
        return stream._replace(x=x, kv=side.kv, routed=side.routed, deep=None)

    def post(self, stream: Stream) -> Out:
        """Apply the final norm; the loss applies the output projection."""
        return self.decoder.out(stream.x, stream.routed)
