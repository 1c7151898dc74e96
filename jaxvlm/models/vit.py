"""Vision encoder: a pre-norm ViT, of images of one size or of packed patches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvlm.config import (
    ConfigError,
    VisionConfig,
    check_choice,
    encoder_blocks,
    feature_blocks,
    refuse_unread,
)
from jaxvlm.models.attention_pool import AttentionPool
from jaxvlm.models.grid import AXES, Places, places, resample, rope2d, window_order, windows
from jaxvlm.models.stem import STEMS
from jaxvlm.nn.attention import Context
from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.dropout import check_rate, fold
from jaxvlm.nn.mask import Mask, segment_mask
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.norm import NORMS, LayerNorm
from jaxvlm.nn.param import Init, normal, param
from jaxvlm.nn.stack import Local, Stack
from jaxvlm.parallel.rules import Axes, shard

BLOCKS = "vision/stack/"
"""Prefix of parameters with a dim of layers; those above frozen blocks are at
``vision_top/stack/``."""
ABOVE_FROZEN = ("vision/norm/", "vision/head/")
"""Prefixes of parameters after the last block; with frozen blocks they are at ``vision_top/``."""


class ViT(nnx.Module):
    """Encodes images of one fixed size, or packed patches of images of any size, as visual tokens.

    With ``config.frozen_blocks`` it has the frozen blocks only, and :class:`VisionTop` computes
    visual tokens from its output.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules of the vision encoder.
        config: dims and variants.
        attention: attention backend.
    """

    def __init__(self, init: Init, axes: Axes, config: VisionConfig, attention: str):
        check(config)
        D, P = config.width, num_patches(config)
        self.axes, self.config = axes, config
        self.stem = STEMS[config.stem](init, config)
        draw, words, learned = normal(0.02), ("position", "embed"), config.position == "learned"
        self.class_token = param(init, (D,), ("norm",), draw) if config.class_token else None
        tokens = P + config.class_token
        self.position = param(init, (tokens, D), words, draw) if learned else None
        self.pre_norm = LayerNorm(init, D, config.norm_eps) if config.pre_norm else None
        spec, depth = block_spec(config, attention), config.frozen_blocks or config.depth
        self.stack = Stack(init, axes, spec, depth, config.remat)
        none = (None, None)  # the layers above frozen blocks have the final ones
        final = none if config.frozen_blocks else _final_layers(init, axes, config, spec)
        self.norm, self.head = final

    def __call__(
        self, x: jax.Array, grid: jax.Array | None = None, dropout_keys: jax.Array | None = None
    ) -> jax.Array:
        """Encode normalized images.

        Args:
            x: [B, H, W, 3], about unit variance, in the compute dtype; or packed patches
                [B, P, patch_dim], with their ``grid``.
            grid: i32[B, I, 3] (t, h, w) of each image in a packed sequence; zeros in unused slots.
            dropout_keys: u32[n, 2], a key for each of the batch's n sequences, which have the same
                number of images; ``None``: no dropout. Frozen blocks have no dropout.

        Returns:
            [B, P, D], one sequence of tokens per image, or per packed sequence. The class token
            comes first if ``keep_class_token``, and is removed otherwise. Several feature layers
            are concatenated in D. With ``frozen_blocks``: all tokens, and the hidden states after
            each of ``encoder_blocks(config)``, concatenated in D.

        Raises:
            ValueError: a grid for images of fixed size, or none for packed patches.
        """
        at = _places(self.config, x, grid)
        taps = encoder_blocks(self.config)
        dropout_keys = None if self.config.frozen_blocks else dropout_keys
        x = self._embed(x, at)
        hidden = _run_blocks(self.stack, self.config, x, at, taps, dropout_keys=dropout_keys)
        if self.config.frozen_blocks:
            return _concatenate(hidden, taps)
        return _tokens(hidden, self.config, self.norm)

    def pooled(
        self, x: jax.Array, grid: jax.Array | None = None, dropout_keys: jax.Array | None = None
    ) -> jax.Array:
        """Compute one embedding per image from the hidden states after the last block.

        Args:
            x: as for :meth:`__call__`.
            grid: as for :meth:`__call__`.
            dropout_keys: as for :meth:`__call__`.

        Returns:
            [B, D], or [B, I, D] for the images of packed sequences; undefined for unused slots.

        Raises:
            ValueError: the vision encoder has no ``pool``.
        """
        depth, at = self.config.depth, _places(self.config, x, grid)
        x = self._embed(x, at)
        x = _run_blocks(self.stack, self.config, x, at, (depth,), dropout_keys=dropout_keys)[depth]
        if self.config.pool == "class" and self.norm is not None:
            return self.norm(x[:, 0])
        if self.head is None or self.norm is None:
            raise ValueError(
                "config.model.vision.pool='none': this vision encoder computes tokens only, no "
                "embedding"
            )
        x = self.norm(x)
        if at is None or grid is None:
            return self.head(x, Mask(), 1)[:, 0]
        # All frames of an image are pooled together: segments are images, not frames.
        number = jnp.broadcast_to(jnp.arange(1, grid.shape[1] + 1), grid.shape[:2])
        return self.head(x, Mask(q_segment=number, k_segment=at.image), grid.shape[1])

    def _embed(self, x: jax.Array, at: Places | None) -> jax.Array:
        """Compute the first block's input [B, P, D], with the class token first if there is one."""
        x = self.stem(x)
        x = shard(self.axes, x, "batch", "stream", "embed")
        if self.class_token is not None:
            token = self.class_token[...].astype(x.dtype)
            token = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([token, x], axis=1)
        x = self._add_position(x, at)
        return x if self.pre_norm is None else self.pre_norm(x)

    def _add_position(self, x: jax.Array, at: Places | None) -> jax.Array:
        if self.position is not None:
            table = self.position[...]
            table = table if at is None else resample(table, at, self.config.position_resize)
            return x + table.astype(x.dtype)
        if self.config.position == "sincos2d":
            x = x + jnp.asarray(sincos2d(self.config), x.dtype)
        return x


