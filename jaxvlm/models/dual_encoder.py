"""Dual encoder: a vision tower and a text tower that share one embedding space."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import ConfigError, DualConfig, TextConfig, VisionConfig, check_choice
from jaxvlm.models import text_encoder, vit
from jaxvlm.models.text_encoder import TextEncoder
from jaxvlm.models.vit import ViT, normalised
from jaxvlm.models.vlm import DTYPES
from jaxvlm.nn.attention_backends import check_backend
from jaxvlm.nn.norm import unit
from jaxvlm.nn.param import Init, affine, constant, fan_in, param, zeros
from jaxvlm.parallel.rules import Axes
from jaxvlm.types import Batch, Out

TOWERS = ("vision", "text")


class Head(nnx.Module):
    """Linear projections of the towers' outputs, and the logits' temperature and bias.

    Args:
        init: parameter initialization.
        config: settings of the model.
    """

    def __init__(self, init: Init, config: DualConfig):
        E, words = config.embed_dim, ("embed", "norm")
        D = {"vision": config.vision.width, "text": config.text.width}
        for tower in TOWERS:
            has = tower in config.project
            w = param(init, (D[tower], E), words, fan_in(D[tower])) if has else None
            b = param(init, (E,), ("norm",), zeros) if has and config.project_bias else None
            setattr(self, tower, w)
            setattr(self, f"{tower}_bias", b)
        both = len(config.towers) == len(TOWERS)
        self.scale = param(init, (), (), constant(config.scale)) if both else None
        self.bias = param(init, (), (), constant(config.bias)) if config.has_bias else None


def _encode_pixels(
    vision: ViT,
    config: DualConfig,
    pixels: jax.Array,
    grid: jax.Array | None = None,
    dropout_keys: jax.Array | None = None,
) -> jax.Array:
    x = normalised(pixels, config.vision).astype(DTYPES[config.dtype])
    with jax.named_scope("vision"):
        return vision.pooled(x, grid, dropout_keys)


def _pooled(vision: ViT, config: DualConfig, batch: Batch) -> jax.Array | None:
    """Encode one image per sequence as [B, D]; ``None`` if the batch has no images."""
    if batch.pixels is not None:
        count, pixels = len(batch.pixels), batch.pixels.reshape(-1, *batch.pixels.shape[2:])
        pooled = _encode_pixels(vision, config, pixels, dropout_keys=batch.dropout_keys)
    elif batch.patches is not None:
        count = len(batch.patches)
        pooled = _encode_pixels(vision, config, batch.patches, batch.grid, batch.dropout_keys)
    else:
        return None
    if pooled.size != count * config.vision.width:
        raise ValueError("a dual encoder takes one image per sequence")
    return pooled.reshape(count, -1)


def encoded(vision: ViT, config: DualConfig, batch: Batch) -> jax.Array | None:
    """Compute ``Batch.features``, [B, 1, 1, D], one image per sequence; ``None`` without images."""
    pooled = _pooled(vision, config, batch)
    return None if pooled is None else pooled[:, None, None]


class DualEncoder(nnx.Module):
    """Dual encoder as CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343), or one tower of it.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules by submodule: ``vision``, ``text``, ``head``.
        config: dims and variants.
    """

    def __init__(self, init: Init, axes: dict[str, Axes], config: DualConfig):
        check(config)
        has, backend = config.towers, config.attention
        self.config = config
        self.vision = ViT(init, axes["vision"], config.vision, backend) if "vision" in has else None
        self.text = TextEncoder(init, axes["text"], config.text, backend) if "text" in has else None
        self.head = Head(init, config)

    def __call__(self, batch: Batch) -> Out:
        """Embed a batch whose sequences each hold one text, one image, or both.

        Returns:
            ``hidden`` [B, M, E]: the embeddings of each sequence's image and then of its text; M is
            1 if the batch has no images or the model has one tower. ``scale`` and ``bias``: logits
            are ``exp(scale) * cosine + bias``.

        Raises:
            ValueError: the batch has nothing that the model encodes, or several images per
                sequence.
        """
        embeddings = []
        if (images := self._images(batch)) is not None:
            embeddings.append(self._embedding("vision", images))
        if (texts := self._texts(batch)) is not None:
            embeddings.append(self._embedding("text", texts))
        if not embeddings:
            raise ValueError("the batch has nothing that this model encodes")
        return self._out(jnp.stack(embeddings, axis=1))

    def embed(self, batch: Batch) -> Out:
        """Compute one embedding per sequence: of its image, of its text, or the mean of both.

        Args:
            batch: sequences of one image (``image_start`` is -1 if there is none), one text
                (``segment`` is 0 if there is none), or both.

        Returns:
            ``hidden`` [B, E]; of unit norm if the model normalizes; 0 for an empty sequence.

        Raises:
            ValueError: as :meth:`__call__`.

        Source: sum of the image's and the text's embedding, as in UniIR (arXiv 2311.17136).
        """
        embeddings = []
        if (images := self._images(batch)) is not None:
            start = batch.image_start
            valid = jnp.ones(len(images), bool) if start is None else jnp.any(start >= 0, axis=1)
            embeddings.append((self._embedding("vision", images), valid))
        if (texts := self._texts(batch)) is not None:
            embeddings.append((self._embedding("text", texts), jnp.any(batch.segment > 0, axis=1)))
        if not embeddings:
            raise ValueError("the batch has nothing that this model encodes")
        total = jnp.sum(jnp.stack([x * valid[:, None] for x, valid in embeddings]), axis=0)
        if len(embeddings) > 1 and self.config.normalize:
            total = unit(total)
        elif len(embeddings) > 1:
            count = jnp.sum(jnp.stack([valid for _, valid in embeddings]), axis=0)
            total = total / jnp.maximum(count, 1)[:, None]
        return self._out(total)

    def towers(self, batch: Batch, which: Collection[str]) -> Batch:
        """Replace a batch's inputs of some towers by the outputs of these towers.

        Args:
            batch: as for :meth:`embed`.
            which: towers to run, of ``vision`` and ``text``.
        """
        if "vision" in which and (images := self._images(batch)) is not None:
            features = images[:, None, None]
            batch = batch._replace(features=features, pixels=None, patches=None, grid=None)
        if "text" in which and (texts := self._texts(batch)) is not None:
            batch = batch._replace(text_features=texts)
        return batch

    def _out(self, hidden: jax.Array) -> Out:
        scale, bias = self.head.scale, self.head.bias
        return Out(
            hidden=hidden,
            scale=None if scale is None else scale[...].astype(jnp.float32),
            bias=None if bias is None else bias[...].astype(jnp.float32),
        )

    def _images(self, batch: Batch) -> jax.Array | None:
        """Return pooled images [B, D], one per sequence; ``None`` if there are none."""
        if batch.features is not None:
            return batch.features[:, 0, 0]
        return None if self.vision is None else _pooled(self.vision, self.config, batch)

    def _texts(self, batch: Batch) -> jax.Array | None:
        """Return pooled texts [B, D]; ``None`` if there are none."""
        if batch.text_features is not None:
            return batch.text_features
        if self.text is None or not batch.tokens.shape[1]:
            return None
        # Attention over no key is NaN, and so is 0 times it: an empty text attends to one token.
        first = (jnp.arange(batch.tokens.shape[1]) == 0).astype(jnp.int32)
        has_text = jnp.any(batch.segment > 0, axis=1, keepdims=True)
        segment = jnp.where(has_text, batch.segment, first)
        positions, keys = batch.positions[:, 0], batch.dropout_keys
        return self._encode_tokens(batch.tokens, segment, positions, dropout_keys=keys)

    def _encode_tokens(
        self,
        tokens: jax.Array,
        segment: jax.Array,
        positions: jax.Array,
        types: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        assert self.text is not None
        with jax.named_scope("text"):
            dtype = DTYPES[self.config.dtype]
            x = self.text(tokens, segment, positions, dtype, types, dropout_keys)
            return self.text.pooled(x, tokens, segment)

    def encode_image(self, pixels: jax.Array, grid: jax.Array | None = None) -> jax.Array:
        """Embed images.

        Args:
            pixels: values in 0..255, [B, H, W, 3] or packed patches [B, P, patch_dim].
            grid: i32[B, I, 3] (t, h, w) of the images in each sequence of packed patches.

        Returns:
            [B, E], or [B, I, E] for packed patches; undefined for unused slots.

        Raises:
            ValueError: the model has no vision tower.
        """
        if self.vision is None:
            raise ValueError("this model has no vision tower")
        return self._embedding("vision", _encode_pixels(self.vision, self.config, pixels, grid))

    def encode_text(
        self,
        tokens: jax.Array,
        segment: jax.Array,
        positions: jax.Array,
        types: jax.Array | None = None,
    ) -> jax.Array:
        """Embed texts.

        Args:
            tokens: i32[B, T].
            segment: i32[B, T]; 0 is padding.
            positions: i32[B, T].
            types: i32[B, T] token type ids; ``None``: all are 0.

        Returns:
            [B, E].

        Raises:
            ValueError: the model has no text encoder.
        """
        if self.text is None:
            raise ValueError("this model has no text encoder")
        return self._embedding("text", self._encode_tokens(tokens, segment, positions, types))

    def _embedding(self, tower: str, x: jax.Array) -> jax.Array:
        """Project a tower's output and scale it to unit norm, in float32."""
        if (w := getattr(self.head, tower)) is not None:
            x = affine(x, w, getattr(self.head, f"{tower}_bias"))
        x = x.astype(jnp.float32)
        return unit(x) if self.config.normalize else x


