"""Patch embedding of images: linear or convolutional stem."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import VisionConfig
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.param import Init, contract, fan_in, normal, param, zeros


class LinearStem(nnx.Module):
    """Linear patch embedding; patchify is a reshape (arXiv 2010.11929).

    Packed patches are flat already, in the layout ``config.patch_layout``.
    """

    def __init__(self, init: Init, config: VisionConfig):
        p = config.patch_size
        inner = (p, p, 3) if config.patch_layout == "hwc" else (3, config.frames, p, p)
        self.patch_size, self.inner = p, inner
        axes = (*("patch",) * len(inner), "embed")
        self.w = param(init, (*inner, config.width), axes, fan_in(*inner))
        self.b = param(init, (config.width,), ("norm",), zeros) if config.patch_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Embed images [B, H, W, 3] (patches in row-major order) or packed [B, P, patch_dim].

        Returns:
            [B, P, D].
        """
        if x.ndim == 4:
            B, H, W, C = x.shape
            p = self.patch_size
            x = x[:, : H // p * p, : W // p * p]
            x = x.reshape(B, H // p, p, W // p, p, C).transpose(0, 1, 3, 2, 4, 5)
            x = x.reshape(B, (H // p) * (W // p), p, p, C)
        else:
            x = x.reshape(*x.shape[:2], *self.inner)
        x = contract(x, self.w[...], len(self.inner))
        return x if self.b is None else x + self.b[...].astype(x.dtype)


class ConvStem(nnx.Module):
    """Stem of 3x3 stride-2 convolutions down to one output per patch (arXiv 2106.14881).

    Channels double from a quarter of the ViT's width up to it. Small models trained from scratch
    learn shapes with it that a linear patch embedding misses.
    """

    def __init__(self, init: Init, config: VisionConfig):
        steps = config.patch_size.bit_length() - 1  # it is a power of two
        channels = [3, *conv_channels(config.width, steps)]
        self.activation = config.activation
        axes = ("patch", "patch", "patch", "embed")
        self.convs: nnx.List = nnx.List()
        self.biases: nnx.List = nnx.List()
        for c_in, c_out in itertools.pairwise(channels):
            # Twice the variance of fan_in keeps the scale after a ReLU-like activation.
            draw = normal(math.sqrt(2.0 / (9 * c_in)))
            self.convs.append(param(init, (3, 3, c_in, c_out), axes, draw))
            self.biases.append(param(init, (c_out,), ("norm",), zeros))

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Embed images [B, H, W, 3] as [B, P, D]."""
        x = pixels
        for i, (w, b) in enumerate(zip(self.convs, self.biases)):
            x = _conv3x3_stride2(x, w[...]) + b[...].astype(x.dtype)
            if i + 1 < len(self.convs):
                x = ACTIVATIONS[self.activation](x)
        return x.reshape(x.shape[0], -1, x.shape[-1])


def _conv3x3_stride2(x: jax.Array, w: jax.Array) -> jax.Array:
    """Convolve [B, H, W, C] with [3, 3, C, E] to [B, H/2, W/2, E], zero padding of 1.

    Nine shifted views and one matmul, since XLA's CPU convolution has a slow gradient.
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
    """Return the channels after each convolution of a :class:`ConvStem`; the last is ``width``."""
    return [max(8, width >> max(0, 2 - i)) for i in range(steps - 1)] + [width]


STEMS = {"linear": LinearStem, "conv": ConvStem}
