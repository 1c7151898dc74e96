"""Gradient reduction: each device sums over its local examples, then one quantized all-reduce.

Sources: an all-to-all instead of a ring, so that a value is rounded once on its way, and one mesh
axis after the other, the fast links first: qgZ of ZeRO++, arXiv 2306.10209, section 3.3. Rounding
errors are added to the next step's gradient: error feedback, arXiv 1809.07599.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxvlm.config import ConfigError
from jaxvlm.parallel.mesh import mesh_here
from jaxvlm.parallel.quantized_gather import BLOCK, LEAST
from jaxvlm.parallel.sharding import mesh_axes, without_axes
from jaxvlm.types import Params

ORDER = ("fsdp", "data")
"""Batch axes, from the fastest links to the slowest."""


def on_local_examples(
    loss_grad: Callable[..., tuple[Any, Params]], mesh: Mesh, axes: tuple[str, ...]
) -> Callable[..., tuple[Any, Params]]:
    """Run ``loss_grad`` on each batch shard, without an all-reduce of the gradients.

    Parameters must be replicated over ``axes``.

    Args:
        loss_grad: (params, frozen, batch, scale) -> (sums, gradients); a sum over examples.
        mesh: the device mesh.
        axes: batch axes of the mesh.

    Returns:
        The same function, but its gradients have a leading dim of batch shards, split over
        ``axes`` and not added up; its sums are added up.
    """

    def part(*args: Any) -> tuple[Any, Params]:
        sums, grads = loss_grad(*args)
        return jax.lax.psum(sums, axes), jax.tree.map(lambda g: g[None], grads)

    rows = _rows(mesh, axes)
    return jax.shard_map(
        part,
        mesh=mesh_here(mesh),
        in_specs=(P(), P(), rows, P()),
        out_specs=(P(), rows),
        axis_names=set(axes),
        check_vma=False,
    )


def on_local_shards(
    loss_grad: Callable[..., tuple[Any, Params]],
    mesh: Mesh,
    axes: tuple[str, ...],
    params: Mapping[str, P],
    frozen: Mapping[str, P],
) -> Callable[..., tuple[Any, Params]]:
    """Run ``loss_grad`` on each batch shard and each shard of the parameters.

    Args:
        loss_grad: see :func:`on_local_examples`; all-gathers parameters and reduces gradients.
        mesh: the device mesh.
        axes: batch axes of the mesh.
        params: the part of each trainable parameter's spec that is over ``axes``.
        frozen: the same of frozen parameters.

    Returns:
        The same function; gradients are sharded as their parameters, and sums are added up.
    """

    def part(*args: Any) -> tuple[Any, Params]:
        sums, grads = loss_grad(*args)
        return jax.lax.psum(sums, axes), grads

    return jax.shard_map(
        part,
        mesh=mesh_here(mesh),
        in_specs=(dict(params), dict(frozen), _rows(mesh, axes), P()),
        out_specs=(P(), dict(params)),
        axis_names=set(axes),
        check_vma=False,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class GradReduction:
    """All-reduce or reduce-scatter of the local gradients of :func:`on_local_examples`.

    Args:
        mesh: the device mesh.
        axes: batch axes that the local gradients are split over, in :data:`ORDER`.
        layout: sharding of the sums, by parameter path.
        bits: bits of a value on the wire: 16 is bfloat16; 8 and 4 are integers with a float32
            scale for each block of up to 256 values. Sums are taken in float32; one-dimensional
            arrays, and arrays without blocks of at least 32 values, are sent unquantized.
        feedback: error feedback: keep the rounding errors and add them to the next gradient.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    layout: Mapping[str, NamedSharding]
    bits: int = 32
    feedback: bool = False

    def __post_init__(self) -> None:
        for path, where in self.layout.items():
            for place in where.spec:
                own = [a for a in mesh_axes(place) if a in self.axes]
                if own != sorted(own, key=self.axes.index):
                    raise ConfigError(
                        f"{path}: split over {own}, but gradients are reduced over {self.axes} in "
                        "this order; name the axes of config.strategy.optimizer in that order"
                    )

    def init(self, params: Params) -> Params:
        """Return the initial rounding errors: zeros f32[shards, ...] by path, {} without them."""
        if not self.feedback:
            return {}
        parts = math.prod(self.mesh.shape[a] for a in self.axes)
        return {path: jnp.zeros((parts, *x.shape), jnp.float32) for path, x in params.items()}

    def where(self, path: str) -> NamedSharding:
        """Return the sharding of one path's leaf of :meth:`init`."""
        rest = [without_axes(place, self.axes) for place in self.layout[path].spec]
        return NamedSharding(self.mesh, P(*_rows(self.mesh, self.axes), *rest))

    def __call__(self, parts: Params, error: Params) -> tuple[Params, Params]:
        """(gradients of :func:`on_local_examples`, errors) -> (their sums, new errors)."""

        def part(grads: Params, error: Params) -> tuple[Params, Params]:
            sums, left = {}, {}
            for path, g in grads.items():
                g = g[0]
                if path in error:
                    g = g.astype(jnp.float32) + error[path][0]
                sums[path], lost = self._reduced(path, g)
                if path in error:
                    left[path] = lost[None]
            return sums, left

        rows = [{path: self.where(path).spec for path in tree} for tree in (parts, error)]
        sums = {path: self.layout[path].spec for path in parts}
        return self._on_devices(part, tuple(rows), (sums, rows[1]))(parts, error)

    def local(self, path: str, g: jax.Array) -> jax.Array:
        """Reduce one device's gradient, where all of :attr:`axes` are manual; without feedback."""

        def reduced(g: jax.Array) -> jax.Array:
            return self._reduced(path, g.astype(jnp.float32))[0]

        spec = P(*(without_axes(place, self.axes) for place in self.layout[path].spec))
        return self._on_devices(reduced, (spec,), spec)(g)

    def _on_devices(self, fn: Callable[..., Any], args: Any, out: Any) -> Callable[..., Any]:
        """Run ``fn`` on each device's own part.

        Of the axes that split a parameter too. Were these left to the compiler, it would all-gather
        the parameter over them before an all-to-all over another axis.
        """
        mesh = mesh_here(self.mesh)
        around = getattr(mesh, "manual_axes", ())
        left = {axis for axis in self.mesh.axis_names if axis not in around}
        return jax.shard_map(
            fn, mesh=mesh, in_specs=args, out_specs=out, axis_names=left, check_vma=False
        )

    def _reduced(self, path: str, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sum over all axes, sharded as ``layout`` says, and this device's rounding error.

        The error of a shard is kept at the shard's place by the device that has the shard; an
        error that several devices share is divided among them.
        """
        lost = jnp.zeros_like(g)
        starts: list[Any] = [0] * g.ndim
        part = 1.0
        for axis in self.axes:
            n, at = self.mesh.shape[axis], jax.lax.axis_index(axis)
            dim = self._dim(path, axis)
            blocks = self._blocks(g.shape, axis, dim) if self.bits < 32 else None
            if blocks is not None:
                rounded = _QuantizedReduction(axis, n, self.bits, *blocks)
                g, off = rounded.reduce_scatter(g)
                lost = _add_at(lost, part * off, starts)
                if dim is None:
                    g, off = rounded.all_gather(share := g)
                    own = list(starts)
                    own[rounded.cut] += at * share.shape[rounded.cut]
                    lost = _add_at(lost, part * off, own)
            elif dim is None:
                g = jax.lax.psum(g, axis)
            else:
                g = jax.lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
            if dim is None:
                part /= n
            else:
                starts[dim] += at * g.shape[dim]
        return g, lost

    def _dim(self, path: str, axis: str) -> int | None:
        """Return the dim of a sum that is split over ``axis``, or None."""
        spec = self.layout[path].spec
        return next((i for i, place in enumerate(spec) if axis in mesh_axes(place)), None)

    def _blocks(
        self, shape: tuple[int, ...], axis: str, dim: int | None
    ) -> tuple[int, int, int] | None:
        """Return the dim to split over ``axis``, the dim of the blocks, and values in a block."""
        n, own = self.mesh.shape[axis], list(shape)
        if len(shape) < 2:
            return None
        fit = [i for i, size in enumerate(own) if size % n == 0]
        cut = max(fit, key=lambda i: own[i], default=None) if dim is None else dim
        if cut is None or shape[cut] % n:
            return None
        own[cut] //= n
        along = max(range(len(own)), key=lambda i: own[i])
        even = 2 if self.bits == 4 else 1
        block = max(
            (b for b in range(even, min(BLOCK, own[along]) + 1, even) if own[along] % b == 0),
            default=0,
        )
        return (cut, along, block) if block >= LEAST else None


@dataclasses.dataclass(frozen=True)
class _QuantizedReduction:
    """A quantized reduction over one mesh axis."""

    axis: str
    parts: int
    bits: int
    cut: int
    along: int
    block: int

    def reduce_scatter(self, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reduce-scatter along ``cut``: this device's shard of the sum, and its rounding error."""
        n, cut = self.parts, self.cut
        shape = (*g.shape[:cut], n, g.shape[cut] // n, *g.shape[cut + 1 :])
        pieces = jnp.moveaxis(g.astype(jnp.float32).reshape(shape), cut, 0)
        sent = self._quantized(pieces)
        lost = pieces - self._dequantized(sent, pieces.shape)
        lost = jnp.moveaxis(lost, 0, cut).reshape(g.shape)
        got = [jax.lax.all_to_all(x, self.axis, 0, 0, tiled=True) for x in sent]
        return jnp.sum(self._dequantized(got, pieces.shape), axis=0), lost

    def all_gather(self, share: jax.Array) -> tuple[jax.Array, jax.Array]:
        """All-gather of the shards, each rounded once more, and the error of this device's."""
        sent = self._quantized(share[None])
        lost = share - self._dequantized(sent, (1, *share.shape))[0]
        got = [jax.lax.all_gather(x, self.axis, axis=0, tiled=True) for x in sent]
        pieces = jnp.moveaxis(self._dequantized(got, (self.parts, *share.shape)), 0, self.cut)
        shape = list(share.shape)
        shape[self.cut] *= self.parts
        return pieces.reshape(shape), lost

    def _quantized(self, x: jax.Array) -> list[jax.Array]:
        """Quantize [n, ...] to bf16, or to i8 with a dim for blocks (4 bits: two values a byte)
        and f32 scales."""
        if self.bits == 16:
            return [x.astype(jnp.bfloat16)]
        dim, most = self.along + 1, 2 ** (self.bits - 1) - 1
        count = x.shape[dim] // self.block
        cut = x.reshape(*x.shape[:dim], count, self.block, *x.shape[dim + 1 :])
        scale = jnp.max(jnp.abs(cut), axis=dim + 1, keepdims=True) / most
        values = jnp.round(cut / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
        if self.bits == 4:
            low, high = jnp.split(values, 2, axis=dim + 1)
            values = (low & 0xF) | (high << 4)
        return [values, scale]

    def _dequantized(self, sent: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
        if self.bits == 16:
            return sent[0].astype(jnp.float32)
        values, scale = sent
        if self.bits == 4:
            low, high = (values << 4) >> 4, values >> 4
            values = jnp.concatenate([low, high], axis=self.along + 2)
        return (values.astype(jnp.float32) * scale).reshape(shape)


def _add_at(x: jax.Array, y: jax.Array, starts: list[Any]) -> jax.Array:
    """Add ``y`` to the slice of ``x`` that begins at ``starts``."""
    old = jax.lax.dynamic_slice(x, starts, y.shape)
    return jax.lax.dynamic_update_slice(x, old + y, starts)


def _rows(mesh: Mesh, axes: tuple[str, ...]) -> P:
    """Return the layout of a leading dim of shards: the batch's, so that nothing is moved."""
    return P(tuple(sorted(axes, key=mesh.axis_names.index)))
