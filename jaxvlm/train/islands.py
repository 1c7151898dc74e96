"""Islands: parts of a mesh that train apart, and the outer update that combines them (DiLoCo).

Between two outer updates the shared parameters, ``TrainState.params``, stay as they are, and each
island takes ordinary train steps on parameters and moments of its own, :class:`Islands`. An outer
update sends what each island changed, and the outer optimizer, whose state is then
``TrainState.opt_state``, updates the shared parameters by the mean.

Sources: DiLoCo, arXiv 2311.08105; error feedback, arXiv 1809.07599.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxvlm.config import OuterConfig
from jaxvlm.optim.optimizer import reset_moments
from jaxvlm.optim.outer import make_outer_optimizer, outer_update
from jaxvlm.parallel.grad_reduce import GradReduction
from jaxvlm.parallel.islands import on_islands
from jaxvlm.train.step import NO_WEIGHT, Step
from jaxvlm.types import Guard, Params, TrainState

USED, NOT_FINITE, NOT_TRAINED = 0, 1, 2
"""What became of an island's changes in an outer update: they are in the mean; left out, because
its parameters or moments are not finite; left out, because all its updates were skipped."""
SUMMED = ("tokens", "images", "cache/encoded", "cache/stale", "cache/lost")
"""Metrics of a step that are counts, and add up over islands."""
LEFT_OUT = "islands_skipped"
"""Name of the metric that counts the islands whose update was skipped in a step."""


class Islands(NamedTuple):
    """What each island has of its own. Every leaf has a leading dim of islands, n, sharded over
    the mesh axis ``island``."""

    params: Params
    """Trainable parameters."""
    opt_state: Any
    """State of the training optimizer."""
    comm: Any
    """As ``TrainState.comm``, of the reductions inside of an island."""
    guard: Guard
    """i32[n] each: counts of skipped updates."""
    applied: Any
    """i32[n]: updates since the last outer update that were not skipped."""


class OuterReport(NamedTuple):
    """What an outer update did."""

    why: Any
    """i32[n]: for each island ``USED``, ``NOT_FINITE`` or ``NOT_TRAINED``."""
    applied: Any
    """bool[]: whether the shared parameters were updated; False where no island could be used."""


def init_islands(state: TrainState, outer: OuterUpdate, count: int) -> TrainState:
    """Return the first state of islands; call it under ``jit`` to create it sharded.

    Args:
        state: the first state of a run without islands; its cache is that of all islands together.
        outer: the outer update.
        count: n, islands.
    """

    def each(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)

    own = Islands(
        each(state.params), each(state.opt_state), each(state.comm), each(state.guard),
        jnp.zeros(count, jnp.int32),
    )  # fmt: skip
    return state._replace(
        opt_state=outer.tx.init(state.params),
        comm=outer.reduction.init(state.params),
        islands=own,
    )


def island_step(step: Step, mesh: Mesh) -> Step:
    """Let each island take a train step by itself: nothing is sent from one to another.

    Args:
        step: of one mesh; it sees the axes of one island.
        mesh: of all islands.

    Returns:
        ``(state, batch) -> (state, metrics)``; each metric has a leading dim of islands, see
        :func:`over_islands`. The shared parameters and the state of the outer optimizer pass
        through.
    """

    def one(islands: Islands, cache: Any, frozen: Params, number: Any, batch: Any) -> Any:
        own: Islands = jax.tree.map(lambda x: x[0], islands)
        state = TrainState(number, own.params, frozen, own.opt_state, cache, own.comm, own.guard)
        new, metrics = step(state, batch)
        applied = own.applied + (new.guard.in_a_row == 0)
        own = Islands(new.params, new.opt_state, new.comm, new.guard, applied)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], (own, metrics)), new.cache

    run = on_islands(one, mesh, (True, True, False, False, True), (True, True))

    def all_islands(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        (own, metrics), cache = run(state.islands, state.cache, state.frozen, state.step, batch)
        return state._replace(step=state.step + 1, islands=own, cache=cache), metrics

    return all_islands


def over_islands(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's metrics, each f32[n] or i32[n], as scalars of the whole mesh.

    Means are over the islands whose update was not skipped, and over all where each was. The step
    counts as bad where each island's was.
    """
    in_a_row = metrics["bad_in_a_row"]
    good = (in_a_row == 0) | jnp.all(in_a_row > 0)
    out = {}
    for name, x in metrics.items():
        if name == "bad_in_a_row" or name.startswith(NO_WEIGHT):
            out[name] = jnp.min(x, axis=0)
        elif name.endswith("_max") or name == "bad_leaf":
            out[name] = jnp.max(x, axis=0)
        elif name in SUMMED:
            out[name] = jnp.sum(x, axis=0)
        else:
            out[name] = jnp.sum(jnp.where(good, x, 0)) / jnp.sum(good)
    return out | {LEFT_OUT: jnp.sum(in_a_row > 0)}


