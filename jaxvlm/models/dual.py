"""A dual encoder: a vision tower and a text encoder that share a space of vectors."""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import ConfigError, DualConfig, TextConfig, VisionConfig
from jaxvlm.models import text_encoder, vit
from jaxvlm.models.text_encoder import TextEncoder
from jaxvlm.models.vit import ViT, normalised
from jaxvlm.models.vlm import DTYPES
from jaxvlm.nn.kernels import check_backend
from jaxvlm.nn.norm import unit
from jaxvlm.nn.param import Init, affine, constant, fan_in, param, zeros
from jaxvlm.parallel.rules import Axes
from jaxvlm.types import Batch, Out

TOWERS = ("vision", "text")


class Head(nnx.Module):
    """What follows the towers: their linear maps, and the logits' temperature and bias.

    Args:
        init: source of parameters.
        config: of the model.
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


def _see(
    vision: ViT,
    config: DualConfig,
    pixels: jax.Array,
    grid: jax.Array | None = None,
    noise: jax.Array | None = None,
) -> jax.Array:
    x = normalised(pixels, config.vision).astype(DTYPES[config.dtype])
    with jax.named_scope("vision"):
        return vision.pooled(x, grid, noise)


def _pooled(vision: ViT, config: DualConfig, batch: Batch) -> jax.Array | None:
    """[B, D] of rows of a picture each; ``None``: they have none."""
    if batch.pixels is not None:
        rows, made = len(batch.pixels), batch.pixels.reshape(-1, *batch.pixels.shape[2:])
        made = _see(vision, config, made, noise=batch.noise)
    elif batch.patches is not None:
        rows = len(batch.patches)
        made = _see(vision, config, batch.patches, batch.grid, batch.noise)
    else:
        return None
    if made.size != rows * config.vision.width:
        raise ValueError("a dual encoder takes one picture a row")
    return made.reshape(rows, -1)


def encoded(vision: ViT, config: DualConfig, batch: Batch) -> jax.Array | None:
    """``Batch.features``, [B, 1, 1, D] of rows of a picture each; ``None``: they have none."""
    made = _pooled(vision, config, batch)
    return None if made is None else made[:, None, None]


class DualEncoder(nnx.Module):
    """CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343): cosines of pictures and texts.

    Args:
        init: source of parameters.
        axes: mesh and rules by tower: keys ``vision``, ``text``, ``head``.
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
        """Vectors of a batch whose rows each hold one text, one picture, or both.

        Returns:
            ``hidden`` [B, M, E], a row's vectors: its picture's, then its text's; M is 1 where the
            batch has no pictures or the model one tower. ``scale`` and ``bias``: logits are
            ``exp(scale) * cosine + bias``.

        Raises:
            ValueError: the batch has nothing that the model encodes, or several pictures a row.
        """
        vectors = []
        if (pictures := self._pictures(batch)) is not None:
            vectors.append(self._vector("vision", pictures))
        if (texts := self._texts(batch)) is not None:
            vectors.append(self._vector("text", texts))
        if not vectors:
            raise ValueError("the batch has nothing that this model encodes")
        return self._out(jnp.stack(vectors, axis=1))

    def embed(self, batch: Batch) -> Out:
        """A vector a row: of its picture, of its text, or the mean of both where it has both.

        Args:
            batch: rows of one picture (``image_start`` says where there is none), one text
                (``segment`` is 0 where there is none), or both.

        Returns:
            ``hidden`` [B, E]. Of unit length where the model's vectors are; 0 for a row of nothing.

        Raises:
            ValueError: as of a call.

        Source: pictures and texts of one query added up, as in UniIR (arXiv 2311.17136).
        """
        found = []
        if (pictures := self._pictures(batch)) is not None:
            start = batch.image_start
            seen = jnp.ones(len(pictures), bool) if start is None else jnp.any(start >= 0, axis=1)
            found.append((self._vector("vision", pictures), seen))
        if (texts := self._texts(batch)) is not None:
            found.append((self._vector("text", texts), jnp.any(batch.segment > 0, axis=1)))
        if not found:
            raise ValueError("the batch has nothing that this model encodes")
        total = jnp.sum(jnp.stack([x * seen[:, None] for x, seen in found]), axis=0)
        if len(found) > 1 and self.config.normalize:
            total = unit(total)
        elif len(found) > 1:
            count = jnp.sum(jnp.stack([seen for _, seen in found]), axis=0)
            total = total / jnp.maximum(count, 1)[:, None]
        return self._out(total)

    def towers(self, batch: Batch, which: Collection[str]) -> Batch:
        """``batch`` with what some towers make of it in the place of what they make it of.

        Args:
            batch: as of :meth:`embed`.
            which: of ``vision`` and ``text``.
        """
        if "vision" in which and (pictures := self._pictures(batch)) is not None:
            batch = batch._replace(
                features=pictures[:, None, None], pixels=None, patches=None, grid=None
            )
        if "text" in which and (texts := self._texts(batch)) is not None:
            batch = batch._replace(text_features=texts)
        return batch

    def _out(self, hidden: jax.Array) -> Out:
        scale, bias = self.head.scale, self.head.bias
        return Out(
            hidden=hidden,
            scale=None if scale is None else scale[...],
            bias=None if bias is None else bias[...],
        )

    def _pictures(self, batch: Batch) -> jax.Array | None:
        """[B, D] pooled pictures, one a row; ``None``: there are none."""
        if batch.features is not None:
            return batch.features[:, 0, 0]
        return None if self.vision is None else _pooled(self.vision, self.config, batch)

    def _texts(self, batch: Batch) -> jax.Array | None:
        """[B, D] pooled texts; ``None``: there are none."""
        if batch.text_features is not None:
            return batch.text_features
        if self.text is None or not batch.tokens.shape[1]:
            return None
        # Attention over nothing is no number, and 0 times it is none either.
        first = (jnp.arange(batch.tokens.shape[1]) == 0).astype(jnp.int32)
        said = jnp.any(batch.segment > 0, axis=1, keepdims=True)
        segment = jnp.where(said, batch.segment, first)
        return self._read(batch.tokens, segment, batch.positions[:, 0], noise=batch.noise)

    def _read(
        self,
        tokens: jax.Array,
        segment: jax.Array,
        positions: jax.Array,
        types: jax.Array | None = None,
        noise: jax.Array | None = None,
    ) -> jax.Array:
        assert self.text is not None
        with jax.named_scope("text"):
            x = self.text(tokens, segment, positions, DTYPES[self.config.dtype], types, noise)
            return self.text.pooled(x, tokens, segment)

    def encode_image(self, pixels: jax.Array, grid: jax.Array | None = None) -> jax.Array:
        """Vectors of pictures.

        Args:
            pixels: values in 0..255, [B, H, W, 3] or packed patches [B, P, patch_dim].
            grid: i32[B, I, 3] (t, h, w) of the pictures in each row of packed patches.

        Returns:
            [B, E], or [B, I, E] of packed patches; what stands where there is no picture means
            nothing.

        Raises:
            ValueError: the model has no vision tower.
        """
        if self.vision is None:
            raise ValueError("this model has no vision tower")
        return self._vector("vision", _see(self.vision, self.config, pixels, grid))

    def encode_text(
        self,
        tokens: jax.Array,
        segment: jax.Array,
        positions: jax.Array,
        types: jax.Array | None = None,
    ) -> jax.Array:
        """Vectors of texts.

        Args:
            tokens: i32[B, T].
            segment: i32[B, T]; 0 is padding.
            positions: i32[B, T].
            types: i32[B, T] token types; all are 0 if ``None``.

        Returns:
            [B, E].

        Raises:
            ValueError: the model has no text encoder.
        """
        if self.text is None:
            raise ValueError("this model has no text encoder")
        return self._vector("text", self._read(tokens, segment, positions, types))

    def _vector(self, tower: str, x: jax.Array) -> jax.Array:
        """Projected and brought to length 1, in float32."""
        if (w := getattr(self.head, tower)) is not None:
            x = affine(x, w, getattr(self.head, f"{tower}_bias"))
        x = x.astype(jnp.float32)
        return unit(x) if self.config.normalize else x


