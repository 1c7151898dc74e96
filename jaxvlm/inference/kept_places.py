"""Which places of a prompt a compressed KV cache keeps: to draw, and to understand an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.inference import kv_compression, prompts
from jaxvlm.inference.generate import Compression, DecodeState, Sampling, prefill
from jaxvlm.inference.kv_policy import policy_of
from jaxvlm.inference.prompts import ImageLike, listed
from jaxvlm.types import Batch, Params

if TYPE_CHECKING:
    from jaxvlm.inference.vlm import VLM


class KeptPlaces(NamedTuple):
    """Places of a prompt of T tokens."""

    tokens: np.ndarray
    """i32[T]: the prompt's tokens; each visual token has the image token's id."""
    visual: np.ndarray
    """bool[T]: the place holds a visual token."""
    kept: np.ndarray
    """bool[L, K, T]: a layer's KV head keeps the place."""

    def of_image(self, rows: int, columns: int) -> np.ndarray:
        """Return for each visual token of one image how many of the heads of all layers keep it.

        Args:
            rows: visual tokens from the top to the bottom.
            columns: visual tokens from the left to the right.

        Returns:
            f32[rows, columns] in [0, 1].
        """
        share = self.kept.mean((0, 1), dtype=np.float32)[self.visual]
        if len(share) != rows * columns:
            raise ValueError(f"the prompt has {len(share)} visual tokens, not {rows} x {columns}")
        return share.reshape(rows, columns)


def kept_places(
    vlm: VLM, images: ImageLike | Sequence[ImageLike], prompt: str, seed: int = 0, **kv: Any
) -> KeptPlaces:
    """Return what the KV cache of a prompt keeps.

    Args:
        vlm: a loaded model.
        images, prompt, seed, **kv: as of :meth:`jaxvlm.inference.vlm.VLM.generate`; ``kv`` names a
            method.

    Raises:
        ConfigError: no method, one that does not fit the model, or a setting out of range.
        DataError: an image can't be read.
    """
    policy, model = policy_of(**kv), vlm.model
    if policy is None:
        raise ConfigError("kv=none keeps every place; choose a method, such as kv=vl_cache")
    kv_compression.check_model(model.config.decoder)
    asked = [(listed(images), prompt)]
    how = (model, vlm.tokenizer, vlm.image_format, vlm.config.data.max_pixels)
    batch = prompts.to_answer(asked, *how, cache=vlm.current_cache()).batch
    d, stages = model.config.decoder, model.mesh.shape["pipeline"]
    compression = Compression(policy, vlm.tokenizer.image_id, stages, with_places=True)

    def read(params: Params, batch: Batch, key: jax.Array) -> DecodeState:
        shape = (d.depth, d.num_kv_heads, d.head_dim)
        return prefill(model.module(params), batch, Sampling(), 1, shape, key, compression)

    state = jax.jit(read)(vlm.params, batch, jax.random.key(seed))
    valid = np.asarray(batch.segment)[0] > 0
    tokens = np.asarray(batch.tokens)[0, valid]
    kept = kv_compression.places(state.kv.part, state.kept, batch.tokens.shape[1])
    return KeptPlaces(
        tokens, tokens == vlm.tokenizer.image_id, kept[:, 0, :, valid].transpose(1, 2, 0)
    )
