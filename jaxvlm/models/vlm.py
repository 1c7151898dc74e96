"""A vision-language model: ViT, connector, decoder."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import ConfigError, ModelConfig, tower_blocks
from jaxvlm.models import relevance
from jaxvlm.models.connector import Connector
from jaxvlm.models.decoder import Decoder
from jaxvlm.models.grid import token_index
from jaxvlm.models.texture import CHANNELS, texture
from jaxvlm.models.vit import Top, ViT, normalised, num_patches
from jaxvlm.nn.embed import image_places, mix_tokens, place_tokens, token_places
from jaxvlm.nn.kernels import check_backend
from jaxvlm.nn.kv import KVCache
from jaxvlm.nn.mask import Mask, batch_mask
from jaxvlm.nn.moe import Routed
from jaxvlm.nn.param import Init
from jaxvlm.order import MORTON, ROW_MAJOR, Order, convert, tiled
from jaxvlm.parallel.rules import Axes, shard
from jaxvlm.types import NEWLINE, Batch, Out

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def check(config: ModelConfig) -> None:
    """Refuse a connector that does not fit the tower before it or the decoder behind it.

    Raises:
        ConfigError: which field, and why.
    """
    vision, connector, where = config.vision, config.connector, "config.model.connector"
    side, merge = vision.image_size // vision.patch_size, connector.merge
    if not vision.packed and (merge < 1 or side % merge):
        raise ConfigError(
            f"{where}.merge={merge} does not divide the {side} x {side} patches of a picture"
        )
    if vision.packed and merge != vision.block:
        raise ConfigError(f"{where}.merge={merge} is not config.model.vision.block={vision.block}")
    if connector.levels and connector.levels + 1 != len(vision.feature_layers):
        raise ConfigError(
            f"{where}.levels={connector.levels} takes one more feature_layers than that, not "
            f"{len(vision.feature_layers)}"
        )
    if connector.levels > config.decoder.depth:
        raise ConfigError(
            f"{where}.levels={connector.levels}, but the decoder has {config.decoder.depth} layers"
        )
    if connector.newline and (vision.packed or connector.levels):
        raise ConfigError(f"{where}.newline=True takes pictures of one size, and no levels")
    if vision.keep_class_token and merge > 1:
        raise ConfigError(f"{where}.merge={merge} takes patches alone, without the class token")
    relevance.check(connector.relevance, side)
    if connector.relevance.budget:
        for name, other in (
            ("config.model.vision.packed", vision.packed),
            ("config.model.vision.keep_class_token", vision.keep_class_token),
            (f"{where}.merge", merge > 1),
            (f"{where}.levels", connector.levels),
            (f"{where}.newline", connector.newline),
        ):
            if other:
                raise ConfigError(
                    f"{where}.relevance.budget={connector.relevance.budget} takes the patches of "
                    f"pictures of one size as they are: leave {name} at its default"
                )


def num_visual_tokens(config: ModelConfig) -> int:
    """Features of a tile, P; a picture of one tile takes so many tokens in the decoder's row.

    Raises:
        ConfigError: pictures of any size have no such number; or what :func:`check` refuses.
    """
    check(config)
    vision, connector = config.vision, config.connector
    if vision.packed:
        raise ConfigError(
            "config.model.vision.packed=True: how many tokens a picture takes depends on its size"
        )
    if connector.relevance.budget:
        return connector.relevance.budget
    side = vision.image_size // vision.patch_size
    return (side // connector.merge) ** 2 + vision.keep_class_token


class Stream(NamedTuple):
    """What flows between :meth:`VLM.pre`, :meth:`VLM.blocks` and :meth:`VLM.post`."""

    x: Any
    """[B, T, D] residual stream."""
    positions: Any
    """i32[B, R, T]."""
    mask: Mask
    kv: KVCache | None = None
    length: Any = None
    """i32[]: tokens in ``kv``."""
    routed: Routed | None = None
    """How experts were chosen, layer by layer."""
    deep: Any = None
    """[K, B, T, D]: what DeepStack adds behind the decoder's first K blocks."""
    noise: Any = None
    """u32[B, 2]: as ``Batch.noise``."""


