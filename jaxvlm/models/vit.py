"""The vision encoder: a pre-norm ViT."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvlm.config import ConfigError, VisionConfig
from jaxvlm.nn.attention import Context
from jaxvlm.nn.mask import Mask
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.norm import LayerNorm
from jaxvlm.nn.param import Init, contract, fan_in, normal, param, zeros
from jaxvlm.nn.stack import BlockSpec, Stack
from jaxvlm.parallel.rules import Axes, shard


class LinearStem(nnx.Module):
    """One matmul a patch: patchify is a reshape (arXiv 2010.11929)."""

    def __init__(self, init: Init, config: VisionConfig):
        inner = (config.patch_size, config.patch_size, 3)
        self.patch_size = config.patch_size
        axes = ("patch", "patch", "patch", "embed")
        self.w = param(init, (*inner, config.width), axes, fan_in(*inner))
        self.b = param(init, (config.width,), ("norm",), zeros) if config.patch_bias else None

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B, H, W, 3] -> [B, P, D], patches row by row."""
        B, H, W, C = pixels.shape
        p = self.patch_size
        x = pixels.reshape(B, H // p, p, W // p, p, C).transpose(0, 1, 3, 2, 4, 5)
        x = contract(x.reshape(B, (H // p) * (W // p), p, p, C), self.w[...], 3)
        return x if self.b is None else x + self.b[...].astype(x.dtype)


class ConvStem(nnx.Module):
    """3x3 stride-2 convolutions down to one place a patch (arXiv 2106.14881).

    Channels double from a quarter of the ViT's width up to it. Small models from scratch learn
    shapes with it that a linear patch embedding misses.
    """

    def __init__(self, init: Init, config: VisionConfig):
        steps = int(math.log2(config.patch_size))
        if config.patch_size != 2**steps or not steps:
            raise ConfigError(
                f"config.model.vision.stem='conv' halves the picture at each step: patch_size="
                f"{config.patch_size} must be a power of two, at least 2"
            )
        channels = [3, *conv_channels(config.width, steps)]
        self.activation = config.activation
        axes = ("patch", "patch", "patch", "embed")
        self.convs: nnx.List = nnx.List()
        self.biases: nnx.List = nnx.List()
        for c_in, c_out in itertools.pairwise(channels):
            # Twice the variance of fan_in keeps the scale behind a ReLU-like activation.
            draw = normal(math.sqrt(2.0 / (9 * c_in)))
            self.convs.append(param(init, (3, 3, c_in, c_out), axes, draw))
            self.biases.append(param(init, (c_out,), ("norm",), zeros))

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B, H, W, 3] -> [B, P, D]."""
        x = pixels
        for i, (w, b) in enumerate(zip(self.convs, self.biases)):
            x = _conv3x3_stride2(x, w[...]) + b[...].astype(x.dtype)
            if i + 1 < len(self.convs):
                x = ACTIVATIONS[self.activation](x)
        return x.reshape(x.shape[0], -1, x.shape[-1])


def _conv3x3_stride2(x: jax.Array, w: jax.Array) -> jax.Array:
    """[B, H, W, C] x [3, 3, C, E] -> [B, H/2, W/2, E], zero padding of one.

    Nine shifted views and one matmul: XLA's CPU convolution has a slow gradient.
    """
    H, W = x.shape[1] // 2, x.shape[2] // 2
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    views = [
        jax.lax.slice(
            padded,
            (0, i, j, 0),
            (x.shape[0], i + 2 * H - 1, j + 2 * W - 1, x.shape[3]),
            (1, 2, 2, 1),
        )
        for i in range(3)
        for j in range(3)
    ]
    return contract(jnp.stack(views, axis=3), w.reshape(9, *w.shape[2:]), 2)


def conv_channels(width: int, steps: int) -> list[int]:
    """Channels after each convolution of a :class:`ConvStem`; the last is ``width``."""
    return [max(8, width >> max(0, 2 - i)) for i in range(steps - 1)] + [width]


STEMS = {"linear": LinearStem, "conv": ConvStem}


class ViT(nnx.Module):
    """Pictures of one fixed size to visual tokens.

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
        spec = BlockSpec(
            width=D,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=D // config.num_heads,
            mlp_dim=config.mlp_dim,
            norm="layer",
            norm_eps=config.norm_eps,
            activation=config.activation,
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            attention=attention,
        )
        self.stack = Stack(init, axes, spec, config.depth, config.remat)
        # Like the blocks behind feature_layer, a norm that is not used is kept for export.
        self.norm = LayerNorm(init, D, config.norm_eps)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Visual tokens of normalised pictures.

        Args:
            pixels: [B, H, W, 3], about unit variance, in the compute dtype.

        Returns:
            [B, P, D]; the class token is dropped.
        """
        x = self.stem(pixels)
        x = shard(self.axes, x, "batch", "seq", "embed")
        if self.class_token is not None:
            token = jnp.broadcast_to(
                self.class_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2])
            )
            x = jnp.concatenate([token, x], axis=1)
        if self.position is not None:
            x = x + self.position[...].astype(x.dtype)
        else:
            x = x + jnp.asarray(sincos2d(self.config), x.dtype)
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        x, _ = self.stack(x, Context(Mask()), skip_last=-1 - self.config.feature_layer)
        if self.config.feature_layer == -1 and self.config.final_norm:
            x = self.norm(x)
        return x[:, 1:] if self.class_token is not None else x


def num_patches(config: VisionConfig) -> int:
    """P: visual tokens a picture."""
    return (config.image_size // config.patch_size) ** 2


def check(config: VisionConfig) -> None:
    """Refuse dims that do not fit each other.

    Raises:
        ConfigError: which field, and what would do.
    """
    where = "config.model.vision"
    if config.image_size % config.patch_size:
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
    if config.stem not in STEMS:
        raise ConfigError(f"{where}.stem={config.stem!r}; known: {', '.join(STEMS)}")
    if config.activation not in ACTIVATIONS:
        raise ConfigError(
            f"{where}.activation={config.activation!r}; known: {', '.join(ACTIVATIONS)}"
        )
    if config.position not in ("learned", "sincos2d"):
        raise ConfigError(f"{where}.position={config.position!r}; known: learned, sincos2d")
    if config.position == "sincos2d" and (config.class_token or config.width % 4):
        raise ConfigError(f"{where}.position='sincos2d' takes no class token and a width of 4n")
    if not -config.depth <= config.feature_layer <= -1:
        raise ConfigError(
            f"{where}.feature_layer={config.feature_layer} counts from the end: -{config.depth}..-1"
        )
    if config.stem == "conv" and not config.patch_bias:
        raise ConfigError(f"{where}.patch_bias=False has no meaning for stem='conv'")


def sincos2d(config: VisionConfig) -> np.ndarray:
    """f32[P, D] fixed 2-D positions, half the width a direction (MoCo v3, arXiv 2104.02057)."""
    side, quarter = config.image_size // config.patch_size, config.width // 4
    omega = 10_000.0 ** -(np.arange(quarter) / quarter)
    y, x = np.mgrid[:side, :side].reshape(2, -1, 1) * omega
    parts = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
    return np.concatenate(parts, axis=1).astype(np.float32)
