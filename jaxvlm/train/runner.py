"""Runners: the whole batch at once, in microbatches, or through a pipeline of stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError
from jaxvlm.parallel import pipeline
from jaxvlm.parallel.mesh import nearest_divisor
from jaxvlm.parallel.reduce import on_own_rows
from jaxvlm.parallel.schedule import timetable
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


def deal(batch: Any, parts: int) -> Any:
    """Rows [B, ...] as microbatches [parts, B / parts, ...].

    Rows are dealt like cards, part m taking rows m, m + parts, …, so that each device keeps
    its own rows and nothing is sent.
    """

    def one(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)

    return jax.tree.map(one, batch)


def undeal(x: jax.Array) -> jax.Array:
    """The inverse of :func:`deal`."""
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


@dataclasses.dataclass(frozen=True)
class _Around:
    """A runner whose ``loss_grad`` goes another way than that of the one it is around."""

    runner: Runner

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """The runner's own: undivided."""
        return self.runner.fwd(params, frozen, batch)

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """The runner's own: undivided."""
        return self.runner.vjp(params, frozen, batch, d_out)


@dataclasses.dataclass(frozen=True)
class Microbatched(_Around):
    """A runner that sums ``loss_grad`` of another over ``parts`` of the batch; see :func:`deal`."""

    parts: int
    place: Callable[[Params], Params] = lambda grads: grads
    """Pins where each part's gradients lie before they are added, and their sum."""

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """As the runner's own, a part at a time; gradients add in float32.

        Raises:
            ConfigError: see :func:`check_parts`.
        """
        rows = batch.tokens.shape[0]
        check_parts(self.parts, loss, rows)

        own = {path: x for path, x in params.items() if path != FEATURES}
        rows = {path: x for path, x in params.items() if path == FEATURES}

        def one(part: tuple[Batch, Params]) -> tuple[Sums, Params, Params]:
            batch, rows = part
            sums, grads = self.runner.loss_grad({**own, **rows}, frozen, batch, loss, scale)
            return sums, grads, {path: grads.pop(path) for path in rows}

        def add(carry: Any, part: tuple[Batch, Params]) -> tuple[Any, Params]:
            sums, grads, back = one(part)
            sums, grads = jax.tree.map(jnp.add, carry, (sums, self.place(grads)))
            return (sums, self.place(grads)), back

        dealt = deal((batch, rows), self.parts)
        like = jax.eval_shape(one, jax.tree.map(lambda x: x[0], dealt))[:2]
        sums, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        (sums, grads), back = jax.lax.scan(add, (sums, self.place(grads)), dealt)
        return sums, {**grads, **jax.tree.map(undeal, back)}


@dataclasses.dataclass(frozen=True)
class Pipelined(_Around):
    """A runner whose ``loss_grad`` goes through the stages of a pipeline."""

    cut: pipeline.Cut
    mesh: jax.sharding.Mesh
    schedule: str
    chunks: int
    parts: int
    skip: bool = True
    """Whether a stage without work does nothing; see ``jaxvlm.parallel.pipeline``."""

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """As the runner's own; the metric ``busy_stages`` is the share of units that work is in.

        Raises:
            ConfigError: see :func:`check_parts` and ``timetable``.
        """
        check_parts(self.parts, loss, batch.tokens.shape[0])
        stages = self.mesh.shape[pipeline.AXIS]
        table = timetable(self.schedule, stages, self.parts, self.chunks)

        def objective(out: Out, part: Batch) -> tuple[jax.Array, Sums]:
            sums = loss(out, part)
            return total(sums, scale), sums

        own, batch = _fed(params, batch)
        sums, grads, worked, back = pipeline.loss_grad(
            self.cut,
            table,
            self.mesh,
            own,
            frozen,
            deal(batch, self.parts),
            objective,
            self.skip,
            FEATURES in params,
        )
        if back is not None:
            grads[FEATURES] = undeal(back)
        units = jnp.float32(stages * table.span)
        busy = (jnp.sum(worked).astype(jnp.float32), units)
        return sums._replace(metrics={**sums.metrics, "busy_stages": busy}), grads


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
class OnOwnRows(_Around):
    """A runner whose gradients are not added up over batch axes: ``Placement.reduce`` does it."""

    mesh: jax.sharding.Mesh
    axes: tuple[str, ...]

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """Sums over all rows, and gradients with a leading dim of parts; see ``on_own_rows``."""

        def own(params: Params, frozen: Params, batch: Batch, scale: Any) -> tuple[Sums, Params]:
            return self.runner.loss_grad(params, frozen, batch, loss, scale)

        return on_own_rows(own, self.mesh, self.axes)(params, frozen, batch, scale)