def check(config: DualConfig) -> None:
    """Refuse towers that do not fit the vectors' dim, and settings of towers that are not there.

    Raises:
        ConfigError: which field, and what would do.
    """
    where = "config.dual"
    if config.dtype not in DTYPES:
        raise ConfigError(f"{where}.dtype={config.dtype!r}; known: {', '.join(DTYPES)}")
    check_backend(config.attention, where)
    if not config.towers or not set(config.towers) <= set(TOWERS):
        raise ConfigError(f"{where}.towers={config.towers}; known: {', '.join(TOWERS)}")
    if config.embed_dim < 1:
        raise ConfigError(f"{where}.embed_dim={config.embed_dim} must be 1 or more")
    if extra := set(config.project) - set(config.towers):
        raise ConfigError(f"{where}.project names {extra.pop()!r}, which is not in towers")
    absent = {"vision": (VisionConfig(), DualConfig().vision), "text": (TextConfig(),)}
    for tower in TOWERS:
        found = getattr(config, tower)
        if tower not in config.towers:
            if found not in absent[tower]:
                raise ConfigError(f"{where}.{tower} is set, but {where}.towers={config.towers}")
        elif tower not in config.project and found.width != config.embed_dim:
            raise ConfigError(
                f"{where}.{tower}.width={found.width} is not embed_dim={config.embed_dim}; "
                f"put {tower!r} in {where}.project"
            )
    if config.vision.trunk:
        raise ConfigError(
            f"{where}.vision.trunk={config.vision.trunk} is of vision-language models; here "
            "config.optim.frozen=('vision/*',) freezes the tower"
        )
    if "vision" in config.towers:
        vit.check(config.vision, f"{where}.vision")
    if "text" in config.towers:
        text_encoder.check(config.text, f"{where}.text")
    if "vision" in config.towers and config.vision.pool == "none":
        raise ConfigError(f"{where}.vision.pool='none' gives no vector; class or attention does")
    if len(config.towers) < len(TOWERS):
        for field in ("scale", "has_bias"):
            if (value := getattr(config, field)) != getattr(DualConfig(), field):
                raise ConfigError(f"{where}.{field}={value} is of logits, which take two towers")
    if config.bias and not config.has_bias:
        raise ConfigError(f"{where}.bias={config.bias} without has_bias=True")
    if config.project_bias and not config.project:
        raise ConfigError(f"{where}.project_bias=True without project")
