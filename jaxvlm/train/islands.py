"""Islands: parts of a mesh that train apart, and the outer update that combines them (DiLoCo).

Between two outer updates the shared parameters, ``TrainState.params``, stay as they are, and each
island takes ordinary train steps on parameters and moments of its own, :class:`Islands`. An outer
update sends what each island changed, and the outer optimizer, whose state is then
``TrainState.opt_state``, updates the shared parameters by the mean.

With fragments each is updated in its turn, and what an outer update sends may be mixed into the
islands' parameters some steps later.

Sources: DiLoCo, arXiv 2311.08105; streaming DiLoCo, arXiv 2501.18512; error feedback, arXiv
1809.07599.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxvlm.config import ConfigError, OuterConfig
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
    """i32[n, F]: updates since the last outer update of each fragment that were not skipped."""


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
        jnp.zeros((count, len(outer.fragments)), jnp.int32),
    )  # fmt: skip
    return state._replace(
        opt_state=outer.init(state.params),
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
    """Updates shared parameters by the mean of what the islands have changed, one fragment of them
    at a time, and sets the islands' to them."""

    config: OuterConfig
    tx: optax.GradientTransformation
    """The outer optimizer."""
    reduction: GradReduction
    """Adds up changes over islands, in ``outer.delta_dtype``."""
    fragments: tuple[tuple[str, ...], ...]
    """Paths of the trained parameters, by fragment."""

    def init(self, params: Params) -> tuple[Any, ...]:
        """Return the first state of the outer optimizer, of each fragment."""
        return tuple(
            self.tx.init({path: params[path] for path in paths}) for paths in self.fragments
        )

    def send(self, state: TrainState, fragment: int) -> tuple[TrainState, OuterReport]:
        """Update the shared parameters of a fragment.

        An island with a parameter or moment that is not finite, or without an applied update since
        the fragment's last outer update, is left out of the mean, and begins anew: with all shared
        parameters and new moments. Where all are left out, the shared parameters, the outer
        optimizer's state and error feedback stay as they are, and the guard counts it.
        """
        own: Islands = state.islands
        paths, applied = self.fragments[fragment], own.applied[:, fragment]
        finite = _finite((own.params, own.opt_state))
        good = finite & (applied > 0)
        why = jnp.where(good, USED, jnp.where(finite, NOT_TRAINED, NOT_FINITE))
        ok = jnp.any(good)
        old = {path: state.params[path] for path in paths}
        changes = {
            path: _where(good, own.params[path].astype(jnp.float32) - x.astype(jnp.float32), 0)
            for path, x in old.items()
        }
        waiting = {path: state.comm[path] for path in paths if path in state.comm}
        held = {path: _where(good, x, 0) for path, x in waiting.items()}
        sums, left = self.reduction(changes, held)
        weight = jnp.maximum(jnp.sum(good), 1)
        mean = {path: x + sums[path] / weight for path, x in old.items()}
        new, moments = outer_update(self.config, self.tx, old, mean, state.opt_state[fragment])
        # An island that is left out keeps what it still had to send.
        comm = {path: left[path] + x - held[path] for path, x in waiting.items()}
        new, moments, comm = jax.tree.map(
            lambda new, old: jnp.where(ok, new, old),
            (new, moments, comm), (old, state.opt_state[fragment], waiting),
        )  # fmt: skip
        opt_state = tuple(moments if i == fragment else x for i, x in enumerate(state.opt_state))
        params = state.params | new
        state = state._replace(
            params=params, opt_state=opt_state, comm={**state.comm, **comm},
            islands=self._restarted(own, params, good, fragment),
            guard=Guard(
                state.guard.skipped + (~ok).astype(jnp.int32),
                jnp.where(ok, 0, state.guard.in_a_row + 1).astype(jnp.int32),
            ),
        )  # fmt: skip
        return state, OuterReport(why.astype(jnp.int32), ok)

    def receive(self, state: TrainState, fragment: int, mixing: Any = 0.0) -> TrainState:
        """Mix the shared parameters of a fragment into each island's own.

        Args:
            state: after :meth:`send`, at once or some steps later.
            fragment: its number.
            mixing: f32[], the share of its own parameters that an island keeps.
        """
        own = state.islands.params

        def mixed(path: str) -> jax.Array:
            shared = jnp.broadcast_to(state.params[path], own[path].shape)
            both = mixing * own[path] + (1 - mixing) * shared
            return jnp.where(jnp.asarray(mixing) > 0, both.astype(shared.dtype), shared)

        params = {**own, **{path: mixed(path) for path in self.fragments[fragment]}}
        return state._replace(islands=state.islands._replace(params=params))

    def update(self, state: TrainState, fragment: int) -> tuple[TrainState, OuterReport]:
        """Update the shared parameters of a fragment, and set each island's to them."""
        state, report = self.send(state, fragment)
        return self.receive(state, fragment), report

    def _restarted(self, own: Islands, params: Params, good: jax.Array, fragment: int) -> Islands:
        """Begin anew on islands that are not ``good``; others reset moments where it is set."""
        every = {path: jnp.broadcast_to(params[path], x.shape) for path, x in own.params.items()}
        keeps = good & (self.config.moments == "keep")
        applied = own.applied.at[:, fragment].set(0)
        return own._replace(
            params=jax.tree.map(lambda a, b: _where(good, a, b), own.params, every),
            opt_state=jax.tree.map(
                lambda a, b: _where(keeps, a, b), own.opt_state, reset_moments(own.opt_state)
            ),
            applied=_where(good, applied, 0),
        )