def check(config: DualConfig) -> None:
    """Check the settings of a dual encoder.

    Raises:
        ConfigError: a tower does not fit the embedding dim, a setting has an unknown value or
            contradicts another, or belongs to a tower that the model does not have.
    """
    where = "config.dual"
    check_choice(f"{where}.dtype", config.dtype, DTYPES)
    check_backend(config.attention, where)
    if not config.towers or not set(config.towers) <= set(TOWERS):
        raise ConfigError(f"{where}.towers={config.towers}; known: {', '.join(TOWERS)}")
    if config.embed_dim < 1:
        raise ConfigError(f"{where}.embed_dim={config.embed_dim} must be 1 or more")
    if extra := set(config.project) - set(config.towers):
        raise ConfigError(f"{where}.project names {extra.pop()!r}, which is not in towers")
    absent = {"vision": (VisionConfig(), DualConfig().vision), "text": (TextConfig(),)}
    for tower in TOWERS:
        settings = getattr(config, tower)
        if tower not in config.towers:
            # A recipe may set both towers' remat.
            default = type(settings)().remat
            if dataclasses.replace(settings, remat=default) not in absent[tower]:
                raise ConfigError(f"{where}.{tower} is set, but {where}.towers={config.towers}")
        elif tower not in config.project and settings.width != config.embed_dim:
            raise ConfigError(
                f"{where}.{tower}.width={settings.width} is not embed_dim={config.embed_dim}; "
                f"put {tower!r} in {where}.project"
            )
    if config.vision.frozen_blocks:
        raise ConfigError(
            f"{where}.vision.frozen_blocks={config.vision.frozen_blocks} works for vision-language "
            "models only; in a dual encoder config.optim.frozen=('vision/*',) freezes the whole "
            "vision tower"
        )
    if "vision" in config.towers:
        vit.check(config.vision, f"{where}.vision")
    if "text" in config.towers:
        text_encoder.check(config.text, f"{where}.text")
    if "vision" in config.towers and config.vision.pool == "none":
        raise ConfigError(
            f"{where}.vision.pool='none' gives no embedding; use 'class' or 'attention'"
        )
    if len(config.towers) < len(TOWERS):
        for field in ("scale", "has_bias"):
            if (value := getattr(config, field)) != getattr(DualConfig(), field):
                raise ConfigError(
                    f"{where}.{field}={value} applies to logits, which need two towers, and "
                    f"{where}.towers={config.towers}"
                )
    if config.bias and not config.has_bias:
        raise ConfigError(f"{where}.bias={config.bias} has no effect without has_bias=True")
    if config.project_bias and not config.project:
        raise ConfigError(f"{where}.project_bias=True has no effect without {where}.project")
