"""Parameters that say what their dims mean, and the two ways to see a module.

A module is an ``nnx.Module``; training code sees it as a static graph and a flat dict
``path -> array`` (:func:`split`, :func:`merge`), so that everything a step changes is a value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.types import Logical, Params

Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def fan_in(*dims: int) -> Initializer:
    """Normal with variance 1 / prod(dims): outputs keep their input's scale."""
    return normal(1.0 / math.sqrt(math.prod(dims)))


def normal(std: float) -> Initializer:
    """Normal of standard deviation ``std``."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def zeros(_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All zeros."""
    return jnp.zeros(shape, jnp.float32)


def constant(value: float) -> Initializer:
    """All ``value``."""
    return lambda _key, shape: jnp.full(shape, value, jnp.float32)


def ones(_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All ones."""
    return jnp.ones(shape, jnp.float32)


@dataclasses.dataclass
class Init:
    """Draws the parameters of a module, or of ``layers`` modules at once.

    ``init.stacked(n)`` gives parameters a leading dim ``layers`` of size n, which
    ``jaxvlm.nn.stack`` scans over. No ``vmap``, so the words stay true.
    """

    rngs: nnx.Rngs
    layers: int = 0

    def stacked(self, num_layers: int) -> Init:
        """The same source of randomness, for ``num_layers`` modules at once."""
        return dataclasses.replace(self, layers=num_layers)


def param(
    init: Init, shape: tuple[int, ...], logical: Logical, draw: Initializer, num_in: int = 0
) -> nnx.Param:
    """A float32 parameter, its meaning beside its shape.

    Args:
        init: where randomness comes from.
        shape: dims of one layer's parameter.
        logical: one word a dim.
        draw: the initializer.
        num_in: of a linear map that is only ever given to :func:`contract`: how many of its
            first dims are the input's. An adapter may stand beside it.
    """
    if len(shape) != len(logical):
        raise ValueError(f"shape {shape} and axes {logical} differ in length")
    if init.layers:
        shape, logical = (init.layers, *shape), ("layers", *logical)
    return nnx.Param(draw(init.rngs.params(), shape), logical=logical, num_in=num_in)


def split(module: nnx.Module) -> tuple[Any, Params]:
    """``(graph, {path: array})`` of a module; the graph is static and hashable."""
    graph, state = nnx.split(module)
    flat = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    return graph, flat


def merge(graph: Any, params: Params) -> Any:
    """The module of ``graph`` with the parameters ``params``; inverse of :func:`split`."""
    nested: dict[Any, Any] = {}
    for path, value in params.items():
        *folders, name = path.split("/")
        place = nested
        for folder in folders:
            place = place.setdefault(int(folder) if folder.isdigit() else folder, {})
        place[name] = value
    return nnx.merge(graph, nnx.State(nested))


def logical_axes(module: nnx.Module) -> dict[str, Logical]:
    """``{path: words}`` of every parameter."""
    _, state = nnx.split(module)
    return {
        "/".join(map(str, p)): leaf.get_metadata("logical") for p, leaf in nnx.to_flat_state(state)
    }


def linear_maps(module: nnx.Module) -> dict[str, int]:
    """``{path: num_in}`` of every parameter that is a linear map; see :func:`param`."""
    _, state = nnx.split(module)
    found = {
        "/".join(map(str, p)): leaf.get_metadata("num_in") for p, leaf in nnx.to_flat_state(state)
    }
    return {path: num_in for path, num_in in found.items() if num_in}


class Weight:
    """What may stand in the place of a linear map's array: it knows how to multiply."""

    def contract(self, x: jax.Array, num_in: int, split: bool) -> jax.Array:
        """As the function :func:`contract`."""
        raise NotImplementedError

    def dense(self) -> jax.Array:
        """The array that it stands for; of a map without a dim of layers."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Weight:
        """Itself, for ``[...]``: so a parameter's value is read."""
        if index is not Ellipsis:
            raise IndexError("only [...]")
        return self


def affine(x: jax.Array, w: Any, b: Any, num_in: int = 1, split: bool = False) -> jax.Array:
    """:func:`contract` with the parameter ``w``, plus the parameter ``b`` unless it is ``None``."""
    y = contract(x, w[...], num_in, split)
    return y if b is None else y + b[...].astype(y.dtype)


def contract(
    x: jax.Array, w: jax.Array | Weight, num_in: int = 1, split: bool = False
) -> jax.Array:
    """``x``'s last ``num_in`` dims against ``w``'s first: ``[..., in] x [in, out] -> [..., out]``.

    Args:
        x: [*lead, *in].
        w: [*in, *out]; taken in ``x``'s dtype. Or what stands in its place.
        num_in: how many dims ``in`` is.
        split: whether tokens are split over devices (``Axes.splits_rows``). Their dim stays apart
            from the rows' then, for what both axes split does not fit in one dim: the compiler
            would gather the rows, and each device would multiply them all. Else one 2-D matmul,
            a sixth faster in a train step on CPU.

    Returns:
        [*lead, *out], of ``x``'s dtype.
    """
    if isinstance(w, Weight):
        return w.contract(x, num_in, split)
    lead, inner, out = x.shape[: x.ndim - num_in], w.shape[:num_in], w.shape[num_in:]
    before = lead if split else (math.prod(lead),)
    y = x.reshape(*before, math.prod(inner)) @ w.astype(x.dtype).reshape(
        math.prod(inner), math.prod(out)
    )
    return y.reshape(*lead, *out)
