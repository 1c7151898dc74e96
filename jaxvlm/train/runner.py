"""Runners: the whole batch at once, in microbatches, or through a pipeline of stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError
from jaxvlm.parallel import backward, pipeline, slots
from jaxvlm.parallel.mesh import nearest_divisor, shards_here
from jaxvlm.parallel.reduce import on_own_rows
from jaxvlm.parallel.schedule import Schedule, timetable
from jaxvlm.train.objective import total
from jaxvlm.types import Batch, Loss, Out, Params, Runner, Sums

FEATURES = "features"
"""Among parameters: a batch's features, where their gradient is wanted too."""


@dataclasses.dataclass(frozen=True)
class PlainRunner:
    """Runs ``apply(params, batch) -> Out``; see ``jaxvlm.types.Runner``."""

    apply: Callable[[Params, Batch], Out]

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """The forward pass."""
        params, batch = _fed(params, batch)
        return self.apply({**params, **frozen}, batch)

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Gradients of ``params`` for the cotangent ``d_out`` of the output."""
        _, back = jax.vjp(lambda p: self.fwd(p, frozen, batch), params)
        return back(d_out)[0]

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """The loss's sums over ``batch`` and the gradient of ``sum_k scale_k * S_k``."""

        def objective(p: Params) -> tuple[jax.Array, Sums]:
            sums = loss(self.fwd(p, frozen, batch), batch)
            return total(sums, scale), sums

        (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return sums, grads


def _fed(params: Params, batch: Batch) -> tuple[Params, Batch]:
    """Parameters alone, and the batch with the features that were among them."""
    if FEATURES not in params:
        return params, batch
    own = {path: x for path, x in params.items() if path != FEATURES}
    return own, batch._replace(features=params[FEATURES])


def check_parts(parts: int, loss: Loss, rows: int) -> None:
    """Refuse microbatches that would change the gradient, or do not divide the batch.

    Raises:
        ConfigError: a loss that is no sum over examples, or ``rows`` that parts don't divide.
    """
    if parts > 1 and not loss.additive:
        raise ConfigError(
            f"config.microbatches={parts}: {type(loss).__name__} is not a sum over examples, so "
            "parts of a batch would give another gradient; set config.microbatches=1"
        )
    if parts < 1 or rows % parts:
        raise ConfigError(
            f"config.microbatches={parts} does not divide data.batch_size={rows}; "
            f"{nearest_divisor(rows, parts)} would do"
        )


def deal(batch: Any, parts: int, shards: int = 0) -> Any:
    """Rows [B, ...] as microbatches [parts, B / parts, ...], such that each device keeps its own.

    Args:
        batch: rows.
        parts: microbatches.
        shards: parts that the mesh splits rows in. Neighbours among a shard's rows go together,
            so that none is copied. 0: whatever the mesh, part m takes rows m, m + parts, ….
    """

    def one(x: jax.Array) -> jax.Array:
        if not shards:
            return jnp.moveaxis(x.reshape(len(x) // parts, parts, *x.shape[1:]), 1, 0)
        rows = len(x) // shards // parts
        x = jnp.moveaxis(x.reshape(shards, parts, rows, *x.shape[1:]), 1, 0)
        return x.reshape(parts, shards * rows, *x.shape[3:])

    return jax.tree.map(one, batch)


def undeal(x: jax.Array, shards: int = 0) -> jax.Array:
    """The inverse of :func:`deal`."""
    parts, rows = x.shape[:2]
    if not shards:
        return jnp.moveaxis(x, 0, 1).reshape(rows * parts, *x.shape[2:])
    x = jnp.moveaxis(x.reshape(parts, shards, rows // shards, *x.shape[2:]), 0, 1)
    return x.reshape(rows * parts, *x.shape[3:])


def _shared(out: Out) -> Out:
    """What of an output, or of its cotangent, rows have no part in."""
    return out._replace(hidden=None, aux=None)


@dataclasses.dataclass(frozen=True)
class Microbatched:
    """A runner over ``parts`` of the batch, one behind the other."""

    runner: Runner
    parts: int
    mesh: jax.sharding.Mesh | None = None
    """That rows lie on; ``None``: one device."""
    place: Callable[[Params], Params] = lambda grads: grads
    """Pins where each part's gradients lie before they are added, and their sum."""

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """The runner's own, but for ``aux``, which is of rows that are run together."""
        params, batch = _fed(params, batch)
        made = jax.lax.map(
            lambda part: self.runner.fwd(params, frozen, part)._replace(aux=None),
            deal(batch, self.parts, self._shards()),
        )
        shared = jax.tree.map(lambda x: x[0], _shared(made))
        return shared._replace(hidden=undeal(made.hidden, self._shards()))

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """As the runner's own; of what rows share, the first part takes the cotangent back."""

        def one(params: Params, rows: tuple[Batch, Any], number: jax.Array) -> tuple[Any, Params]:
            batch, d_hidden = rows
            d = jax.tree.map(lambda x: jnp.where(number == 0, x, 0), _shared(d_out))
            return (), self.runner.vjp(params, frozen, batch, d._replace(hidden=d_hidden))

        return self._added(params, (batch, d_out.hidden), one)[1]

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """As the runner's own, a part at a time; gradients add in float32.

        Raises:
            ConfigError: see :func:`check_parts`.
        """
        check_parts(self.parts, loss, batch.tokens.shape[0])

        def one(params: Params, rows: Batch, number: jax.Array) -> tuple[Sums, Params]:
            return self.runner.loss_grad(params, frozen, rows, loss, scale)

        return self._added(params, batch, one)

    def _added(self, params: Params, rows: Any, run: Callable[..., Any]) -> tuple[Any, Params]:
        """The sums of what ``run(params, a part of rows, its number)`` gives, and of gradients."""
        own = {path: x for path, x in params.items() if path != FEATURES}
        fed = {path: x for path, x in params.items() if path == FEATURES}

        def one(part: Any) -> tuple[Any, Params, Params]:
            rows, fed, number = part
            sums, grads = run({**own, **fed}, rows, number)
            return sums, grads, {path: grads.pop(path) for path in fed}

        def add(carry: Any, part: Any) -> tuple[Any, Params]:
            sums, grads, back = one(part)
            sums, grads = jax.tree.map(jnp.add, carry, (sums, self.place(grads)))
            return (sums, self.place(grads)), back

        shards = self._shards()
        dealt = (*deal((rows, fed), self.parts, shards), jnp.arange(self.parts))
        like = jax.eval_shape(one, jax.tree.map(lambda x: x[0], dealt))[:2]
        sums, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        (sums, grads), back = jax.lax.scan(add, (sums, self.place(grads)), dealt)
        return sums, {**grads, **{path: undeal(x, shards) for path, x in back.items()}}

    def _shards(self) -> int:
        return shards_here(self.mesh) if self.mesh else 1


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A runner whose microbatches go through the stages of a pipeline."""

    cut: pipeline.Cut
    mesh: jax.sharding.Mesh
    schedule: str
    chunks: int
    parts: int
    skip: bool = True
    """Whether a stage without work does nothing; see ``jaxvlm.parallel.backward``."""

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """Forward units alone, which keep nothing; ``aux`` is left out."""
        params, batch = _fed(params, batch)
        dealt, every = self._deal(batch), {**params, **frozen}
        out = pipeline.forward(self.cut, self._table(), self.mesh, every, dealt, self.skip)
        return out._replace(hidden=undeal(out.hidden, shards_here(self.mesh)))

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """There and back; of what rows share, the first microbatch takes the cotangent back."""
        d_hidden = self._deal(d_out.hidden)

        def objective(out: Out, part: Batch, number: jax.Array) -> tuple[jax.Array, Sums]:
            value = _inner(out.hidden, slots.take(d_hidden, number))
            each = jax.tree.map(_inner, _shared(out), _shared(d_out))
            shared = sum(jax.tree.leaves(each), jnp.float32(0))
            return value + jnp.where(number == 0, shared, 0), Sums({}, {})

        return self._back(params, frozen, batch, objective)[1]

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """As a plain runner's; the metric ``busy_stages`` is the share of units that work is in.

        Raises:
            ConfigError: see :func:`check_parts` and ``timetable``.
        """
        check_parts(self.parts, loss, batch.tokens.shape[0])

        def objective(out: Out, part: Batch, number: jax.Array) -> tuple[jax.Array, Sums]:
            sums = loss(out, part)
            return total(sums, scale), sums

        sums, grads, worked = self._back(params, frozen, batch, objective)
        units = jnp.float32(self.mesh.shape[pipeline.AXIS] * self._table().span)
        busy = (jnp.sum(worked).astype(jnp.float32), units)
        return sums._replace(metrics={**sums.metrics, "busy_stages": busy}), grads

    def _back(
        self, params: Params, frozen: Params, batch: Batch, objective: backward.Objective
    ) -> tuple[Sums, Params, jax.Array]:
        """Sums, gradients, and the units that were worked on."""
        own, batch = _fed(params, batch)
        sums, grads, worked, back = backward.loss_grad(
            self.cut,
            self._table(),
            self.mesh,
            own,
            frozen,
            self._deal(batch),
            objective,
            self.skip,
            FEATURES in params,
        )
        if back is not None:
            grads[FEATURES] = undeal(back, shards_here(self.mesh))
        return sums, grads, worked

    def _deal(self, rows: Any) -> Any:
        return deal(rows, self.parts, shards_here(self.mesh))

    def _table(self) -> Schedule:
        stages = self.mesh.shape[pipeline.AXIS]
        return timetable(self.schedule, stages, self.parts, self.chunks)


def _inner(x: jax.Array, d: jax.Array) -> jax.Array:
    """f32[]: the inner product."""
    return jnp.sum(x.astype(jnp.float32) * d.astype(jnp.float32))


def check_own_rows(bits: int, loss: Loss) -> None:
    """Refuse fewer bits on the wire for a loss whose gradient no device can take of its own rows.

    Raises:
        ConfigError: a loss that is no sum over examples.
    """
    if bits < 32 and not loss.additive:
        raise ConfigError(
            f"config.strategy.reduce_bits={bits}: {type(loss).__name__} is not a sum over "
            "examples, so a device cannot take the gradient of its own rows; leave it at 32"
        )


@dataclasses.dataclass(frozen=True)
class OnOwnRows:
    """A runner whose gradients are not added up over batch axes: ``Placement.reduce`` does it."""

    runner: Runner
    mesh: jax.sharding.Mesh
    axes: tuple[str, ...]

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """The runner's own."""
        return self.runner.fwd(params, frozen, batch)

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Gradients with a leading dim of parts. Of what rows share, the first row's device takes
        the cotangent back."""

        def own(params: Params, frozen: Params, rows: Any, shared: Any) -> tuple[Any, Params]:
            batch, d_hidden, first = rows
            d = jax.tree.map(lambda x: jnp.where(jnp.any(first), x, 0), shared)
            return (), self.runner.vjp(params, frozen, batch, d._replace(hidden=d_hidden))

        rows = batch, d_out.hidden, jnp.arange(len(d_out.hidden)) == 0
        run = on_own_rows(own, self.mesh, self.axes)
        return run(params, frozen, rows, _shared(d_out))[1]

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """Sums over all rows, and gradients with a leading dim of parts; see ``on_own_rows``."""

        def own(params: Params, frozen: Params, batch: Batch, scale: Any) -> tuple[Sums, Params]:
            return self.runner.loss_grad(params, frozen, batch, loss, scale)

        return on_own_rows(own, self.mesh, self.axes)(params, frozen, batch, scale)
