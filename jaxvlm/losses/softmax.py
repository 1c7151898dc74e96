"""InfoNCE's softmax, computed online over tiles of similarities."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.losses import positives
from jaxvlm.losses.rank_statistics import RankStatistics
from jaxvlm.losses.similarity import crossed
from jaxvlm.parallel.all_pairs import PairSide, PairSides

DIRECTIONS = (
    "query_to_document",
    "document_to_query",
    "query_to_query",
    "document_to_document",
)
"""Directions of comparison: from a query, or from its positive, to queries or documents."""


class SideMetadata(NamedTuple):
    """Keys and masks of rows, whose document is their positive, or of columns."""

    keys: positives.ExampleKeys
    query_mask: Any
    """bool[r, T]: True for tokens with an embedding; ``None``: one embedding for each query."""
    document_mask: Any
    """As ``query_mask``, of documents."""
    limit: Any = None
    """f32[r]: logits above it are false negatives; only for rows."""


class _Part(NamedTuple):
    """The state of an online softmax, f32[r] each."""

    most: jax.Array
    total: jax.Array
    positive: jax.Array
    """Sum of positives' logits."""
    num_positive: jax.Array

    def log(self) -> jax.Array:
        """Return the log of the sum of exponentials; 0 for an empty sum."""
        return jnp.where(self.total > 0, self.most + jnp.log(self.total), 0.0)

    def of_positive(self) -> jax.Array:
        """Return the weight of a positive in the mean over positives."""
        return 1.0 / jnp.maximum(self.num_positive, 1.0)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The :class:`~jaxvlm.parallel.all_pairs.PairTile` of InfoNCE."""

    parts: tuple[tuple[str, ...], ...]
    """Directions that share a softmax; the first of each has the positives."""

    def start(self, rows: PairSide) -> Any:
        """Return empty softmaxes and rank statistics."""
        zero = jnp.zeros(rows.metadata.limit.shape, jnp.float32)
        part = _Part(jnp.full_like(zero, -jnp.inf), zero, zero, zero)
        return (part,) * len(self.parts), RankStatistics.start(len(zero))

    def tile(self, sides: PairSides) -> dict[str, jax.Array]:
        """Return direction -> logits f32[r, c, K or 1]."""
        (mine, a), (some, b), (factor, _) = sides
        logits = {}
        for direction in (d for part in self.parts for d in part):
            if direction == "query_to_document":
                x = crossed(mine["query"], a.query_mask, some["document"], b.document_mask)
            elif direction == "document_to_query":
                mask = None if a.document_mask is None else a.document_mask[:, None]
                x = crossed(some["query"], b.query_mask, mine["document"][:, None], mask)
                x = jnp.swapaxes(x, 0, 1)
            elif direction == "query_to_query":
                x = crossed(mine["query"], None, some["query"][:, None], None)
            else:
                x = crossed(mine["document"], None, some["document"], None)
            logits[direction] = factor * x
        return logits

    def add(self, carry: Any, tile: Any, sides: PairSides) -> Any:
        """Add a tile's columns to the softmaxes of their directions."""
        parts, ranks = carry
        roles = _roles(tile, sides)
        logits, (negative, positive) = tile["query_to_document"], roles["query_to_document"]
        same = positives.same_example(sides.rows.metadata.keys, sides.columns.metadata.keys)
        ranks = ranks.add(logits, negative, positive, same)
        new = []
        for directions, part in zip(self.parts, parts, strict=True):
            for direction in directions:
                part = _more(part, tile[direction], *roles[direction], direction == directions[0])
            new.append(part)
        return tuple(new), ranks

    def finish(self, carry: Any, rows: PairSide) -> dict[str, jax.Array]:
        """Return ``loss``, ``hit`` and ``own``, f32[r]."""
        parts, ranks = carry
        losses = [part.log() - part.positive * part.of_positive() for part in parts]
        return ranks.result(sum(losses) / len(parts), rows.metadata.keys.valid[:, 0])

    def slope(self, carry: Any, d_result: Any, tile: Any, sides: PairSides) -> dict[str, jax.Array]:
        """Return the gradient of each logit: its softmax weight, less a positive's weight."""
        roles, valid = _roles(tile, sides), sides.rows.metadata.keys.valid[:, 0]
        d_loss = jnp.where(valid, d_result["loss"], 0.0) / len(self.parts)
        slopes = {}
        for directions, part in zip(self.parts, carry[0], strict=True):
            log, share = part.log()[:, None, None], part.of_positive()[:, None, None]
            for direction in directions:
                negative, positive = roles[direction]
                d = jnp.where(negative | positive, jnp.exp(tile[direction] - log), 0.0)
                if direction == directions[0]:
                    d -= jnp.where(positive, share, 0.0)
                slopes[direction] = d * d_loss[:, None, None]
        return slopes


def _more(
    part: _Part, logits: jax.Array, negative: jax.Array, positive: jax.Array, leads: bool
) -> _Part:
    """Add a tile's logits to ``part``."""
    logits = jnp.where(negative | positive, logits, -jnp.inf)
    most = jnp.maximum(part.most, jnp.max(logits, axis=(1, 2)))
    origin = jnp.where(jnp.isfinite(most), most, 0.0)  # nothing yet: exp(-inf) is 0
    total = part.total * jnp.exp(part.most - origin)
    total += jnp.sum(jnp.exp(logits - origin[:, None, None]), axis=(1, 2))
    part = part._replace(most=most, total=total)
    if not leads:
        return part
    return part._replace(
        positive=part.positive + jnp.sum(jnp.where(positive, logits, 0.0), axis=(1, 2)),
        num_positive=part.num_positive + jnp.sum(positive, axis=(1, 2), dtype=jnp.float32),
    )


def _roles(
    tile: Mapping[str, jax.Array], sides: PairSides
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return direction -> (negative, positive), bool of the logits' shape; the rest is ignored."""
    rows, columns, index = (side.metadata for side in sides)
    a, b = rows.keys, columns.keys
    others, positive = positives.candidates(a, b, index)
    none = jnp.zeros((), bool)
    both, together = (a.valid[:, :1] & b.valid[:, 0]), positives.same_group(a, b)
    roles = {"query_to_document": (others, positive)}
    if "document_to_query" in tile:
        groups = None if a.groups is None else a.groups[:, :1]
        first = a._replace(document_key=a.document_key[:, :1], groups=groups)
        known = jnp.swapaxes(positives.is_no_negative(b, first, index), 0, 1)
        roles["document_to_query"] = (both[..., None] & ~known, together[..., None])
    if "query_to_query" in tile:
        same = together | (a.query_key[:, None] == b.query_key)
        roles["query_to_query"] = ((both & ~same)[..., None], none)
    if "document_to_document" in tile:
        roles["document_to_document"] = (others & ~positives.same_example(a, b)[..., None], none)
    under = {name: logits <= rows.limit[:, None, None] for name, logits in tile.items()}
    return {name: (negative & under[name], yes) for name, (negative, yes) in roles.items()}
