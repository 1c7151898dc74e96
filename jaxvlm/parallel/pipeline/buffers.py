"""Buffers of a pipeline: residuals that one unit leaves for another, in slots of one array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Flow = dict[str, jax.Array]


def record(f: Any, own: Any, flow: Any, known: Any) -> tuple[Any, list[jax.Array], Any]:
    """Run ``f(own, flow)`` and record its vjp.

    Returns:
        The output; the residuals that are not among ``known``; and a static description of the
        vjp for :func:`back`.
    """
    out, back = jax.vjp(f, own, flow)
    leaves, tree = jax.tree.flatten(back)
    place = {id(x): i for i, x in enumerate(jax.tree.leaves(known))}
    where = tuple(place.get(id(x), -1) for x in leaves)
    return out, [jnp.asarray(x) for x, i in zip(leaves, where) if i < 0], (tree, where)


def back(how: Any, known: Any, kept: list[jax.Array]) -> Any:
    """Rebuild the vjp function of :func:`record` from known values and kept residuals."""
    tree, where = how
    available, rest = jax.tree.leaves(known), iter(kept)
    return tree.unflatten([available[i] if i >= 0 else next(rest) for i in where])


def zeros(tree: Any, *lead: int) -> Any:
    """Return zeros like a tree, with these leading dims added."""
    return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), tree)


def where(yes: Any, a: Flow, b: Flow) -> Flow:
    """Select ``a`` where ``yes``, else ``b``."""
    return jax.tree.map(lambda x, y: jnp.where(yes, x, y), a, b)


def take(tree: Any, i: Any) -> Any:
    """Return index ``i`` of the leading dim; index 0 for -1."""
    at = jnp.maximum(i, 0)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, keepdims=False), tree)


def put(tree: Any, new: Any, i: Any, yes: Any = True) -> Any:
    """Set index ``i`` of the leading dim to ``new``, if ``yes``."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        if yes is not True:
            y = jnp.where(yes, y, jax.lax.dynamic_index_in_dim(x, i, keepdims=False))
        return jax.lax.dynamic_update_index_in_dim(x, y, i, 0)

    return jax.tree.map(one, tree, new)


def add_at(tree: Any, new: Any, i: Any) -> Any:
    """Add ``new`` at index ``i`` of the leading dim."""
    return jax.tree.map(lambda x, y: x.at[i].add(y), tree, new)
