"""A picture's patches as fewer tokens, more of them where the question looks.

The picture is a forest of squares: cells of 2^levels patches a side, each of four halves as large,
down to patches. Cells are split where they hold what scores high, the highest first, until there
are ``budget`` pieces. Every patch is in one of them, alone or in a mean: none is dropped. In Morton
order a cell's patches follow each other, so means are reshapes and a tree is arithmetic on indices.

Which cells are split is a choice, and has no gradient. The scores learn by a gate instead: each
patch is multiplied by 2 sigmoid(score) before any mean is taken. So those that were not chosen
learn too, from how much they should weigh in the mean that they are in. A gate behind the choice
would teach the chosen alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvlm.config import ConfigError, RelevanceConfig, refuse_unread
from jaxvlm.models.texture import CHANNELS
from jaxvlm.nn.norm import LayerNorm, unit
from jaxvlm.nn.param import Init, affine, contract, fan_in, param, zeros
from jaxvlm.order import MORTON, ROW_MAJOR, convert, pool
from jaxvlm.types import Batch

_FREQUENCIES = 6
"""Of a piece's place: waves of 2 to 1/16 pictures."""
_EPS = 1e-5


class Pieces(NamedTuple):
    """What a picture is cut into, in Morton order."""

    first: jax.Array
    """i32[B, K]: the first patch of each, in Morton order."""
    level: jax.Array
    """i32[B, K]: it has 2^level patches a side."""


class Relevance(nnx.Module):
    """Patches to ``budget`` tokens.

    Args:
        init: source of parameters.
        config: of this module, on.
        vision_width: of the tower's tokens.
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
        """Fewer tokens, and what says where they are from.

        Args:
            x: [B, P, D_vision] of a square picture, in Morton order.
            texture: [B, P, 13] of its patches, likewise.
            query: [B, D]: of :func:`question`; not read without ``config.query``.

        Returns:
            [B, K, D_vision], and [B, K, D] to be added once they are as wide.
        """
        side, levels = round(x.shape[1] ** 0.5), self.config.levels
        score = self.score(x, texture, query)
        pieces = choose(jax.lax.stop_gradient(score), levels, self.config.budget)
        gated = x * (2 * jax.nn.sigmoid(score))[..., None].astype(x.dtype)
        cells = [pool(gated, side, side, level) for level in range(levels + 1)]
        index = cell_index(pieces, side**2, levels)
        where = jnp.asarray(place_table(side, levels), x.dtype)[index]
        return _rows(jnp.concatenate(cells, axis=1), index), contract(where, self.w_place[...])

    def score(self, x: jax.Array, texture: jax.Array, query: jax.Array | None) -> jax.Array:
        """f32[B, P]: how relevant each patch is; arguments as of the call.

        Three scores, each standardised over the picture, in shares that are learned.
        *Information* is the logarithm of what a mean over the patch's cell would lose of it, in
        some learned directions. *Saliency* is an MLP of its texture. *Match* is the product with
        the question.
        """
        x = self.norm(x).astype(jnp.float32)
        side, levels = round(x.shape[1] ** 0.5), self.config.levels
        seen = contract(x, self.w_surprise[...])
        lost = seen - jnp.repeat(pool(seen, side, side, levels), 4**levels, axis=1)
        scores = [_standard(jnp.log1p(jnp.mean(jnp.square(lost), axis=-1) / _EPS))]
        hidden = jax.nn.gelu(affine(texture.astype(jnp.float32), self.w_texture, self.b_texture))
        scores.append(_standard(hidden @ self.w_salient[...]))
        if self.w_key is not None and self.w_query is not None:
            if query is None:
                raise ValueError("relevance.query=True takes the question")
            asked = contract(unit(query.astype(jnp.float32)), self.w_query[...])
            match = jnp.einsum("bpr,br->bp", contract(x, self.w_key[...]), asked)
            scores.append(_standard(match * (query.shape[-1] / self.config.width) ** 0.5))
        share = jax.nn.softmax(self.balance[...])
        # No factor of the sum is learned: one number's gradient would add up all patches' scores,
        # which mostly cancel, to rounding.
        return 2 * sum(part * one for part, one in zip(share, scores))


def _balance(_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Two scores alike, and little of the third, the question's: before it is learned it is noise
    that differs from question to question, by which the decoder does not learn to read a picture.
    """
    return jnp.asarray([0.0, 0.0, -3.0], jnp.float32)[: shape[0]]