class OuterUpdate(NamedTuple):
    """Updates the shared parameters by the mean of what the islands have changed."""

    config: OuterConfig
    tx: optax.GradientTransformation
    """The outer optimizer."""
    reduction: GradReduction
    """Adds up changes over islands, in ``outer.delta_dtype``."""

    def update(self, state: TrainState) -> tuple[TrainState, OuterReport]:
        """Update the shared parameters, from which every island goes on.

        An island with a parameter or moment that is not finite, or without an applied update since
        the last outer update, is left out of the mean and goes on with new moments. Where all are
        left out, the shared parameters, the outer optimizer's state and error feedback stay as they
        are, and the guard counts it.
        """
        own: Islands = state.islands
        finite, count = _finite((own.params, own.opt_state)), own.applied.shape[0]
        good = finite & (own.applied > 0)
        why = jnp.where(good, USED, jnp.where(finite, NOT_TRAINED, NOT_FINITE))
        ok = jnp.any(good)

        def used(x: jax.Array, otherwise: Any = 0) -> jax.Array:
            return jnp.where(good.reshape(count, *(1,) * (x.ndim - 1)), x, otherwise)

        changes = {
            path: used(x.astype(jnp.float32) - state.params[path].astype(jnp.float32))
            for path, x in own.params.items()
        }
        held = jax.tree.map(used, state.comm)
        sums, left = self.reduction(changes, held)
        weight = jnp.maximum(jnp.sum(good), 1)
        mean = {path: x + sums[path] / weight for path, x in state.params.items()}
        given = outer_update(self.config, self.tx, state.params, mean, state.opt_state)
        # An island that is left out keeps what it still had to send.
        comm = jax.tree.map(lambda new, old, sent: new + old - sent, left, state.comm, held)
        params, opt_state, comm = jax.tree.map(
            lambda new, old: jnp.where(ok, new, old),
            (*given, comm), (state.params, state.opt_state, state.comm),
        )  # fmt: skip
        new = state._replace(
            params=params, opt_state=opt_state, comm=comm,
            islands=self._restarted(own, params, good),
            guard=Guard(
                state.guard.skipped + (~ok).astype(jnp.int32),
                jnp.where(ok, 0, state.guard.in_a_row + 1).astype(jnp.int32),
            ),
        )  # fmt: skip
        return new, OuterReport(why.astype(jnp.int32), ok)

    def _restarted(self, own: Islands, params: Params, good: jax.Array) -> Islands:
        """Set each island to the shared parameters; ``good`` ones keep their moments if set."""
        count = good.shape[0]
        fresh = reset_moments(own.opt_state)
        keeps = good & (self.config.moments == "keep")
        opt_state = jax.tree.map(
            lambda a, b: jnp.where(keeps.reshape(count, *(1,) * (a.ndim - 1)), a, b),
            own.opt_state, fresh,
        )  # fmt: skip
        shared = {path: jnp.broadcast_to(x, (count, *x.shape)) for path, x in params.items()}
        zero = jnp.zeros_like(own.applied)
        return own._replace(params=shared, opt_state=opt_state, applied=zero)


def make_outer_update(config: OuterConfig, reduction: GradReduction) -> OuterUpdate:
    """Make the outer update.

    Raises:
        ConfigError: a setting that can't be used.
    """
    return OuterUpdate(config, make_outer_optimizer(config), reduction)


def _finite(tree: Any) -> jax.Array:
    """Return bool[n]: whether all floats of an island are finite; leaves [n, ...]."""
    each = [
        jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.all(jnp.stack(each), axis=0)
