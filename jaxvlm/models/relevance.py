"""Relevance pooling: fewer visual tokens per image, with finer ones where the question looks.

The image is a forest of quadtrees: cells of 2^levels patches a side, each of which splits into four
cells of half the side, down to single patches. The cells that hold the highest scores are split
first, until there are ``budget`` pieces. Every patch is in one piece, alone or in a mean: none is
dropped. In Morton order a cell's patches are consecutive, so that means are reshapes and the trees
are arithmetic on indices.

Which cells are split is a discrete choice without a gradient. The scores learn through a gate
instead: each patch is multiplied by 2 sigmoid(score) before any mean is taken. So patches that were
not chosen learn too, from how much they should weigh in the mean that they are part of. A gate
after the choice would train the scores of chosen patches only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvlm.config import ConfigError, RelevanceConfig, refuse_unread
from jaxvlm.grid_order import MORTON, ROW_MAJOR, convert, pool
from jaxvlm.models.texture import CHANNELS
from jaxvlm.nn.norm import LayerNorm, unit
from jaxvlm.nn.param import Init, affine, contract, fan_in, param, zeros
from jaxvlm.types import Batch

_FREQUENCIES = 6
"""Frequencies of a piece's position embedding: wavelengths of 2 to 1/16 images."""
_EPS = 1e-5


class Pieces(NamedTuple):
    """Cells that an image is cut into, in Morton order."""

    first: jax.Array
    """i32[B, K]: Morton index of each piece's first patch."""
    level: jax.Array
    """i32[B, K]: level of each piece, which has 2^level patches a side."""


