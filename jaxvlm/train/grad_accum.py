"""Runners: the whole batch at once, gradient accumulation over microbatches, or a pipeline.

What they differentiate is the scalar objective of a loss's sums and weights (see
``jaxvlm.types.Loss``): :func:`total` with the :func:`scales` of the whole global batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError
from jaxvlm.parallel.grad_reduce import on_local_examples
from jaxvlm.parallel.mesh import nearest_divisor, shards_here
from jaxvlm.parallel.pipeline import backward, buffers, forward
from jaxvlm.parallel.pipeline.schedule import Schedule, timetable
from jaxvlm.types import Batch, Loss, Out, Pairs, Params, Runner, Sums

FEATURES = "features"
"""Key of a batch's features among parameters, where their gradient is needed too."""


@dataclasses.dataclass(frozen=True)
class PlainRunner:
    """Runs ``apply(params, batch) -> Out`` on the whole batch; see ``jaxvlm.types.Runner``."""

    apply: Callable[[Params, Batch], Out]

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """Run the forward pass."""
        params, batch = _fed(params, batch)
        return self.apply({**params, **frozen}, batch)

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Return gradients of ``params`` for the cotangent ``d_out`` of the output."""
        _, back = jax.vjp(lambda p: self.fwd(p, frozen, batch), params)
        return back(d_out)[0]

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """Return the loss's sums over ``batch`` and the gradient of ``sum_k scale_k * S_k``."""

        def objective(p: Params) -> tuple[jax.Array, Sums]:
            sums = loss(self.fwd(p, frozen, batch), batch)
            return total(sums, scale), sums

        (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return sums, grads


def _fed(params: Params, batch: Batch) -> tuple[Params, Batch]:
    """Move features from the parameters to the batch."""
    if FEATURES not in params:
        return params, batch
    own = {path: x for path, x in params.items() if path != FEATURES}
    return own, batch._replace(features=params[FEATURES])


def check_microbatches(parts: int, loss: Loss, rows: int) -> None:
    """Refuse microbatches that would change the gradient, or do not divide the batch.

    Raises:
        ConfigError: a loss that is no sum over examples, or ``rows`` is not divisible by
            ``parts``.
    """
    if parts > 1 and not (loss.additive or is_by_microbatch(loss)):
        raise ConfigError(
            f"config.microbatches={parts}: {_name(loss)} is not a sum over examples, so "
            "microbatches would give another gradient; set config.microbatches=1"
        )
    if parts < 1 or rows % parts:
        raise ConfigError(
            f"config.microbatches={parts} does not divide data.batch_size={rows}; "
            f"{nearest_divisor(rows, parts)} would do"
        )


def is_by_microbatch(loss: Loss) -> bool:
    """Whether a loss that is no sum over examples is defined as a mean over microbatches.

    A microbatch is then the examples of all batch shards that are run together, under every
    strategy: a device must not take the gradient of its local examples.
    """
    return bool(getattr(loss, "by_microbatch", False))


def _name(loss: Loss) -> str:
    """The class of a loss, for messages; the user's own where one is wrapped."""
    return getattr(loss, "name", type(loss).__name__)


def split_microbatches(batch: Any, parts: int, shards: int = 0) -> Any:
    """Split [B, ...] into microbatches [parts, B / parts, ...] without moving data across devices.

    Args:
        batch: a tree with leading dim B.
        parts: the number of microbatches.
        shards: the number of batch shards of the mesh. Consecutive examples of a shard go to one
            microbatch, so that none is copied. 0: independent of the mesh, microbatch m takes
            examples m, m + parts, ….
    """

    def one(x: jax.Array) -> jax.Array:
        if not shards:
            return jnp.moveaxis(x.reshape(len(x) // parts, parts, *x.shape[1:]), 1, 0)
        rows = len(x) // shards // parts
        x = jnp.moveaxis(x.reshape(shards, parts, rows, *x.shape[1:]), 1, 0)
        return x.reshape(parts, shards * rows, *x.shape[3:])

    return jax.tree.map(one, batch)


def merge_microbatches(x: jax.Array, shards: int = 0) -> jax.Array:
    """Invert :func:`split_microbatches`."""
    parts, rows = x.shape[:2]
    if not shards:
        return jnp.moveaxis(x, 0, 1).reshape(rows * parts, *x.shape[2:])
    x = jnp.moveaxis(x.reshape(parts, shards, rows // shards, *x.shape[2:]), 0, 1)
    return x.reshape(rows * parts, *x.shape[3:])


def _shared(out: Out) -> Out:
    """Return the fields of an output, or of its cotangent, that do not depend on examples."""
    return out._replace(hidden=None, aux=None)


@dataclasses.dataclass(frozen=True)
class GradAccumulation:
    """Gradient accumulation: a runner over ``parts`` microbatches, one after the other."""

    runner: Runner
    parts: int
    mesh: jax.sharding.Mesh | None = None
    """The batch's mesh; ``None``: one device."""
    place: Callable[[Params], Params] = lambda grads: grads
    """Constrains the sharding of each microbatch's gradients before they are added, and their
    sum."""

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """Run the forward pass in microbatches; without ``aux``, which is defined over a batch."""
        params, batch = _fed(params, batch)
        out = jax.lax.map(
            lambda part: self.runner.fwd(params, frozen, part)._replace(aux=None),
            split_microbatches(batch, self.parts, self._shards()),
        )
        shared = jax.tree.map(lambda x: x[0], _shared(out))
        return shared._replace(hidden=merge_microbatches(out.hidden, self._shards()))

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Return gradients of ``params`` for the cotangent ``d_out``.

        The cotangent of fields that do not depend on examples goes to the first microbatch.
        """

        def one(params: Params, rows: tuple[Batch, Any], number: jax.Array) -> tuple[Any, Params]:
            batch, d_hidden = rows
            d = jax.tree.map(lambda x: jnp.where(number == 0, x, 0), _shared(d_out))
            return (), self.runner.vjp(params, frozen, batch, d._replace(hidden=d_hidden))

        return self._added(params, (batch, d_out.hidden), one)[1]

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """Return sums and gradients over all microbatches; gradients are added in float32.

        Raises:
            ConfigError: see :func:`check_microbatches`.
        """
        check_microbatches(self.parts, loss, batch.tokens.shape[0])

        def one(params: Params, rows: Batch, number: jax.Array) -> tuple[Sums, Params]:
            return self.runner.loss_grad(params, frozen, rows, loss, scale)

        return self._added(params, batch, one)

    def _added(self, params: Params, rows: Any, run: Callable[..., Any]) -> tuple[Any, Params]:
        """Add up sums and gradients of ``run(params, a microbatch of rows, its index)``."""
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
        split = (*split_microbatches((rows, fed), self.parts, shards), jnp.arange(self.parts))
        like = jax.eval_shape(one, jax.tree.map(lambda x: x[0], split))[:2]
        sums, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        (sums, grads), back = jax.lax.scan(add, (sums, self.place(grads)), split)
        return sums, {**grads, **{path: merge_microbatches(x, shards) for path, x in back.items()}}

    def _shards(self) -> int:
        return shards_here(self.mesh) if self.mesh else 1


@dataclasses.dataclass(frozen=True)
class PipelineRunner:
    """Pipeline parallelism: a runner whose microbatches go through the stages of a pipeline."""

    cut: forward.StageCut
    mesh: jax.sharding.Mesh
    schedule: str
    virtual_stages: int
    parts: int
    skip: bool = True
    """Whether an idle stage skips computation; see ``jaxvlm.parallel.pipeline.backward``."""

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """Run forward units alone, without keeping residuals; ``aux`` is left out."""
        params, batch = _fed(params, batch)
        split, every = self._split(batch), {**params, **frozen}
        out = forward.forward(self.cut, self._table(), self.mesh, every, split, self.skip)
        return out._replace(hidden=merge_microbatches(out.hidden, shards_here(self.mesh)))

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Return gradients of ``params`` for the cotangent ``d_out``, by a forward and backward.

        The cotangent of fields that do not depend on examples goes to the first microbatch.
        """
        d_hidden = self._split(d_out.hidden)

        def objective(out: Out, part: Batch, number: jax.Array) -> tuple[jax.Array, Sums]:
            value = _inner(out.hidden, buffers.take(d_hidden, number))
            each = jax.tree.map(_inner, _shared(out), _shared(d_out))
            shared = sum(jax.tree.leaves(each), jnp.float32(0))
            return value + jnp.where(number == 0, shared, 0), Sums({}, {})

        return self._back(params, frozen, batch, objective)[1]

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """Return sums and gradients; the metric ``busy_stages`` is the fraction of busy units.

        Raises:
            ConfigError: see :func:`check_microbatches` and ``timetable``.
        """
        check_microbatches(self.parts, loss, batch.tokens.shape[0])

        def objective(out: Out, part: Batch, number: jax.Array) -> tuple[jax.Array, Sums]:
            sums = loss(out, part)
            return total(sums, scale), sums

        sums, grads, worked = self._back(params, frozen, batch, objective)
        units = jnp.float32(self.mesh.shape[forward.AXIS] * self._table().span)
        busy = (jnp.sum(worked).astype(jnp.float32), units)
        return sums._replace(metrics={**sums.metrics, "busy_stages": busy}), grads

    def _back(
        self, params: Params, frozen: Params, batch: Batch, objective: backward.Objective
    ) -> tuple[Sums, Params, jax.Array]:
        """Return sums, gradients, and the units that stages worked on."""
        own, batch = _fed(params, batch)
        sums, grads, worked, back = backward.loss_grad(
            self.cut,
            self._table(),
            self.mesh,
            own,
            frozen,
            self._split(batch),
            objective,
            self.skip,
            FEATURES in params,
        )
        if back is not None:
            grads[FEATURES] = merge_microbatches(back, shards_here(self.mesh))
        return sums, grads, worked

    def _split(self, rows: Any) -> Any:
        return split_microbatches(rows, self.parts, shards_here(self.mesh))

    def _table(self) -> Schedule:
        stages = self.mesh.shape[forward.AXIS]
        return timetable(self.schedule, stages, self.parts, self.virtual_stages)


def _inner(x: jax.Array, d: jax.Array) -> jax.Array:
    """Return the inner product, f32[]."""
    return jnp.sum(x.astype(jnp.float32) * d.astype(jnp.float32))


def check_local_gradients(dtype: str, loss: Loss) -> None:
    """Refuse quantized gradient reduction for a loss that is no sum over examples.

    Raises:
        ConfigError: a device cannot take the gradient of its local examples alone.
    """
    if dtype != "float32" and not loss.additive:
        raise ConfigError(
            f"config.strategy.grad_reduce_dtype={dtype!r}: {_name(loss)} is not a sum over "
            "examples, so a device cannot take the gradient of its local examples; leave it at "
            "'float32'"
        )


@dataclasses.dataclass(frozen=True)
class LocalGradients:
    """A runner that leaves gradients local to batch shards: ``Placement.reduce`` adds them up."""

    runner: Runner
    mesh: jax.sharding.Mesh
    axes: tuple[str, ...]

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """Run the wrapped runner's forward pass."""
        return self.runner.fwd(params, frozen, batch)

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Return gradients with a leading dim of batch shards.

        The cotangent of fields that do not depend on examples goes to the first example's device.
        """

        def own(params: Params, frozen: Params, rows: Any, shared: Any) -> tuple[Any, Params]:
            batch, d_hidden, first = rows
            d = jax.tree.map(lambda x: jnp.where(jnp.any(first), x, 0), shared)
            return (), self.runner.vjp(params, frozen, batch, d._replace(hidden=d_hidden))

        rows = batch, d_out.hidden, jnp.arange(len(d_out.hidden)) == 0
        run = on_local_examples(own, self.mesh, self.axes)
        return run(params, frozen, rows, _shared(d_out))[1]

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """Return sums over all examples, and gradients with a leading dim of batch shards.

        See ``jaxvlm.parallel.grad_reduce.on_local_examples``.
        """

        def own(params: Params, frozen: Params, batch: Batch, scale: Any) -> tuple[Sums, Params]:
            return self.runner.loss_grad(params, frozen, batch, loss, scale)

        return on_local_examples(own, self.mesh, self.axes)(params, frozen, batch, scale)


def scales(loss: Loss, batch: Batch | Pairs) -> dict[str, jax.Array]:
    """Return ``coefficient_k / W_k`` of each term over the global batch; 0 where W_k is 0.

    It is NaN where W_k is negative or NaN, so that the step is skipped as one that is not finite.

    Args:
        loss: the loss.
        batch: the whole global batch, before it is split into microbatches.
    """
    weights = loss.weights(batch)
    return {
        name: jnp.where(
            weights[name] > 0,
            factor / jnp.maximum(weights[name], 1e-20),
            jnp.where(weights[name] == 0, 0.0, jnp.nan),
        )
        for name, factor in loss.coefficients().items()
    }


def total(sums: Sums, scale: Mapping[str, jax.Array]) -> jax.Array:
    """Return ``sum_k scale_k * S_k``, f32[]."""
    return sum((scale[name] * value for name, value in sums.terms.items()), jnp.float32(0))
