"""The vision encoder: a pre-norm ViT."""

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
    feature_blocks,
    refuse_unread,
    tower_blocks,
)
from jaxvlm.models.grid import AXES, Places, places, resample, rope2d, windows
from jaxvlm.models.pool import AttentionPool
from jaxvlm.models.stem import STEMS
from jaxvlm.nn.attention import Context
from jaxvlm.nn.dropout import check_rate, fold
from jaxvlm.nn.mask import Mask
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.norm import NORMS, LayerNorm
from jaxvlm.nn.param import Init, normal, param
from jaxvlm.nn.spec import BlockSpec
from jaxvlm.nn.stack import Local, Stack
from jaxvlm.parallel.rules import Axes, shard

BLOCKS = "vision/stack/"
"""Parameters of a tower that are a layer each; those behind a trunk are in ``top/stack/``."""
ABOVE_TRUNK = ("vision/norm/", "vision/head/")
"""Those that lie behind the last block; with a trunk in ``top/``."""


class ViT(nnx.Module):
    """Pictures of one fixed size, or packed patches of any, to visual tokens.

    With ``config.trunk`` it is the trunk alone, and :class:`Top` makes visual tokens of its output.

    Args:
        init: source of parameters.
        axes: mesh and rules of this tower.
        config: dims and variants.
        attention: backend name.
    """

    def __init__(self, init: Init, axes: Axes, config: VisionConfig, attention: str):
        check(config)
        D, P = config.width, num_patches(config)
        self.axes, self.config = axes, config
        self.stem = STEMS[config.stem](init, config)
        self.class_token = (
            param(init, (D,), ("norm",), normal(0.02)) if config.class_token else None
        )
        tokens = P + config.class_token
        learned = config.position == "learned"
        self.position = (
            param(init, (tokens, D), ("position", "embed"), normal(0.02)) if learned else None
        )
        self.pre_norm = LayerNorm(init, D, config.norm_eps) if config.pre_norm else None
        spec, depth = block_spec(config, attention), config.trunk or config.depth
        self.stack = Stack(init, axes, spec, depth, config.remat)
        self.norm, self.head = (None, None) if config.trunk else _ends(init, axes, config, spec)

    def __call__(
        self, x: jax.Array, grid: jax.Array | None = None, noise: jax.Array | None = None
    ) -> jax.Array:
        """Visual tokens of normalised pictures.

        Args:
            x: [B, H, W, 3], about unit variance, in the compute dtype; or packed patches
                [B, P, patch_dim], with their ``grid``.
            grid: i32[B, I, 3] (t, h, w) of each picture in a row; zeros where there is none.
            noise: u32[n, 2] of the batch's n rows, which have as many pictures each; ``None``:
                nothing is dropped. A trunk drops nothing.

        Returns:
            [B, P, D], a row of tokens a picture or a row of packed patches. The class token is
            dropped unless it is kept, and lies first then; several feature layers lie side by
            side in D. Of a trunk: all tokens, and the streams of ``tower_blocks`` side by side.

        Raises:
            ValueError: a grid for fixed pictures, or none for packed patches.
        """
        at = _places(self.config, x, grid)
        taps = tower_blocks(self.config)
        noise = None if self.config.trunk else noise
        seen = _through(self.stack, self.config, self._embed(x, at), at, taps, noise=noise)
        return _beside(seen, taps) if self.config.trunk else _tokens(seen, self.config, self.norm)

    def pooled(
        self, x: jax.Array, grid: jax.Array | None = None, noise: jax.Array | None = None
    ) -> jax.Array:
        """One vector a picture, from the tower's last output.

        Args:
            x: as for :meth:`__call__`.
            grid: as there.
            noise: as there.

        Returns:
            [B, D], or [B, I, D] of the pictures in each row of packed patches; what stands
            where there is no picture means nothing.

        Raises:
            ValueError: the tower has no ``pool``.
        """
        depth, at = self.config.depth, _places(self.config, x, grid)
        x = self._embed(x, at)
        x = _through(self.stack, self.config, x, at, (depth,), noise=noise)[depth]
        if self.config.pool == "class" and self.norm is not None:
            return self.norm(x[:, 0])
        if self.head is None or self.norm is None:
            raise ValueError("config.model.vision.pool='none': this tower makes tokens alone")
        x = self.norm(x)
        if at is None or grid is None:
            return self.head(x, Mask(), 1)[:, 0]
        # Of a picture's frames together: numbered by the picture, not by the frame.
        number = jnp.broadcast_to(jnp.arange(1, grid.shape[1] + 1), grid.shape[:2])
        return self.head(x, Mask(q_segment=number, k_segment=at.picture), grid.shape[1])

    def _embed(self, x: jax.Array, at: Places | None) -> jax.Array:
        """[B, P, D] before the first block, the class token first if there is one."""
        x = self.stem(x)
        x = shard(self.axes, x, "batch", "stream", "embed")
        if self.class_token is not None:
            token = jnp.broadcast_to(
                self.class_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2])
            )
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