def _encode(
    vision: ViT,
    config: ModelConfig,
    pixels: jax.Array,
    grid: jax.Array | None = None,
    noise: jax.Array | None = None,
) -> jax.Array:
    x = normalised(pixels, config.vision)
    with jax.named_scope("vision"):
        return vision(x.astype(DTYPES[config.dtype]), grid, noise)


def _features(vision: ViT, config: ModelConfig, batch: Batch) -> jax.Array | None:
    """[B * I, P, D] of pictures of one size, [B, P, D] of packed patches; see `tower_width`."""
    if batch.patches is not None:
        return _encode(vision, config, batch.patches, batch.grid, batch.noise)
    if batch.pixels is None:
        return None
    pixels = batch.pixels.reshape(-1, *batch.pixels.shape[2:])
    made = _encode(vision, config, pixels, noise=batch.noise)
    if not config.connector.relevance.budget:
        return made
    # Beside the tokens, so that whoever keeps or sends them needs no pixels.
    seen = texture(pixels, config.vision.patch_size).astype(made.dtype)
    class_token = made.shape[1] - seen.shape[1]  # a trunk keeps it, and it has no texture
    seen = jnp.pad(seen, ((0, 0), (class_token, 0), (0, 0)))
    return _laid(jnp.concatenate([made, seen], axis=-1), tower_order(config))


def encoded(vision: ViT, config: ModelConfig, batch: Batch) -> jax.Array | None:
    """``Batch.features`` of a batch; ``None`` where it has no pictures."""
    made = _features(vision, config, batch)
    if made is None or batch.pixels is None:
        return made
    return made.reshape(*batch.pixels.shape[:2], *made.shape[1:])


def _above(
    top: Top,
    config: ModelConfig,
    features: jax.Array,
    grid: jax.Array | None = None,
    noise: jax.Array | None = None,
) -> jax.Array:
    """What the tower would make without a trunk, of its trunk's features."""
    own = config.vision.width * len(tower_blocks(config.vision))
    with jax.named_scope("top"):
        made = top(features[..., :own], grid, noise)
    if features.shape[-1] == own:
        return made
    return _laid(jnp.concatenate([made, features[:, -made.shape[1] :, own:]], axis=-1), MORTON)


def _laid(x: jax.Array, order: Order) -> jax.Array:
    """Tokens [B, P, D] of square pictures, row by row, in an order."""
    side = round(x.shape[1] ** 0.5)
    return x if order == ROW_MAJOR else convert(x, ROW_MAJOR, order, side, side)


def tower_order(config: ModelConfig) -> Order:
    """How a picture's patches lie in ``Batch.features``, behind a class token where there is one.

    Where relevance pools them it is Morton's, so that who keeps tokens keeps them as they are read;
    of a trunk it is that of the blocks behind it.
    """
    if config.vision.packed:
        return tiled(config.vision.block)
    pooled = config.connector.relevance.budget > 0 and not config.vision.trunk
    return MORTON if pooled else ROW_MAJOR


def tower_width(config: ModelConfig) -> int:
    """D of ``Batch.features``: of the tower, or its trunk, all that lies side by side; and the
    texture where relevance reads it.
    """
    own = config.vision.width * len(tower_blocks(config.vision))
    return own + CHANNELS * (config.connector.relevance.budget > 0)


def tower_tokens(config: ModelConfig) -> int:
    """P of ``Batch.features`` of a picture of one size, or of a tile."""
    vision = config.vision
    first = vision.class_token if vision.trunk else vision.keep_class_token
    return num_patches(vision) + first