class VisionTop(nnx.Module):
    """The vision encoder's blocks above its frozen blocks, which compute visual tokens.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules of these blocks.
        config: settings of the whole vision encoder, with ``frozen_blocks``.
        attention: attention backend.
    """

    def __init__(self, init: Init, axes: Axes, config: VisionConfig, attention: str):
        self.axes, self.config = axes, config
        spec = block_spec(config, attention)
        self.stack = Stack(init, axes, spec, config.depth - config.frozen_blocks, config.remat)
        self.norm, self.head = _final_layers(init, axes, config, spec)

    def __call__(
        self, x: jax.Array, grid: jax.Array | None = None, dropout_keys: jax.Array | None = None
    ) -> jax.Array:
        """Compute visual tokens from the output of the frozen blocks.

        Args:
            x: output of the :class:`ViT` with the frozen blocks.
            grid: the ``grid`` of that call.
            dropout_keys: as for a :class:`ViT` without frozen blocks.

        Returns:
            Visual tokens, as from a :class:`ViT` without frozen blocks.

        Raises:
            ValueError: a grid for images of fixed size, or none for packed patches.
        """
        config, given = self.config, encoder_blocks(self.config)
        x = shard(self.axes, x, "batch", "stream", "embed")
        hidden = dict(zip(given, jnp.split(x, len(given), axis=-1)))
        at, begin = _places(config, x, grid), config.frozen_blocks
        taps = tuple(n for n in feature_blocks(config) if n > begin)
        hidden |= _run_blocks(self.stack, config, hidden[begin], at, taps, begin, dropout_keys)
        return _tokens(hidden, config, self.norm)


class VisionEncoder(nnx.Module):
    """A model's vision encoder (or its frozen blocks) on its own, with the same parameter paths.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules of the vision encoder.
        config: settings of the whole model.
        encode: (ViT, config, batch) -> ``Batch.features``, or ``None`` without images.
    """

    def __init__(self, init: Init, axes: Axes, config: Any, encode: Callable[..., Any]):
        self.config, self.encode = config, encode
        self.vision = ViT(init, axes, config.vision, config.attention)

    def __call__(self, batch: Any) -> jax.Array | None:
        """Compute ``Batch.features`` of a batch; ``None`` without images."""
        return self.encode(self.vision, self.config, batch)


def _final_layers(
    init: Init, axes: Axes, config: VisionConfig, spec: BlockSpec
) -> tuple[LayerNorm | None, AttentionPool | None]:
    """Create the layers after the last block.

    Layers that are not used, as blocks after ``feature_layer``, exist so that they are exported.
    """
    norm = LayerNorm(init, config.width, config.norm_eps) if config.post_norm else None
    return norm, AttentionPool(init, axes, spec) if config.pool == "attention" else None