class Top(nnx.Module):
    """The blocks behind a tower's trunk: what it gives, to visual tokens.

    Args:
        init: source of parameters.
        axes: mesh and rules of the tower.
        config: of the tower, with its ``trunk``.
        attention: backend name.
    """

    def __init__(self, init: Init, axes: Axes, config: VisionConfig, attention: str):
        self.axes, self.config = axes, config
        spec = block_spec(config, attention)
        self.stack = Stack(init, axes, spec, config.depth - config.trunk, config.remat)
        self.norm, self.head = _ends(init, axes, config, spec)

    def __call__(
        self, x: jax.Array, grid: jax.Array | None = None, noise: jax.Array | None = None
    ) -> jax.Array:
        """Visual tokens.

        Args:
            x: what the trunk, a :class:`ViT`, gives.
            grid: as it was given.
            noise: likewise, to a tower without a trunk.

        Returns:
            As a :class:`ViT` without a trunk does.

        Raises:
            ValueError: a grid for fixed pictures, or none for packed patches.
        """
        config, given = self.config, tower_blocks(self.config)
        x = shard(self.axes, x, "batch", "stream", "embed")
        seen = dict(zip(given, jnp.split(x, len(given), axis=-1)))
        at, begin = _places(config, x, grid), config.trunk
        taps = tuple(n for n in feature_blocks(config) if n > begin)
        seen |= _through(self.stack, config, seen[begin], at, taps, begin, noise)
        return _tokens(seen, config, self.norm)


class Tower(nnx.Module):
    """The vision tower of a model by itself, or its trunk; parameters at the same paths.

    Args:
        init: source of parameters.
        axes: mesh and rules of the tower.
        config: of the whole model.
        encode: (tower, config, batch) -> ``Batch.features``, or ``None`` without pictures.
    """

    def __init__(self, init: Init, axes: Axes, config: Any, encode: Callable[..., Any]):
        self.config, self.encode = config, encode
        self.vision = ViT(init, axes, config.vision, config.attention)

    def __call__(self, batch: Any) -> jax.Array | None:
        """``Batch.features`` of a batch."""
        return self.encode(self.vision, self.config, batch)


def _ends(
    init: Init, axes: Axes, config: VisionConfig, spec: BlockSpec
) -> tuple[LayerNorm | None, AttentionPool | None]:
    """What lies behind the last block. Like the blocks behind feature_layer, what is not used is
    kept for export.
    """
    norm = LayerNorm(init, config.width, config.norm_eps) if config.post_norm else None
    return norm, AttentionPool(init, axes, spec) if config.pool == "attention" else None


def _through(
    stack: Stack,
    config: VisionConfig,
    x: jax.Array,
    at: Places | None,
    taps: tuple[int, ...],
    begin: int = 0,
    noise: jax.Array | None = None,
) -> dict[int, jax.Array]:
    """The stream behind the tower's first n blocks, for each n of ``taps``.

    Args:
        stack: the tower's blocks, those before ``begin`` left out.
        config: of the tower.
        x: [B, P, D], behind the first ``begin`` blocks.
        at: of packed patches.
        taps: ``begin`` at least.
        begin: how many blocks ``x`` has been through.
        noise: of the batch's rows; ``None``: nothing is dropped.
    """
    context, local = _contexts(config, at)
    noise = fold(noise, "vision") if config.dropout else None
    context = context._replace(noise=noise)
    if local is not None:
        local = Local(local.context._replace(noise=noise), local.pattern[begin:])
    run, seen = stack.within(context, local), dict[int, jax.Array]()
    # A scan over all blocks would keep every layer's output; this one is cut at the taps.
    for first, last in itertools.pairwise([begin, *sorted(set(taps))]):
        if last > first:
            skip = begin + stack.depth - last
            x, _ = run(x, skip_first=first - begin, skip_last=skip)
        seen[last] = x
    return seen