def _standard(score: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 over a picture; a score that is everywhere the same becomes 0."""
    score = score - jnp.mean(score, axis=1, keepdims=True)
    return score * jax.lax.rsqrt(jnp.mean(jnp.square(score), axis=1, keepdims=True) + _EPS)


def choose(score: jax.Array, levels: int, budget: int) -> Pieces:
    """Cut pictures into ``budget`` pieces, the smallest where scores are high.

    A cell's score is the highest in it. It is as high as those of its parts, and cells lie before
    their parts, so the best cells of all sizes together, by one top-k, hold every one's parent.

    Args:
        score: f32[B, P] in Morton order.
        levels: of the coarsest cells.
        budget: K: cells of that level, and three more for each that is split.

    Returns:
        i32[B, K], twice.
    """
    P = score.shape[1]
    best = [jnp.max(score.reshape(len(score), -1, 4**level), axis=2) for level in _down(levels)]
    splits = (budget - P // 4**levels) // 3
    chosen = jax.lax.top_k(jnp.concatenate(best, axis=1), splits)[1]

    def one_picture(chosen: jax.Array) -> Pieces:
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

    return jax.vmap(one_picture)(chosen)


def _down(levels: int) -> range:
    """Levels whose cells can be split, the coarsest first."""
    return range(levels, 0, -1)


def cell_index(pieces: Pieces, patches: int, levels: int) -> jax.Array:
    """i32[B, K]: pieces among all cells of all levels, patches first."""
    before = np.cumsum([0, *(patches // 4**level for level in range(levels))])
    return jnp.asarray(before, jnp.int32)[pieces.level] + pieces.first // 4**pieces.level


def place_table(side: int, levels: int) -> np.ndarray:
    """f32[cells, F]: waves of the centres of all levels' cells, patches first, and the level."""
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
    """[B, K, D]: rows of [B, Q, D], each at most once: the gradient is a set."""

    def one(x: jax.Array, index: jax.Array) -> jax.Array:
        return x.at[index].get(unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(one)(x, index)


def question(embedded: jax.Array, batch: Batch, budget: int) -> jax.Array:
    """The mean embedding of each picture's question: of all that stands before the first answer.

    Only tokens that a model has been given when it begins to answer: those of the picture's own
    segment before the first token that is trained on. What comes later may hold the answer, or
    speak of it. Pictures' own places are left out.

    Args:
        embedded: [B, T, D].
        batch: of the same rows.
        budget: tokens of a picture.

    Returns:
        [B * I, D]; zeros where nothing is asked, or there is no picture.
    """
    start = batch.image_start
    at = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    here = jnp.take_along_axis(batch.segment, jnp.maximum(start, 0), axis=1)
    mine = (batch.segment[:, None] == here[..., None]) & (start >= 0)[..., None]  # [B, I, T]
    answer = mine & (batch.loss_weight > 0)[:, None]
    before = jnp.cumsum(answer, axis=2, dtype=jnp.int32) == 0
    inside = (start[..., None] <= at) & (at < start[..., None] + budget) & (start >= 0)[..., None]
    text = mine & before & ~jnp.any(inside, axis=1, keepdims=True)
    count = jnp.maximum(jnp.sum(text, axis=2, keepdims=True), 1)
    share = text.astype(jnp.float32) / count
    mean = jnp.einsum("bit,btd->bid", share, embedded.astype(jnp.float32))
    return mean.reshape(-1, embedded.shape[-1])


def check(config: RelevanceConfig, side: int) -> None:
    """Refuse a budget that no cut of a picture has.

    Args:
        config: of the module.
        side: patches of a picture.

    Raises:
        ConfigError: which field, and what would do.
    """
    where = "config.model.connector.relevance"
    refuse_unread(config, where)
    if not config.budget:
        return
    for name in ("levels", "width"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{where}.{name}={getattr(config, name)}: at least 1")
    if side % 2**config.levels:
        raise ConfigError(
            f"{where}.levels={config.levels}: cells of {2**config.levels} x {2**config.levels} do "
            f"not fill a picture of {side} x {side} patches"
        )
    coarse, most = (side // 2**config.levels) ** 2, side**2
    if not coarse <= config.budget <= most or (config.budget - coarse) % 3:
        near = coarse + 3 * round((min(max(config.budget, coarse), most) - coarse) / 3)
        raise ConfigError(
            f"{where}.budget={config.budget}: {side} x {side} patches are {coarse} cells of "
            f"{config.levels} levels, and three tokens more for each that is split, at most "
            f"{most}; {near} would do"
        )
