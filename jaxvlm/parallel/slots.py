"""A pipeline's memory: what a unit leaves for another, kept in slots of one array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Flow = dict[str, jax.Array]


def record(f: Any, own: Any, flow: Any, known: Any) -> tuple[Any, list[jax.Array], Any]:
    """``f(own, flow)``, what its way back needs besides ``known``, and (static) how it goes."""
    out, back = jax.vjp(f, own, flow)
    leaves, tree = jax.tree.flatten(back)
    place = {id(x): i for i, x in enumerate(jax.tree.leaves(known))}
    where = tuple(place.get(id(x), -1) for x in leaves)
    return out, [jnp.asarray(x) for x, i in zip(leaves, where) if i < 0], (tree, where)


def back(how: Any, known: Any, kept: list[jax.Array]) -> Any:
    """The way back of :func:`record`."""
    tree, where = how
    at_hand, rest = jax.tree.leaves(known), iter(kept)
    return tree.unflatten([at_hand[i] if i >= 0 else next(rest) for i in where])


def zeros(tree: Any, *lead: int) -> Any:
    """Zeros like a tree, with these dims in front."""
    return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), tree)


def where(yes: Any, a: Flow, b: Flow) -> Flow:
    """``a`` where ``yes``, else ``b``."""
    return jax.tree.map(lambda x, y: jnp.where(yes, x, y), a, b)


def take(tree: Any, i: Any) -> Any:
    """What is at ``i`` of the leading dim; at 0 for -1."""
    at = jnp.maximum(i, 0)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, keepdims=False), tree)


def put(tree: Any, new: Any, i: Any, yes: Any = True) -> Any:
    """``tree`` with ``new`` at ``i`` of its leading dim, if ``yes``."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        if yes is not True:
            y = jnp.where(yes, y, jax.lax.dynamic_index_in_dim(x, i, keepdims=False))
        return jax.lax.dynamic_update_index_in_dim(x, y, i, 0)

    return jax.tree.map(one, tree, new)


def add_at(tree: Any, new: Any, i: Any) -> Any:
    """``tree`` with ``new`` added at ``i`` of its leading dim."""
    return jax.tree.map(lambda x, y: x.at[i].add(y), tree, new)