def _run_blocks(
    stack: Stack,
    config: VisionConfig,
    x: jax.Array,
    at: Places | None,
    taps: tuple[int, ...],
    begin: int = 0,
    dropout_keys: jax.Array | None = None,
) -> dict[int, jax.Array]:
    """Compute the hidden states after the vision encoder's first n blocks, for each n of ``taps``.

    Args:
        stack: the blocks, without those before ``begin``.
        config: settings of the vision encoder.
        x: [B, P, D], hidden states after the first ``begin`` blocks.
        at: rows, columns and images of packed patches.
        taps: numbers of blocks, at least ``begin``.
        begin: number of blocks that ``x`` is the output of.
        dropout_keys: u32[n, 2], a key for each of the batch's sequences; ``None``: no dropout.
    """
    order = None
    if at is not None and config.window:
        # Tokens of a window become consecutive, so that kernels can skip the others.
        order = window_order(at, config.window // config.patch_size)
        x, at = _take(x, order), jax.tree.map(lambda field: _take(field, order), at)
    context, local = _contexts(config, at)
    dropout_keys = fold(dropout_keys, "vision") if config.dropout else None
    context = context._replace(dropout_keys=dropout_keys)
    if local is not None:
        local = Local(local.context._replace(dropout_keys=dropout_keys), local.pattern[begin:])
    run, hidden = stack.within(context, local), dict[int, jax.Array]()
    # One scan over all blocks would save every layer's output; these end at the taps.
    for first, last in itertools.pairwise([begin, *sorted(set(taps))]):
        if last > first:
            skip = begin + stack.depth - last
            x, _ = run(x, skip_first=first - begin, skip_last=skip)
        hidden[last] = x
    if order is not None:
        back = jnp.argsort(order, axis=1)
        hidden = {n: _take(x, back) for n, x in hidden.items()}
    return hidden


def _take(x: jax.Array, order: jax.Array) -> jax.Array:
    """Reorder the tokens of [B, P, ...] by i32[B, P]."""
    return jnp.take_along_axis(x, order if x.ndim == 2 else order[..., None], axis=1)


def _contexts(config: VisionConfig, at: Places | None) -> tuple[Context, Local | None]:
    """Return the inputs shared by blocks with full attention and by those with windows."""
    if at is None:
        return Context(Mask()), None
    theta, head_dim = config.rope_theta, config.width // config.num_heads
    rope = rope2d(at, head_dim, theta) if theta else None
    context = Context(segment_mask(at.segment), rope)
    if not config.window:
        return context, None
    near = windows(at, config.window // config.patch_size)
    pattern = tuple(i not in config.full_layers for i in range(config.depth))
    return context, Local(Context(segment_mask(near), rope), pattern)


def _places(config: VisionConfig, x: jax.Array, grid: jax.Array | None) -> Places | None:
    if (grid is not None) != config.packed:
        raise ValueError("packed patches need a grid, and images of fixed size take none")
    return None if grid is None else places(grid, x.shape[1], config.merge_block)


def _tokens(
    hidden: dict[int, jax.Array], config: VisionConfig, norm: LayerNorm | None
) -> jax.Array:
    """Concatenate the feature layers' hidden states into visual tokens."""
    if norm is not None and config.final_norm and config.depth in hidden:
        hidden[config.depth] = norm(hidden[config.depth])
    x = _concatenate(hidden, feature_blocks(config))
    return x[:, 1:] if config.class_token and not config.keep_class_token else x


def _concatenate(hidden: dict[int, jax.Array], taps: tuple[int, ...]) -> jax.Array:
    if len(taps) == 1:
        return hidden[taps[0]]
    return jnp.concatenate([hidden[n] for n in taps], axis=-1)


def block_spec(config: VisionConfig, attention: str) -> BlockSpec:
    """Return the specification of the vision encoder's blocks."""
    return BlockSpec.of(
        config,
        num_kv_heads=config.num_heads,
        head_dim=config.width // config.num_heads,
        out_bias=True,
        mlp_bias=True,
        attention=attention,
    )


def per_value(channels: tuple[float, float, float], config: VisionConfig) -> np.ndarray:
    """Broadcast one number per channel over the values of a pixel or a packed patch.

    Args:
        channels: red, green, blue.
        config: settings of the vision encoder; ``patch_layout`` is the layout of a packed patch.

    Returns:
        f32[3] for images, f32[patch_dim] for packed patches.
    """
    if not config.packed:
        return np.asarray(channels, np.float32)
    count = config.frames * config.patch_size**2
    expand = np.tile if config.patch_layout == "hwc" else np.repeat
    return expand(np.asarray(channels, np.float32), count)


def normalised(pixels: jax.Array, config: VisionConfig) -> jax.Array:
    """Normalize pixels by the vision encoder's mean and standard deviation per channel.

    Args:
        pixels: values in 0..255, [..., 3] or packed patches [..., patch_dim].
        config: settings of the vision encoder.

    Returns:
        f32 of the same shape, about unit variance.
    """
    mean = 255.0 * per_value(config.pixel_mean, config)
    return (pixels.astype(jnp.float32) - mean) / (255.0 * per_value(config.pixel_std, config))


def num_patches(config: VisionConfig) -> int:
    """Return P: patches per image, or rows of the position table for packed patches."""
    return (config.image_size // config.patch_size) ** 2


def check(config: VisionConfig, where: str = "config.model.vision") -> None:
    """Check the settings of a vision encoder.

    Args:
        config: settings of the encoder.
        where: the settings group that error messages name.

    Raises:
        ConfigError: dims that do not fit together, an unknown value, or an unread setting.
    """
    for field, known in _KNOWN.items():
        check_choice(f"{where}.{field}", getattr(config, field), known)
    refuse_unread(config, where)
    if config.dropout:
        check_rate(config.dropout, f"{where}.dropout")
    if config.image_size % config.patch_size and not (config.crop_rest and config.stem == "linear"):
        raise ConfigError(
            f"{where}.image_size={config.image_size} is not a multiple of "
            f"patch_size={config.patch_size}"
        )
    if config.depth < 1:
        raise ConfigError(f"{where}.depth={config.depth}: at least 1 layer is needed")
    if config.width % config.num_heads:
        raise ConfigError(
            f"{where}.width={config.width} is not a multiple of num_heads={config.num_heads}"
        )
    if config.position == "sincos2d" and (config.class_token or config.width % 4):
        raise ConfigError(f"{where}.position='sincos2d' takes no class token and a width of 4n")
    for layer in (config.feature_layer, *config.feature_layers):
        if not -config.depth - 1 <= layer <= -1:
            name = "feature_layers" if config.feature_layers else "feature_layer"
            raise ConfigError(
                f"{where}.{name}={layer} counts from the end: -{config.depth + 1}..-1"
            )
    run = max(feature_blocks(config))
    if config.frozen_blocks and not 0 < config.frozen_blocks < run:
        raise ConfigError(
            f"{where}.frozen_blocks={config.frozen_blocks} must leave at least one block below and "
            f"one above: visual tokens come from the first {run} of {config.depth} blocks; 0 is off"
        )
    if config.stem == "conv" and not config.patch_bias:
        raise ConfigError(f"{where}.patch_bias=False has no meaning for stem='conv'")
    if config.stem == "conv" and (config.patch_size < 2 or config.patch_size.bit_count() > 1):
        raise ConfigError(
            f"{where}.patch_size={config.patch_size}: stem='conv' halves the image at each step, "
            "so it must be a power of two, at least 2"
        )
    if config.pool == "class" and not config.class_token:
        raise ConfigError(f"{where}.pool='class' needs {where}.class_token=True")
    if config.pool != "none" and not config.post_norm:
        raise ConfigError(f"{where}.pool={config.pool!r} needs {where}.post_norm=True")
    _check_packed(config, where)


def _check_packed(config: VisionConfig, where: str) -> None:
    """Check the settings of packed patches."""
    if config.packed:
        if config.stem == "conv" or config.position == "sincos2d" or config.class_token:
            raise ConfigError(
                f"{where}.packed=True takes stem='linear', position='learned' or 'none', and no "
                "class token"
            )
        side = config.patch_size * config.merge_block
        if config.merge_block < 1 or config.window % side:
            raise ConfigError(
                f"{where}.window={config.window} is not a multiple of patch_size x merge_block = "
                f"{side}"
            )
        head_dim = config.width // config.num_heads
        if config.rope_theta and head_dim % 4:
            raise ConfigError(f"{where}.rope_theta takes heads of 4n dims, not {head_dim}")
    if config.frames > 1 and config.patch_layout == "hwc":
        raise ConfigError(f"{where}.frames={config.frames} takes patch_layout='cthw'")
    if any(not 0 <= layer < config.depth for layer in config.full_layers):
        raise ConfigError(
            f"{where}.full_layers={config.full_layers} are not all in 0..{config.depth - 1}"
        )


_KNOWN: dict[str, Collection[str]] = {
    "stem": STEMS,
    "activation": ACTIVATIONS,
    "pool": ("none", "class", "attention"),
    "position": ("learned", "sincos2d", "none"),
    "norm": NORMS,
    "patch_layout": ("hwc", "cthw"),
    "position_resize": AXES,
}
"""Setting -> its known values."""


def sincos2d(config: VisionConfig) -> np.ndarray:
    """Return fixed 2-D sine-cosine positions f32[P, D] (MoCo v3, arXiv 2104.02057)."""
    side, quarter = config.image_size // config.patch_size, config.width // 4
    omega = 10_000.0 ** -(np.arange(quarter) / quarter)
    y, x = np.mgrid[:side, :side].reshape(2, -1, 1) * omega
    parts = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
    return np.concatenate(parts, axis=1).astype(np.float32)
