"""A vision-language model: ViT, connector, decoder."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.models.connector import Connector
from jaxvlm.models.decoder import Decoder
from jaxvlm.models.grid import token_index
from jaxvlm.models.vit import ViT
from jaxvlm.nn.embed import place_images, place_tokens
from jaxvlm.nn.kernels import check_backend
from jaxvlm.nn.kv import KVCache
from jaxvlm.nn.mask import Mask, batch_mask
from jaxvlm.nn.param import Init
from jaxvlm.parallel.rules import Axes, shard
from jaxvlm.types import Batch, Out

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def num_visual_tokens(config: ModelConfig) -> int:
    """Tokens that a picture of the one fixed size takes in the decoder's row.

    Raises:
        ConfigError: tower and connector do not fit each other.
    """
    vision, connector = config.vision, config.connector
    side, merge = vision.image_size // vision.patch_size, connector.merge
    if merge < 1 or side % merge:
        raise ConfigError(
            f"config.model.connector.merge={merge} does not divide the {side} x {side} patches "
            "of a picture"
        )
    _check_connector(config)
    return (side // merge) ** 2 + vision.keep_class_token + connector.newline


def _check_connector(config: ModelConfig) -> None:
    """Refuse a connector that does not fit the towers beside it."""
    vision, connector = config.vision, config.connector
    merge, levels = connector.merge, connector.levels
    problem = ""
    if vision.packed and merge != vision.block:
        problem = f"merge={merge} is not config.model.vision.block={vision.block}"
    elif vision.packed and connector.newline:
        problem = "newline=True takes pictures of one size"
    elif vision.keep_class_token and merge > 1:
        problem = f"merge={merge} takes patches alone, without the class token"
    elif levels and not vision.packed:
        problem = f"levels={levels} takes packed patches"
    elif levels and levels + 1 != len(vision.feature_layers):
        count = len(vision.feature_layers)
        problem = f"levels={levels} takes one more of vision.feature_layers, not {count}"
    elif levels > config.decoder.depth:
        problem = f"levels={levels} is more than the decoder's {config.decoder.depth} layers"
    if problem:
        raise ConfigError(f"config.model.connector.{problem}")


class Stream(NamedTuple):
    """What flows between :meth:`VLM.pre`, :meth:`VLM.blocks` and :meth:`VLM.post`."""

    x: Any
    """[B, T, D] residual stream."""
    positions: Any
    """i32[B, 1, T]."""
    mask: Mask
    kv: KVCache | None = None
    length: Any = None
    """i32[]: tokens in ``kv``."""
    deep: Any = None
    """[K, B, T, D]: what DeepStack adds behind the decoder's first K blocks."""


class VLM(nnx.Module):
    """``post(blocks(pre(batch)))``: cut where a pipeline may cut it.

    Args:
        init: source of parameters.
        axes: mesh and rules by tower: keys ``vision``, ``connector``, ``decoder``.
        config: dims and variants.
    """

    def __init__(self, init: Init, axes: dict[str, Axes], config: ModelConfig):
        if config.dtype not in DTYPES:
            raise ConfigError(f"config.model.dtype={config.dtype!r}; known: {', '.join(DTYPES)}")
        check_backend(config.attention)
        num_visual_tokens(config)  # refuses a merge that does not fit
        self.config, self.axes = config, axes["decoder"]
        self.vision = ViT(init, axes["vision"], config.vision, config.attention)
        taps = max(1, len(config.vision.feature_layers))
        widths = (taps * config.vision.width, config.decoder.width)
        self.connector = Connector(init, axes["connector"], config.connector, *widths)
        self.decoder = Decoder(init, axes["decoder"], config.decoder, config.attention)

    def __call__(self, batch: Batch) -> Out:
        """The forward pass over a batch."""
        return self.post(self.blocks(self.pre(batch)))

    def encode(self, pixels: jax.Array) -> jax.Array:
        """u8[B, H, W, 3] -> [B, P, D_vision]: the tower alone, before the connector."""
        dtype = DTYPES[self.config.dtype]
        mean = 255.0 * np.asarray(self.config.vision.pixel_mean, np.float32)
        scale = 255.0 * np.asarray(self.config.vision.pixel_std, np.float32)
        x = (pixels.astype(jnp.float32) - mean) / scale
        with jax.named_scope("vision"):
            return self.vision(x.astype(dtype))

    def pre(self, batch: Batch) -> Stream:
        """Embeddings with the pictures' tokens at their places."""
        x = self.decoder.embed(batch.tokens, DTYPES[self.config.dtype])
        features, deep = batch.features, None
        if features is None and batch.pixels is not None:
            B, num_images = batch.pixels.shape[:2]
            tokens = self.encode(batch.pixels.reshape(B * num_images, *batch.pixels.shape[2:]))
            features = tokens.reshape(B, num_images, *tokens.shape[1:])
        if features is None and batch.patches is not None:
            x, deep = self._place_packed(x, batch)
        elif features is not None:
            flat = features.reshape(-1, *features.shape[2:])
            with jax.named_scope("connector"):
                visual = self.connector(flat)
            visual = visual.reshape(*features.shape[:2], *visual.shape[1:])
            x = place_images(x, visual, batch.image_start)
        x = shard(self.axes, x, "batch", "seq", "embed")
        return Stream(x, batch.positions, batch_mask(batch), deep=deep)

    def _place_packed(self, x: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array | None]:
        """[B, T, D] with the visual tokens of packed patches at their places; DeepStack's too."""
        with jax.named_scope("vision"):
            tokens = self.vision(batch.patches.astype(x.dtype), batch.grid)
        with jax.named_scope("connector"):
            visual = self.connector(tokens, blocks=True)
            levels = self.connector.deep(tokens, blocks=True) if self.connector.levels else None
        block = self.config.vision.block
        index = token_index(batch.grid, batch.image_start, visual.shape[1], block)
        if levels is not None:
            nothing = jnp.zeros_like(x)
            levels = jnp.stack([place_tokens(nothing, level, index) for level in levels])
        return place_tokens(x, visual, index), levels

    def blocks(self, stream: Stream) -> Stream:
        """Through the decoder's layers."""
        with jax.named_scope("decoder"):
            x, kv = self.decoder(
                stream.x, stream.positions, stream.mask, stream.kv, stream.length, stream.deep
            )
        return stream._replace(x=x, kv=kv, deep=None)

    def post(self, stream: Stream) -> Out:
        """The final norm; the loss applies the head."""
        return self.decoder.out(stream.x)
