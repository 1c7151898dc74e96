"""A vision-language model whose rows become vectors."""

from __future__ import annotations

from collections.abc import Collection

import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import ConfigError, ModelConfig, VectorConfig, refuse_unread
from jaxvlm.models.vlm import VLM, encoded
from jaxvlm.nn.norm import unit
from jaxvlm.nn.param import Init, affine, constant, fan_in, param
from jaxvlm.nn.pool import POOLS
from jaxvlm.parallel.rules import Axes
from jaxvlm.types import Batch, Out

TOKENS = "tokens"
"""``VectorConfig.pool``: a vector a token."""


class VectorHead(nnx.Module):
    """What stands behind the decoder's last norm.

    Args:
        init: source of parameters.
        config: of the vectors.
        width: of the decoder.
    """

    def __init__(self, init: Init, config: VectorConfig, width: int):
        E = config.dim
        self.project = param(init, (width, E), ("embed", "norm"), fan_in(width)) if E else None
        self.scale = param(init, (), (), constant(config.scale)) if config.learn_scale else None
        self.bias = param(init, (), (), constant(config.bias)) if config.learn_bias else None


class Embedder(VLM):
    """A :class:`VLM` that gives a vector a row, or a vector a token.

    Args:
        init: source of parameters.
        axes: as of a VLM.
        config: likewise.
        vectors: how rows become vectors.

    Source: last-token pooling as in Qwen3-VL-Embedding (arXiv 2601.04720); a vector a token as in
        ColPali (arXiv 2407.01449).
    """

    def __init__(
        self, init: Init, axes: dict[str, Axes], config: ModelConfig, vectors: VectorConfig
    ):
        check(vectors)
        super().__init__(init, axes, config)
        self.vectors = vectors
        self.head = VectorHead(init, vectors, config.decoder.width)

    def embed(self, batch: Batch) -> Out:
        """Vectors of rows of one text, some pictures, or both.

        Args:
            batch: rows padded on either side.

        Returns:
            ``hidden`` f32[B, E], or f32[B, T, E] where ``vectors.pool`` is ``tokens``; zero for
            padding.
        """
        return self.pooled(self.post(self.blocks(self.pre(batch))), batch)

    def pooled(self, out: Out, batch: Batch) -> Out:
        """What :meth:`post` gives of rows, as :meth:`embed` does."""
        hidden = out.hidden
        if self.vectors.pool == TOKENS:
            x = jnp.where((batch.segment > 0)[..., None], hidden, 0).astype(jnp.float32)
        else:
            x = POOLS[self.vectors.pool](hidden, batch.segment)
        if self.head.project is not None:
            x = affine(x, self.head.project, None)
        scale, bias = self.head.scale, self.head.bias
        return Out(
            hidden=unit(x) if self.vectors.normalize else x,
            scale=None if scale is None else scale[...],
            bias=None if bias is None else bias[...],
        )

    def towers(self, batch: Batch, which: Collection[str]) -> Batch:
        """``batch`` with what towers make of it in the place of what they make it of.

        Args:
            batch: as of :meth:`embed`.
            which: of ``vision``.
        """
        if "vision" not in which:
            return batch
        made = encoded(self.vision, self.config, batch)
        return batch if made is None else batch._replace(features=made, pixels=None, patches=None)


def check(config: VectorConfig) -> None:
    """Refuse words that mean nothing.

    Raises:
        ConfigError: which field, and what would do.
    """
    where = "config.vectors"
    if config.pool not in (*POOLS, TOKENS):
        raise ConfigError(f"{where}.pool={config.pool!r}; known: {', '.join((*POOLS, TOKENS))}")
    if config.dim < 0:
        raise ConfigError(f"{where}.dim={config.dim}: at least 0, which has no map")
    refuse_unread(config, where)
