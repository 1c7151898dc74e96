"""Vision-language model that embeds sequences."""

from __future__ import annotations

from collections.abc import Collection

import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import ConfigError, EmbeddingConfig, ModelConfig, check_choice, refuse_unread
from jaxvlm.models.vlm import VLM, encoded
from jaxvlm.nn.norm import unit
from jaxvlm.nn.param import Init, affine, constant, fan_in, param
from jaxvlm.nn.pooling import POOLS
from jaxvlm.parallel.rules import Axes
from jaxvlm.types import Batch, Out

TOKENS = "tokens"
"""Value of ``EmbeddingConfig.pool`` for one embedding per token (late interaction)."""


class EmbeddingHead(nnx.Module):
    """Linear projection after the decoder's final norm, and the logits' temperature and bias.

    Args:
        init: parameter initialization.
        config: settings of the embeddings.
        width: width of the decoder.
    """

    def __init__(self, init: Init, config: EmbeddingConfig, width: int):
        E = config.dim
        self.project = param(init, (width, E), ("embed", "norm"), fan_in(width)) if E else None
        self.scale = param(init, (), (), constant(config.scale)) if config.learn_scale else None
        self.bias = param(init, (), (), constant(config.bias)) if config.learn_bias else None


class Embedder(VLM):
    """A :class:`VLM` that computes one embedding per sequence, or one per token.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules by submodule, as for a VLM.
        config: dims and variants, as for a VLM.
        embeddings: pooling, projection and normalization.

    Source: last-token pooling as in Qwen3-VL-Embedding (arXiv 2601.04720); one embedding per token
        as in ColPali (arXiv 2407.01449).
    """

    def __init__(
        self, init: Init, axes: dict[str, Axes], config: ModelConfig, embeddings: EmbeddingConfig
    ):
        check(embeddings)
        super().__init__(init, axes, config)
        self.embeddings = embeddings
        self.head = EmbeddingHead(init, embeddings, config.decoder.width)

    def embed(self, batch: Batch) -> Out:
        """Embed sequences of one text, some images, or both.

        Args:
            batch: sequences, padded on either side.

        Returns:
            ``hidden`` f32[B, E], or f32[B, T, E] if ``embeddings.pool`` is ``tokens``; zero for
            padding.
        """
        return self.pooled(self.post(self.blocks(self.pre(batch))), batch)

    def pooled(self, out: Out, batch: Batch) -> Out:
        """Turn the hidden states that :meth:`post` returns into embeddings, as :meth:`embed`."""
        hidden = out.hidden
        if self.embeddings.pool == TOKENS:
            x = jnp.where((batch.segment > 0)[..., None], hidden, 0).astype(jnp.float32)
        else:
            x = POOLS[self.embeddings.pool](hidden, batch.segment)
        if self.head.project is not None:
            x = affine(x, self.head.project, None)
        scale, bias = self.head.scale, self.head.bias
        return Out(
            hidden=unit(x) if self.embeddings.normalize else x,
            scale=None if scale is None else scale[...].astype(jnp.float32),
            bias=None if bias is None else bias[...].astype(jnp.float32),
        )

    def towers(self, batch: Batch, which: Collection[str]) -> Batch:
        """Replace a batch's images by the vision encoder's features, if ``which`` has ``vision``.

        Args:
            batch: as for :meth:`embed`.
            which: encoders to run; a VLM has ``vision`` only.
        """
        if "vision" not in which:
            return batch
        features = encoded(self.vision, self.config, batch)
        if features is None:
            return batch
        return batch._replace(features=features, pixels=None, patches=None)


def check(config: EmbeddingConfig) -> None:
    """Check the settings of embeddings.

    Raises:
        ConfigError: a setting has an unknown value, or is not read.
    """
    where = "config.embedding"
    check_choice(f"{where}.pool", config.pool, (*POOLS, TOKENS))
    if config.dim < 0:
        raise ConfigError(f"{where}.dim={config.dim} must be at least 0; 0 is no linear map")
    refuse_unread(config, where)