def make_outer_update(
    config: OuterConfig, reduction: GradReduction, shapes: Mapping[str, Any]
) -> OuterUpdate:
    """Make the outer update.

    Args:
        config: of outer updates.
        reduction: adds up changes over islands.
        shapes: path of each trained parameter -> an array, or its shape.

    Raises:
        ConfigError: a setting that can't be used.
    """
    if config.fragments > len(shapes):
        raise ConfigError(
            f"config.outer.fragments={config.fragments}, but only {len(shapes)} arrays are trained"
        )
    return OuterUpdate(
        config, make_outer_optimizer(config), reduction, fragments_of(shapes, config.fragments)
    )


def fragments_of(shapes: Mapping[str, Any], count: int) -> tuple[tuple[str, ...], ...]:
    """Divide parameters into fragments of about equal size: the largest first, each to the fragment
    that is smallest so far.

    Args:
        shapes: path -> an array, or its shape.
        count: number of fragments, at most that of paths.

    Returns:
        The sorted paths of each fragment.
    """
    sizes, fragments = [0] * count, [list[str]() for _ in range(count)]
    for path in sorted(shapes, key=lambda path: (-math.prod(shapes[path].shape), path)):
        least = sizes.index(min(sizes))
        sizes[least] += math.prod(shapes[path].shape)
        fragments[least].append(path)
    return tuple(tuple(sorted(paths)) for paths in fragments)


class OuterSchedule(NamedTuple):
    """Which fragments have an outer update at a step; a function of the step alone, so that a run
    that is resumed goes on with it."""

    steps: int
    """Steps between two outer updates of a fragment."""
    fragments: int
    overlap_steps: int
    last: int
    """The last step of the run, at which all fragments are updated and nothing is left to mix."""

    def sends(self, step: int) -> list[int]:
        """Return the fragments whose changes are sent after this step."""
        if step == self.last:
            return list(range(self.fragments))
        return [i for i in range(self.fragments) if (step - self._turn(i)) % self.steps == 0]

    def receives(self, step: int) -> list[int]:
        """Return the fragments whose result is mixed in after this step, before any is sent."""
        late = range(step - self.overlap_steps, step if step == self.last else
                     step - self.overlap_steps + 1) if self.overlap_steps else range(0)  # fmt: skip
        return sorted({i for sent in late if sent > 0 for i in self.sends(sent)})

    def _turn(self, fragment: int) -> int:
        """Return the step of a round after which a fragment is sent; the last one ends it."""
        return (fragment + 1) * self.steps // self.fragments


def _finite(tree: Any) -> jax.Array:
    """Return bool[n]: whether all floats of an island are finite; leaves [n, ...]."""
    each = [
        jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.all(jnp.stack(each), axis=0)


def _where(good: jax.Array, x: jax.Array, otherwise: Any) -> jax.Array:
    """Select ``x`` [n, ...] on the islands that are ``good``, bool[n]."""
    return jnp.where(good.reshape(-1, *(1,) * (x.ndim - 1)), x, otherwise)
