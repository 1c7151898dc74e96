"""Parameters with logical axes, and the conversion of modules to flat dicts of arrays.

A module is an ``nnx.Module``. Training code splits it into a static graph and a flat dict ``path ->
array`` (:func:`split`, :func:`merge`), so that everything that a train step changes is a value.
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

_PARTS = 48
"""Most sums of which a long one is made: the more, the more there is to do at once, and to add up.
They stay on their devices where a matrix' rows are split over 2, 3 or a multiple of these.
"""

Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def fan_in(*dims: int) -> Initializer:
    """Initialize from a normal with variance 1 / prod(dims), which keeps the scale of inputs."""
    return normal(1.0 / math.sqrt(math.prod(dims)))


def normal(std: float) -> Initializer:
    """Initialize from a normal with standard deviation ``std``."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def zeros(_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Initialize to zeros."""
    return jnp.zeros(shape, jnp.float32)


def constant(value: float) -> Initializer:
    """Initialize to ``value``."""
    return lambda _key, shape: jnp.full(shape, value, jnp.float32)


def ones(_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Initialize to ones."""
    return jnp.ones(shape, jnp.float32)


@dataclasses.dataclass
class Init:
    """Source of initial parameters of a module, or of ``layers`` stacked modules.

    ``init.stacked(n)`` gives parameters a leading dim ``layers`` of size n, which
    ``jaxvlm.nn.stack`` scans over. There is no ``vmap``, which would leave logical axes stale.
    """

    rngs: nnx.Rngs
    layers: int = 0
    is_abstract: bool = False
    """Whether shapes alone are wanted: parameters are zeros then, which are quick to trace."""

    def stacked(self, num_layers: int) -> Init:
        """Return the same source of randomness, for ``num_layers`` stacked modules."""
        return dataclasses.replace(self, layers=num_layers)


def param(
    init: Init, shape: tuple[int, ...], logical: Logical, draw: Initializer, num_in: int = 0
) -> nnx.Param:
    """Create a float32 parameter with a logical axis for each dim.

    Args:
        init: source of randomness, and of the leading dim of stacked layers.
        shape: dims of one layer's parameter.
        logical: logical axes, one word per dim.
        draw: the initializer.
        num_in: for a linear map that only :func:`contract` reads: how many of its first dims are
            contracted. Adapters (LoRA) may be added to it. 0: not such a map.
    """
    if len(shape) != len(logical):
        raise ValueError(f"shape {shape} and axes {logical} differ in length")
    if init.layers:
        shape, logical = (init.layers, *shape), ("layers", *logical)
    value = (
        jax.lax.full(shape, 0, jnp.float32) if init.is_abstract else draw(init.rngs.params(), shape)
    )
    return nnx.Param(value, logical=logical, num_in=num_in)


def split(module: nnx.Module) -> tuple[Any, Params]:
    """Split a module into ``(graph, {path: array})``; the graph is static and hashable."""
    graph, state = nnx.split(module)
    flat = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    return graph, flat


def merge(graph: Any, params: Params) -> Any:
    """Rebuild the module of ``graph`` with parameters ``params``; the inverse of :func:`split`."""
    nested: dict[Any, Any] = {}
    for path, value in params.items():
        *folders, name = path.split("/")
        node = nested
        for folder in folders:
            node = node.setdefault(int(folder) if folder.isdigit() else folder, {})
        node[name] = value
    return nnx.merge(graph, nnx.State(nested))


def logical_axes(module: nnx.Module) -> dict[str, Logical]:
    """Return ``{path: logical axes}`` of every parameter."""
    return _metadata(module, "logical")


def linear_maps(module: nnx.Module) -> dict[str, int]:
    """Return ``{path: num_in}`` of every linear map that can have adapters; see :func:`param`."""
    return {path: num_in for path, num_in in _metadata(module, "num_in").items() if num_in}


def _metadata(module: nnx.Module, name: str) -> dict[str, Any]:
    _, state = nnx.split(module)
    return {"/".join(map(str, p)): x.get_metadata(name) for p, x in nnx.to_flat_state(state)}


class Weight:
    """Replacement for a linear map's array that multiplies in its own way (LoRA, int8)."""

    def contract(self, x: jax.Array, num_in: int, split: bool) -> jax.Array:
        """Multiply; arguments and result as in the function :func:`contract`."""
        raise NotImplementedError

    def dense(self) -> jax.Array:
        """Return the equivalent array, of a map without a leading dim of layers."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Weight:
        """Return itself for ``[...]``, which is how a parameter's value is read."""
        if index is not Ellipsis:
            raise IndexError("only [...]")
        return self


def affine(x: jax.Array, w: Any, b: Any, num_in: int = 1, split: bool = False) -> jax.Array:
    """Return :func:`contract` with parameter ``w``, plus parameter ``b`` unless it is ``None``."""
    y = contract(x, w[...], num_in, split)
    return y if b is None else y + b[...].astype(y.dtype)


def contract(
    x: jax.Array, w: jax.Array | Weight, num_in: int = 1, split: bool = False
) -> jax.Array:
    """Contract the last ``num_in`` dims of ``x`` with the first of ``w``.

    Args:
        x: [*lead, *in].
        w: [*in, *out], cast to ``x``'s dtype; or a :class:`Weight` instead of it.
        num_in: number of dims in ``in``.
        split: whether tokens are sharded over devices (``Axes.splits_rows``). Then the dims of
            ``lead`` are not merged: a merged dim cannot be sharded over both mesh axes, so the
            compiler would all-gather the sequences and every device would multiply all of them.
            Otherwise one 2-D matmul, a sixth faster in a train step on CPU.

    Returns:
        [*lead, *out], of ``x``'s dtype.
    """
    if isinstance(w, Weight):
        return w.contract(x, num_in, split)
    lead, inner, out = x.shape[: x.ndim - num_in], w.shape[:num_in], w.shape[num_in:]
    before = lead if split else (math.prod(lead),)
    matrix = w.astype(x.dtype).reshape(math.prod(inner), math.prod(out))
    rows = x.reshape(*before, math.prod(inner))
    if math.prod(lead) == 1:
        y = jax.lax.platform_dependent(rows, matrix, cuda=_one_row, default=jnp.matmul)
    else:
        y = rows @ matrix
    return y.reshape(*lead, *out)


def _one_row(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiply [..., 1, K] by [K, N] as sums of products, in float32.

    XLA for GPUs computes them where the matrix lies. Before a matmul, which is cuBLAS', it copies
    a layer's matrix out of the stack of layers: three times the bytes, at each token generated.
    Not made for training, where a row is never alone: the gradient keeps a float32 matrix.
    """
    parts = math.gcd(_PARTS, matrix.shape[0])
    products = x[..., None].astype(jnp.float32) * matrix.astype(jnp.float32)
    sums = jnp.sum(products.reshape(parts, -1, matrix.shape[1]), 1)
    # Kept apart: where it merges both sums and finds too little to do at once, XLA writes products.
    total = jnp.sum(jax.lax.optimization_barrier(sums), 0)
    return total.astype(x.dtype).reshape(*x.shape[:-1], -1)