class Relevance(nnx.Module):
    """Pools an image's patches into ``budget`` tokens, by learned scores.

    Args:
        init: parameter initialization.
        config: settings, with ``budget`` above 0.
        vision_width: width of the vision encoder's tokens.
        width: D of the decoder.
    """

    def __init__(self, init: Init, config: RelevanceConfig, vision_width: int, width: int):
        self.config = config
        R, places = config.width, 4 * _FREQUENCIES + config.levels + 1
        self.norm = LayerNorm(init, vision_width, 1e-6)
        draw = fan_in(vision_width)
        self.w_surprise = param(init, (vision_width, R), ("embed", "norm"), draw, 1)
        self.w_texture = param(init, (CHANNELS, R), ("patch", "norm"), fan_in(CHANNELS), 1)
        self.b_texture = param(init, (R,), ("norm",), zeros)
        self.w_salient = param(init, (R,), ("norm",), fan_in(R))
        asks, words = config.query, ("embed", "norm")
        self.w_key = param(init, (vision_width, R), words, draw, 1) if asks else None
        self.w_query = param(init, (width, R), words, fan_in(width), 1) if asks else None
        self.balance = param(init, (2 + config.query,), ("norm",), _balance)
        self.w_place = param(init, (places, width), ("patch", "embed"), fan_in(places), 1)

    def __call__(
        self, x: jax.Array, texture: jax.Array, query: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Pool patches; return tokens and their position embeddings.

        Args:
            x: [B, P, D_vision] patches of a square image, in Morton order.
            texture: [B, P, 13] texture of the patches, in Morton order.
            query: [B, D] result of :func:`question`; not read without ``config.query``.

        Returns:
            [B, K, D_vision] tokens, and [B, K, D] position embeddings to add after the projection
            to the decoder's width.
        """
        side, levels = round(x.shape[1] ** 0.5), self.config.levels
        score = self.score(x, texture, query)
        pieces = choose(jax.lax.stop_gradient(score), levels, self.config.budget)
        gated = x * (2 * jax.nn.sigmoid(score))[..., None].astype(x.dtype)
        cells = [pool(gated, side, side, level) for level in range(levels + 1)]
        index = cell_index(pieces, side**2, levels)
        place = jnp.asarray(place_table(side, levels), x.dtype)[index]
        return _rows(jnp.concatenate(cells, axis=1), index), contract(place, self.w_place[...])

    def score(self, x: jax.Array, texture: jax.Array, query: jax.Array | None) -> jax.Array:
        """Score how relevant each patch is, f32[B, P]; arguments as of :meth:`__call__`.

        A weighted sum of three scores, each standardized over the image, with learned weights.
        *Information* is the logarithm of what a mean over the patch's cell would lose of the patch,
        in learned directions. *Saliency* is an MLP of the patch's texture. *Match* is the inner
        product with the question.
        """
        x = self.norm(x).astype(jnp.float32)
        side, levels = round(x.shape[1] ** 0.5), self.config.levels
        projected = contract(x, self.w_surprise[...])
        lost = projected - jnp.repeat(pool(projected, side, side, levels), 4**levels, axis=1)
        scores = [_standardize(jnp.log1p(jnp.mean(jnp.square(lost), axis=-1) / _EPS))]
        hidden = jax.nn.gelu(affine(texture.astype(jnp.float32), self.w_texture, self.b_texture))
        scores.append(_standardize(hidden @ self.w_salient[...]))
        if self.w_key is not None and self.w_query is not None:
            if query is None:
                raise ValueError("relevance.query=True needs the question's embedding")
            projected_query = contract(unit(query.astype(jnp.float32)), self.w_query[...])
            match = jnp.einsum("bpr,br->bp", contract(x, self.w_key[...]), projected_query)
            scores.append(_standardize(match * (query.shape[-1] / self.config.width) ** 0.5))
        share = jax.nn.softmax(self.balance[...].astype(jnp.float32))
        # The sum has no learned factor: its gradient would sum the scores of all patches, which
        # mostly cancel, so that rounding errors would dominate.
        return 2 * sum(part * one for part, one in zip(share, scores))


def _balance(_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Initialize the scores' weights: equal for two, and small for the third, the question's.

    Before the match with the question is learned, it is noise that differs from question to
    question, with which the decoder does not learn to read an image.
    """
    return jnp.asarray([0.0, 0.0, -3.0], jnp.float32)[: shape[0]]


def _standardize(score: jax.Array) -> jax.Array:
    """Scale to mean 0 and variance 1 over an image; a constant score becomes 0."""
    score = score - jnp.mean(score, axis=1, keepdims=True)
    return score * jax.lax.rsqrt(jnp.mean(jnp.square(score), axis=1, keepdims=True) + _EPS)


def choose(score: jax.Array, levels: int, budget: int) -> Pieces:
    """Cut images into ``budget`` pieces, smaller ones where scores are high.

    A cell's score is the maximum over its patches, so no child's score is above its parent's, and
    cells come before their children. So one top-k over the cells of all sizes selects the parent of
    every cell that it selects.

    Args:
        score: f32[B, P] in Morton order.
        levels: level of the coarsest cells.
        budget: K: the number of coarsest cells, plus three for each cell that is split.

    Returns:
        Pieces of i32[B, K].
    """
    P = score.shape[1]
    best = [jnp.max(score.reshape(len(score), -1, 4**level), axis=2) for level in _down(levels)]
    splits = (budget - P // 4**levels) // 3
    chosen = jax.lax.top_k(jnp.concatenate(best, axis=1), splits)[1]

    def one_image(chosen: jax.Array) -> Pieces:
        split = jnp.zeros(sum(x.shape[1] for x in best), jnp.int32)
        split = split.at[chosen].set(1, unique_indices=True)
        of_patch, done = jnp.full(P, levels, jnp.int32), 0
        for level in _down(levels):
            of_patch -= jnp.repeat(split[done : done + P // 4**level], 4**level)
            done += P // 4**level
        patch = jnp.arange(P, dtype=jnp.int32)
        begins = patch % 4**of_patch == 0
        first = jnp.sort(jnp.where(begins, patch, P))[:budget]
        return Pieces(first, of_patch[first])

    return jax.vmap(one_image)(chosen)


def _down(levels: int) -> range:
    """Return the levels whose cells can be split, the coarsest first."""
    return range(levels, 0, -1)


def cell_index(pieces: Pieces, patches: int, levels: int) -> jax.Array:
    """Return each piece's index among the cells of all levels, patches first; i32[B, K]."""
    before = np.cumsum([0, *(patches // 4**level for level in range(levels))])
    return jnp.asarray(before, jnp.int32)[pieces.level] + pieces.first // 4**pieces.level


def place_table(side: int, levels: int) -> np.ndarray:
    """Return sinusoids of cell centres and one-hot levels, all levels, patches first.

    Returns:
        f32[cells, F].
    """
    rows = []
    for level in range(levels + 1):
        grid = side // 2**level
        y, x = (np.mgrid[:grid, :grid].reshape(2, -1, 1) + 0.5) / grid
        omega = np.pi * 2.0 ** np.arange(_FREQUENCIES)
        waves = [f(at * omega) for at in (y, x) for f in (np.sin, np.cos)]
        which = np.broadcast_to(np.eye(levels + 1)[level], (grid**2, levels + 1))
        of_level = np.concatenate([*waves, which], axis=1).astype(np.float32)
        rows.append(np.asarray(convert(of_level, ROW_MAJOR, MORTON, grid, grid)))
    return np.concatenate(rows)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Gather [B, K, D] from [B, Q, D], each row at most once, so that the gradient is a set."""

    def one(x: jax.Array, index: jax.Array) -> jax.Array:
        return x.at[index].get(unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(one)(x, index)


def question(embedded: jax.Array, batch: Batch, budget: int) -> jax.Array:
    """Average the token embeddings of each image's question: the text before the first answer.

    Reads only tokens that the model has when it starts to answer: those of the image's segment
    before the first token with a loss weight. Later tokens may hold the answer, or refer to it.
    Visual tokens are left out.

    Args:
        embedded: [B, T, D] token embeddings.
        batch: the batch of these tokens.
        budget: visual tokens per image.

    Returns:
        [B * I, D]; zeros if there is no text before the answer, or no image.
    """
    start = batch.image_start
    at = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    of_image = jnp.take_along_axis(batch.segment, jnp.maximum(start, 0), axis=1)
    same = (batch.segment[:, None] == of_image[..., None]) & (start >= 0)[..., None]  # [B, I, T]
    answer = same & (batch.loss_weight > 0)[:, None]
    before = jnp.cumsum(answer, axis=2, dtype=jnp.int32) == 0
    inside = (start[..., None] <= at) & (at < start[..., None] + budget) & (start >= 0)[..., None]
    text = same & before & ~jnp.any(inside, axis=1, keepdims=True)
    count = jnp.maximum(jnp.sum(text, axis=2, keepdims=True), 1)
    share = text.astype(jnp.float32) / count
    mean = jnp.einsum("bit,btd->bid", share, embedded.astype(jnp.float32))
    return mean.reshape(-1, embedded.shape[-1])


def check(config: RelevanceConfig, side: int) -> None:
    """Check the settings of relevance pooling.

    Args:
        config: settings of the module.
        side: patches along a side of an image.

    Raises:
        ConfigError: no split of an image gives ``budget`` pieces, or another setting is invalid;
            the message names the setting and, for ``budget``, a value that works.
    """
    where = "config.model.connector.relevance"
    refuse_unread(config, where)
    if not config.budget:
        return
    for name in ("levels", "width"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{where}.{name}={getattr(config, name)} must be at least 1")
    if side % 2**config.levels:
        raise ConfigError(
            f"{where}.levels={config.levels}: cells of {2**config.levels} x {2**config.levels} do "
            f"not fill an image of {side} x {side} patches"
        )
    coarse, most = (side // 2**config.levels) ** 2, side**2
    if not coarse <= config.budget <= most or (config.budget - coarse) % 3:
        near = coarse + 3 * round((min(max(config.budget, coarse), most) - coarse) / 3)
        raise ConfigError(
            f"{where}.budget={config.budget} is not a possible number of tokens: {side} x {side} "
            f"patches are {coarse} cells of {config.levels} levels, and each cell that is split "
            f"adds three tokens, at most {most}; {near} would do"
        )
