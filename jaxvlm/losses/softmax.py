"""InfoNCE's softmax, put together from tiles: what each row makes of all columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.losses.pairs import Facts, candidates, known, same_example, same_group
from jaxvlm.losses.similarity import crossed
from jaxvlm.losses.standing import Standing
from jaxvlm.parallel.exchange import Side

DIRECTIONS = (
    "query_to_document",
    "document_to_query",
    "query_to_query",
    "document_to_document",
)
"""What is told apart from what; from a query's side, or from its positive's."""


class About(NamedTuple):
    """What is known of rows, whose document is their positive, or of columns."""

    of: Facts
    query_seen: Any
    """bool[r, T]: which tokens have a vector; ``None``: a row has one."""
    document_seen: Any
    limit: Any = None
    """f32[r]: the logit above which nothing is a negative; of rows alone."""


class _Part(NamedTuple):
    """A softmax as far as it has come, f32[r] each."""

    most: jax.Array
    total: jax.Array
    positive: jax.Array
    """The sum of positives' logits."""
    num_positive: jax.Array

    def log(self) -> jax.Array:
        """The log of the sum of exponentials; 0 of none."""
        return jnp.where(self.total > 0, self.most + jnp.log(self.total), 0.0)

    def of_positive(self) -> jax.Array:
        """What a positive counts in their mean."""
        return 1.0 / jnp.maximum(self.num_positive, 1.0)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The :class:`~jaxvlm.parallel.exchange.Meeting` of InfoNCE."""

    parts: tuple[tuple[str, ...], ...]
    """Directions that share a softmax; the first of each has the positives."""

    def start(self, rows: Side) -> Any:
        """Softmaxes of nothing."""
        zero = jnp.zeros(rows.facts.limit.shape, jnp.float32)
        part = _Part(jnp.full_like(zero, -jnp.inf), zero, zero, zero)
        return (part,) * len(self.parts), Standing.start(len(zero))

    def tile(self, rows: Side, columns: Side, shared: Side) -> dict[str, jax.Array]:
        """Direction -> logits f32[r, c, K or 1]."""
        mine, some, a, b = rows.vectors, columns.vectors, rows.facts, columns.facts
        made = {}
        for direction in (d for part in self.parts for d in part):
            if direction == "query_to_document":
                x = crossed(mine["query"], a.query_seen, some["document"], b.document_seen)
            elif direction == "document_to_query":
                seen = None if a.document_seen is None else a.document_seen[:, None]
                x = crossed(some["query"], b.query_seen, mine["document"][:, None], seen)
                x = jnp.swapaxes(x, 0, 1)
            elif direction == "query_to_query":
                x = crossed(mine["query"], None, some["query"][:, None], None)
            else:
                x = crossed(mine["document"], None, some["document"], None)
            made[direction] = shared.vectors * x
        return made

    def add(self, carry: Any, tile: Any, rows: Side, columns: Side, shared: Side) -> Any:
        """With a tile's columns in every softmax that they are of."""
        parts, standing = carry
        roles = _roles(tile, rows.facts, columns.facts, shared.facts)
        logits, (negative, positive) = tile["query_to_document"], roles["query_to_document"]
        same = same_example(rows.facts.of, columns.facts.of)
        standing = standing.add(logits, negative, positive, same)
        made = []
        for directions, part in zip(self.parts, parts, strict=True):
            for direction in directions:
                part = _more(part, tile[direction], *roles[direction], direction == directions[0])
            made.append(part)
        return tuple(made), standing

    def finish(self, carry: Any, rows: Side) -> dict[str, jax.Array]:
        """``loss``, ``hit`` and ``own``, f32[r]."""
        parts, standing = carry
        losses = [part.log() - part.positive * part.of_positive() for part in parts]
        return standing.result(sum(losses) / len(parts), rows.facts.of.there[:, 0])

    def slope(
        self, carry: Any, d_result: Any, tile: Any, rows: Side, columns: Side, shared: Side
    ) -> dict[str, jax.Array]:
        """Of each logit: its share of the softmax, less a positive's share of the mean."""
        roles = _roles(tile, rows.facts, columns.facts, shared.facts)
        d_loss = jnp.where(rows.facts.of.there[:, 0], d_result["loss"], 0.0) / len(self.parts)
        made = {}
        for directions, part in zip(self.parts, carry[0], strict=True):
            log, share = part.log()[:, None, None], part.of_positive()[:, None, None]
            for direction in directions:
                negative, positive = roles[direction]
                d = jnp.where(negative | positive, jnp.exp(tile[direction] - log), 0.0)
                if direction == directions[0]:
                    d -= jnp.where(positive, share, 0.0)
                made[direction] = d * d_loss[:, None, None]
        return made


def _more(
    part: _Part, logits: jax.Array, negative: jax.Array, positive: jax.Array, leads: bool
) -> _Part:
    """``part`` with a tile's logits in it."""
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
    tile: Mapping[str, jax.Array], rows: About, columns: About, relation: Any
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Direction -> (negative, positive), bool of the logits' shape; neither is left out."""
    a, b = rows.of, columns.of
    others, positive = candidates(a, b, relation)
    none = jnp.zeros((), bool)
    both, together = (a.there[:, :1] & b.there[:, 0]), same_group(a, b)
    made = {"query_to_document": (others, positive)}
    if "document_to_query" in tile:
        groups = None if a.groups is None else a.groups[:, :1]
        first = a._replace(document_key=a.document_key[:, :1], groups=groups)
        theirs = jnp.swapaxes(known(b, first, relation), 0, 1)
        made["document_to_query"] = (both[..., None] & ~theirs, together[..., None])
    if "query_to_query" in tile:
        same = together | (a.query_key[:, None] == b.query_key)
        made["query_to_query"] = ((both & ~same)[..., None], none)
    if "document_to_document" in tile:
        made["document_to_document"] = (others & ~same_example(a, b)[..., None], none)
    under = {name: logits <= rows.limit[:, None, None] for name, logits in tile.items()}
    return {name: (negative & under[name], yes) for name, (negative, yes) in made.items()}