class VLM(nnx.Module):
    """``post(blocks(pre(batch)))``: cut where a pipeline may cut it.

    Args:
        init: source of parameters.
        axes: mesh and rules by tower: keys ``vision``, ``top``, ``connector``, ``decoder``.
        config: dims and variants.
    """

    def __init__(self, init: Init, axes: dict[str, Axes], config: ModelConfig):
        if config.dtype not in DTYPES:
            raise ConfigError(f"config.model.dtype={config.dtype!r}; known: {', '.join(DTYPES)}")
        check_backend(config.attention)
        check(config)
        self.config, self.axes = config, axes["decoder"]
        self.vision = ViT(init, axes["vision"], config.vision, config.attention)
        trunk = config.vision.trunk > 0
        self.top = Top(init, axes["top"], config.vision, config.attention) if trunk else None
        taps = max(1, len(config.vision.feature_layers))
        widths = (taps * config.vision.width, config.decoder.width)
        self.connector = Connector(init, axes["connector"], config.connector, *widths)
        self.decoder = Decoder(init, axes["decoder"], config.decoder, config.attention)

    def __call__(self, batch: Batch) -> Out:
        """The forward pass over a batch."""
        return self.post(self.blocks(self.pre(batch)))

    def encode(self, pixels: jax.Array, grid: jax.Array | None = None) -> jax.Array:
        """The tower alone, before the connector.

        Args:
            pixels: values in 0..255, [B, H, W, 3] or packed patches [B, P, patch_dim].
            grid: i32[B, I, 3] (t, h, w) of the pictures in each row of packed patches.

        Returns:
            [B, P, D_vision].
        """
        made = _encode(self.vision, self.config, pixels, grid)
        return made if self.top is None else _above(self.top, self.config, made, grid)

    def pre(self, batch: Batch) -> Stream:
        """Embeddings with the pictures' tokens at their places."""
        x = self.decoder.embed(batch.tokens, DTYPES[self.config.dtype])
        tokens, deep = self._tokens(batch), None
        if tokens is not None:
            packed, asks = self.config.vision.packed, self.config.connector.relevance
            with jax.named_scope("connector"):
                asked = asks.budget > 0 and asks.query
                query = relevance.question(x, batch, asks.budget) if asked else None
                visual = self.connector(tokens, packed, query)
                levels = self.connector.deep(tokens, packed) if self.connector.levels else None
            count = visual.shape[1]
            B, _, D = x.shape
            visual, source = visual.reshape(B, -1, D), batch.image_source
            if source is not None:
                index = token_places(source[..., 0], visual.shape[1])
            elif packed:
                index = token_index(batch.grid, batch.image_start, count, self.config.vision.block)
            else:
                index = image_places(batch.image_start, count, x.shape[1])
            if batch.image_weight is not None:
                x = mix_tokens(x, visual, source, batch.image_weight)
            else:
                x = place_tokens(x, visual, index)
            if self.connector.newline is not None:
                if source is None:
                    raise ValueError("connector.newline=True takes batches with image_source")
                end = self.connector.newline[...].astype(x.dtype)
                x = jnp.where(source[..., :1] == NEWLINE, end, x)
            if levels is not None:
                levels, nothing = levels.reshape(len(levels), B, -1, D), jnp.zeros_like(x)
                deep = jnp.stack([place_tokens(nothing, level, index) for level in levels])
        x = shard(self.axes, x, "batch", "stream", "embed")
        return Stream(x, batch.positions, batch_mask(batch), deep=deep, noise=batch.noise)

    def _tokens(self, batch: Batch) -> jax.Array | None:
        given = batch.features
        if given is None:
            given = _features(self.vision, self.config, batch)
        elif not self.config.vision.packed:
            given = given.reshape(-1, *given.shape[2:])
        if given is None or self.top is None:
            return given
        return _above(self.top, self.config, given, batch.grid, batch.noise)

    def blocks(self, stream: Stream, first: jax.Array | None = None) -> Stream:
        """Through the decoder's layers; with ``first``, through those that are here."""
        with jax.named_scope("decoder"):
            x, side = self.decoder(
                stream.x,
                stream.positions,
                stream.mask,
                stream.kv,
                stream.length,
                stream.deep,
                first,
                stream.noise,
            )
        return stream._replace(x=x, kv=side.kv, routed=side.routed, deep=None)

    def post(self, stream: Stream) -> Out:
        """The final norm; the loss applies the head."""
        return self.decoder.out(stream.x, stream.routed)
