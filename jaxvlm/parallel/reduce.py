"""Gradients summed by each device over its own rows, and added over devices once, in few bits.

Sources: the all-to-all instead of a ring, so that a value is rounded once on its way, and level by
level, the fast links first: qgZ of ZeRO++, arXiv 2306.10209, section 3.3. What rounding takes away
is added to the next step's gradient: error feedback, arXiv 1809.07599.
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
from jaxvlm.parallel.quantized import BLOCK, LEAST
from jaxvlm.types import Params

ORDER = ("fsdp", "data")
"""Batch axes, the fastest links first."""
BITS = (32, 16, 8, 4)


def on_own_rows(
    loss_grad: Callable[..., tuple[Any, Params]], mesh: Mesh, axes: tuple[str, ...]
) -> Callable[..., tuple[Any, Params]]:
    """``loss_grad`` on each part of the rows apart, parameters being whole on ``axes``.

    Args:
        loss_grad: (params, frozen, rows, scale) -> (sums, gradients); a sum over rows.
        mesh: of both.
        axes: batch axes of the mesh.

    Returns:
        The same, but gradients have a leading dim of parts, split over ``axes`` and not added up.
    """

    def part(*args: Any) -> tuple[Any, Params]:
        sums, grads = loss_grad(*args)
        return jax.lax.psum(sums, axes), jax.tree.map(lambda g: g[None], grads)

    rows = _rows(mesh, axes)
    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(P(), P(), rows, P()),
        out_specs=(P(), rows),
        axis_names=set(axes),
        check_vma=False,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction:
    """How the parts of :func:`on_own_rows` are added up.

    Args:
        mesh: of the run.
        axes: batch axes that parts lie on, in :data:`ORDER`.
        layout: by path, where sums will lie.
        bits: of a value on its way: 16 are bfloat16, 8 and 4 integers with a float32 scale for each
            block of up to 256. Sums are taken in float32; vectors, and arrays that have no blocks
            of 32, are sent as such.
        feedback: keep what rounding took away, and add it to the next gradient.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    layout: Mapping[str, NamedSharding]
    bits: int = 32
    feedback: bool = False

    def __post_init__(self) -> None:
        for path, where in self.layout.items():
            for place in where.spec:
                own = [a for a in _tuple(place) if a in self.axes]
                if own != sorted(own, key=self.axes.index):
                    raise ConfigError(
                        f"{path}: split over {own}, and gradients are added over {self.axes} in "
                        "this order; name the axes of config.strategy.optimizer in it"
                    )

    def init(self, params: Params) -> Params:
        """Zeros in the place of what was rounded away: f32[parts, ...] by path."""
        if not self.feedback:
            return {}
        parts = math.prod(self.mesh.shape[a] for a in self.axes)
        return {path: jnp.zeros((parts, *x.shape), jnp.float32) for path, x in params.items()}

    def where(self, path: str) -> NamedSharding:
        """Where a path's part of :meth:`init` lies."""
        rest = [_without(place, self.axes) for place in self.layout[path].spec]
        return NamedSharding(self.mesh, P(*_rows(self.mesh, self.axes), *rest))

    def __call__(self, parts: Params, error: Params) -> tuple[Params, Params]:
        """(gradients of :func:`on_own_rows`, errors) -> (their sums, new errors)."""

        def part(grads: Params, error: Params) -> tuple[Params, Params]:
            sums, left = {}, {}
            for path, g in grads.items():
                g = g[0]
                if path in error:
                    g = g.astype(jnp.float32) + error[path][0]
                sums[path], lost = self._added(path, g)
                if path in error:
                    left[path] = lost[None]
            return sums, left

        spec = {
            path: P(*(_only(place, self.axes) for place in self.layout[path].spec))
            for path in parts
        }
        rows = _rows(self.mesh, self.axes)
        return jax.shard_map(
            part,
            mesh=self.mesh,
            in_specs=(rows, rows),
            out_specs=(spec, rows),
            axis_names=set(self.axes),
            check_vma=False,
        )(parts, error)

    def _added(self, path: str, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sum over all axes, split as wanted, and what rounding took away on this device.

        What is lost of a share is kept at the share's place by the device that has it; what
        several devices lose alike, by each its part.
        """
        lost = jnp.zeros_like(g)
        starts: list[Any] = [0] * g.ndim
        part = 1.0
        for axis in self.axes:
            n, at = self.mesh.shape[axis], jax.lax.axis_index(axis)
            dim = self._dim(path, axis)
            blocks = self._blocks(path, g.shape, axis, dim) if self.bits < 32 else None
            if blocks is not None:
                rounded = _Rounded(axis, n, self.bits, *blocks)
                g, off = rounded.added(g)
                lost = _add_at(lost, part * off, starts)
                if dim is None:
                    g, off = rounded.gathered(share := g)
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
        """The dim of a sum that is split over ``axis``."""
        spec = self.layout[path].spec
        return next((i for i, place in enumerate(spec) if axis in _tuple(place)), None)

    def _blocks(
        self, path: str, shape: tuple[int, ...], axis: str, dim: int | None
    ) -> tuple[int, int, int] | None:
        """The dim to split over ``axis``, the dim that blocks lie along, values a block."""
        n, spec = self.mesh.shape[axis], self.layout[path].spec
        own = [
            size // math.prod(self.mesh.shape[a] for a in _tuple(place) if a not in self.axes)
            for size, place in zip(shape, [*spec, *[None] * len(shape)])
        ]
        if len(shape) < 2:
            return None
        fit = [i for i, size in enumerate(own) if size == shape[i] and size % n == 0]
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
class _Rounded:
    """A sum over one axis in integers."""

    axis: str
    parts: int
    bits: int
    cut: int
    along: int
    block: int

    def added(self, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        """This device's share of the sum along ``cut``, and what rounding took away here."""
        n, cut = self.parts, self.cut
        pieces = g.astype(jnp.float32).reshape(
            *g.shape[:cut], n, g.shape[cut] // n, *g.shape[cut + 1 :]
        )
        pieces = jnp.moveaxis(pieces, cut, 0)
        sent = self._round(pieces)
        lost = pieces - self._whole(sent, pieces.shape)
        lost = jnp.moveaxis(lost, 0, cut).reshape(g.shape)
        got = [jax.lax.all_to_all(x, self.axis, 0, 0, tiled=True) for x in sent]
        return jnp.sum(self._whole(got, pieces.shape), axis=0), lost

    def gathered(self, share: jax.Array) -> tuple[jax.Array, jax.Array]:
        """All shares, each rounded once more, and what that took away of this device's."""
        sent = self._round(share[None])
        lost = share - self._whole(sent, (1, *share.shape))[0]
        got = [jax.lax.all_gather(x, self.axis, axis=0, tiled=True) for x in sent]
        pieces = jnp.moveaxis(self._whole(got, (self.parts, *share.shape)), 0, self.cut)
        shape = list(share.shape)
        shape[self.cut] *= self.parts
        return pieces.reshape(shape), lost

    def _round(self, x: jax.Array) -> list[jax.Array]:
        """[n, ...] -> bf16, or i8 with blocks in a dim of their own (of 4 bits: two a byte) and
        their f32 scales."""
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

    def _whole(self, sent: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
        if self.bits == 16:
            return sent[0].astype(jnp.float32)
        values, scale = sent
        if self.bits == 4:
            low, high = (values << 4) >> 4, values >> 4
            values = jnp.concatenate([low, high], axis=self.along + 2)
        return (values.astype(jnp.float32) * scale).reshape(shape)


def _add_at(x: jax.Array, y: jax.Array, starts: list[Any]) -> jax.Array:
    """``x`` with ``y`` added where ``starts`` say."""
    there = jax.lax.dynamic_slice(x, starts, y.shape)
    return jax.lax.dynamic_update_slice(x, there + y, starts)


def _rows(mesh: Mesh, axes: tuple[str, ...]) -> P:
    """The layout of a leading dim of parts: that of a batch's rows, so that none is moved."""
    return P(tuple(sorted(axes, key=mesh.axis_names.index)))


def _tuple(place: Any) -> tuple[str, ...]:
    if place is None:
        return ()
    return (place,) if isinstance(place, str) else tuple(place)


def _only(place: Any, axes: tuple[str, ...]) -> Any:
    return tuple(a for a in _tuple(place) if a in axes) or None


def _without(place: Any, axes: tuple[str, ...]) -> Any:
    return tuple(a for a in _tuple(place) if a not in axes) or None