def _contexts(config: VisionConfig, at: Places | None) -> tuple[Context, Local | None]:
    """What all blocks share, and what those that see a window share."""
    if at is None:
        return Context(Mask()), None
    theta, head_dim = config.rope_theta, config.width // config.num_heads
    rope = rope2d(at, head_dim, theta) if theta else None
    context = Context(Mask(q_segment=at.segment, k_segment=at.segment), rope)
    if not config.window:
        return context, None
    near = windows(at, config.window // config.patch_size)
    pattern = tuple(i not in config.full_layers for i in range(config.depth))
    return context, Local(Context(Mask(q_segment=near, k_segment=near), rope), pattern)


def _places(config: VisionConfig, x: jax.Array, grid: jax.Array | None) -> Places | None:
    if (grid is not None) != config.packed:
        raise ValueError("a grid goes with packed patches, and only with them")
    return None if grid is None else places(grid, x.shape[1], config.block)


def _tokens(seen: dict[int, jax.Array], config: VisionConfig, norm: LayerNorm | None) -> jax.Array:
    """Visual tokens from the streams that they are made of."""
    if norm is not None and config.final_norm and config.depth in seen:
        seen[config.depth] = norm(seen[config.depth])
    x = _beside(seen, feature_blocks(config))
    return x[:, 1:] if config.class_token and not config.keep_class_token else x


def _beside(seen: dict[int, jax.Array], taps: tuple[int, ...]) -> jax.Array:
    return jnp.concatenate([seen[n] for n in taps], axis=-1) if len(taps) > 1 else seen[taps[0]]


def block_spec(config: VisionConfig, attention: str) -> BlockSpec:
    """The tower's block."""
    return BlockSpec(
        width=config.width,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.width // config.num_heads,
        mlp_dim=config.mlp_dim,
        norm=config.norm,
        norm_eps=config.norm_eps,
        activation=config.activation,
        gated=config.gated,
        qkv_bias=config.qkv_bias,
        out_bias=True,
        mlp_bias=True,
        qk_norm_all=config.qk_norm_all,
        layer_scale=config.layer_scale,
        dropout=config.dropout,
        attention=attention,
    )


def per_value(channels: tuple[float, float, float], config: VisionConfig) -> np.ndarray:
    """f32[3] for pictures, f32[patch_dim] for packed patches: a number a channel, value by value.

    Args:
        channels: red, green, blue.
        config: says how a patch lies.
    """
    if not config.packed:
        return np.asarray(channels, np.float32)
    count = config.frames * config.patch_size**2
    lay = np.tile if config.patch_layout == "hwc" else np.repeat
    return lay(np.asarray(channels, np.float32), count)


def normalised(pixels: jax.Array, config: VisionConfig) -> jax.Array:
    """What the tower takes of pixels.

    Args:
        pixels: values in 0..255, [..., 3] or packed patches [..., patch_dim].
        config: of the tower.

    Returns:
        f32 of the same shape, about unit variance.
    """
    mean = 255.0 * per_value(config.pixel_mean, config)
    return (pixels.astype(jnp.float32) - mean) / (255.0 * per_value(config.pixel_std, config))


def num_patches(config: VisionConfig) -> int:
    """P: patches a picture, or places of the position table of a packed tower."""
    return (config.image_size // config.patch_size) ** 2


def check(config: VisionConfig, where: str = "config.model.vision") -> None:
    """Refuse dims that do not fit each other.

    Args:
        config: of the tower.
        where: what error messages call it.

    Raises:
        ConfigError: which field, and what would do.
    """
    for field, known in _KNOWN.items():
        if getattr(config, field) not in known:
            said = f"{field}={getattr(config, field)!r}"
            raise ConfigError(f"{where}.{said}; known: {', '.join(known)}")
    refuse_unread(config, where)
    check_rate(config.dropout, f"{where}.dropout")
    if config.image_size % config.patch_size and not (config.crop_rest and config.stem == "linear"):
        raise ConfigError(
            f"{where}.image_size={config.image_size} is not a multiple of "
            f"patch_size={config.patch_size}"
        )
    if config.depth < 1:
        raise ConfigError(f"{where}.depth={config.depth}: at least 1 layer")
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
    if config.trunk and not 0 < config.trunk < run:
        raise ConfigError(
            f"{where}.trunk={config.trunk}: the trunk has a block, and one behind it is run; "
            f"{run} of {config.depth} are on the way to visual tokens"
        )
    if config.stem == "conv" and not config.patch_bias:
        raise ConfigError(f"{where}.patch_bias=False has no meaning for stem='conv'")
    if config.stem == "conv" and (config.patch_size < 2 or config.patch_size.bit_count() > 1):
        raise ConfigError(
            f"{where}.patch_size={config.patch_size}: stem='conv' halves the picture at each step, "
            "so it must be a power of two, at least 2"
        )
    if config.pool == "class" and not config.class_token:
        raise ConfigError(f"{where}.pool='class' without class_token")
    if config.pool != "none" and not config.post_norm:
        raise ConfigError(f"{where}.pool={config.pool!r} without post_norm")
    _check_packed(config, where)


def _check_packed(config: VisionConfig, where: str) -> None:
    """The half of :func:`check` about packed patches."""
    if config.packed:
        if config.stem == "conv" or config.position == "sincos2d" or config.class_token:
            raise ConfigError(
                f"{where}.packed=True takes stem='linear', position='learned' or 'none', and no "
                "class token"
            )
        side = config.patch_size * config.block
        if config.block < 1 or config.window % side:
            raise ConfigError(
                f"{where}.window={config.window} is not a multiple of patch_size x block = {side}"
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
"""Field -> the words that it may be."""


def sincos2d(config: VisionConfig) -> np.ndarray:
    """f32[P, D] fixed 2-D positions, half the width a direction (MoCo v3, arXiv 2104.02057)."""
    side, quarter = config.image_size // config.patch_size, config.width // 4
    omega = 10_000.0 ** -(np.arange(quarter) / quarter)
    y, x = np.mgrid[:side, :side].reshape(2, -1, 1) * omega
    parts = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
    return np.concatenate(parts, axis=1).astype(np.float32)
