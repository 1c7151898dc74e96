"""The train step: loss and gradients, gradient reduction, the optimizer's update, metrics; and its
compiled programs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxvlm.train.dropout_keys import DropoutKeys
from jaxvlm.train.grad_accum import scales, total
from jaxvlm.types import Batch, Cache, Guard, Loss, Pairs, Params, Runner, Sums, TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


class Placement(NamedTuple):
    """Sharding and communication of a step's parameters, gradients and optimizer state."""

    all_gather: Callable[[Params], Params] = lambda params: params
    """All-gathers parameters at the beginning of a step."""
    constrain: Callable[[Params], Params] = lambda params: params
    """Constrains gradients, and the parameters to update, to the optimizer's sharding."""
    load_moments: Callable[[Any], Any] = lambda opt_state: opt_state
    """Loads the optimizer's state from where it is between steps (host offload)."""
    reduce: Callable[[Params, Any], tuple[Params, Any]] = lambda grads, comm: (grads, comm)
    """Reduces gradients: the runner's gradients, TrainState.comm -> gradients, the new comm."""


ANYWHERE = Placement()
NO_CACHE = Cache()
NO_WEIGHT = "no_weight/"
"""Prefix of the metrics that say whether a batch has nothing for a term of the loss."""


def init_state(
    params: Params,
    frozen: Params,
    tx: optax.GradientTransformation,
    comm: Any = (),
    cache: Any = (),
) -> TrainState:
    """Return the state before the first step; call it under ``jit`` to create it sharded."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, frozen, tx.init(params), cache, comm, Guard(zero, zero))


def make_step(
    runner: Runner,
    loss: Loss,
    tx: optax.GradientTransformation,
    place: Placement = ANYWHERE,
    cache: Cache = NO_CACHE,
    dropout_keys: DropoutKeys | None = None,
) -> Step:
    """Make ``step(state, batch) -> (state, metrics)``, a pure function ready for ``jax.jit``.

    Args:
        runner: runs the model and takes gradients: at once, in microbatches or pipelined.
        loss: the loss, as sums and weights.
        tx: the optimizer over trainable parameters.
        place: sharding and communication, by the strategy.
        cache: source of visual tokens.
        dropout_keys: adds the keys for dropout to a batch; ``None``: nothing is dropped.

    Returns:
        The step, over a Batch or Pairs. Its metrics are scalars, except for tokens that a cache
        returns: the loss and, where it has several, its terms as ``loss/<term>``, scaled as they
        add up; ``grad_norm``, ``skipped``, ``bad_in_a_row``, ``bad_leaf`` (the index, in the order
        of sorted paths, of the first gradient that is not finite, or -1), ``tokens`` and ``images``
        in the batch, ``no_weight/<term>`` (whether the batch has nothing for a term),
        each of the loss's metrics as a mean, and the cache's metrics.
    """

    def step(state: TrainState, batch: Batch | Pairs) -> tuple[TrainState, dict[str, Any]]:
        scale = scales(loss, batch)
        if dropout_keys is not None:
            batch = dropout_keys(state.step, batch)
        params, frozen = place.all_gather(state.params), place.all_gather(state.frozen)
        read = cache.read(state.cache, params, frozen, batch)
        sums, given = runner.loss_grad(read.params, read.frozen, read.batch, loss, scale)
        grads, comm = place.reduce(read.back(given), state.comm)
        grads = place.constrain(grads)
        verdict = judge(total(sums, scale), squares(grads))
        changed = update(verdict, state.params, state.opt_state, grads, tx, place)
        new_cache, cache_metrics = cache.write(state.cache, read, given, verdict.ok)
        new = finish(state, verdict, *changed, comm)._replace(cache=new_cache)
        return new, {
            **report(new, verdict, loss, sums, scale, batch),
            **read.metrics,
            **cache_metrics,
        }

    return step


class Verdict(NamedTuple):
    """Whether to update, decided on the loss and the gradients of all parameters together."""

    value: Any
    """f32[]: the loss."""
    norm: Any
    """f32[]: the global norm of the gradients."""
    ok: Any
    """bool[]: the loss and all gradients are finite."""
    bad_leaf: Any
    """i32[]: index of the first gradient that is not finite; -1: none."""


def squares(grads: Params) -> jax.Array:
    """Return each gradient's squared norm, f32[n], in the order of sorted paths."""
    each = [jnp.sum(jnp.square(g.astype(jnp.float32))) for _, g in sorted(grads.items())]
    return jnp.stack(each) if each else jnp.zeros(0, jnp.float32)


def judge(value: jax.Array, norms: jax.Array) -> Verdict:
    """Decide on an update from a loss and the :func:`squares` of its gradients."""
    ok = jnp.isfinite(value) & jnp.isfinite(jnp.sum(norms))
    bad_leaf = jnp.where(jnp.all(jnp.isfinite(norms)), -1, jnp.argmin(jnp.isfinite(norms)))
    return Verdict(value, jnp.sqrt(jnp.sum(norms)), ok, bad_leaf.astype(jnp.int32))


def update(
    verdict: Verdict,
    params: Params,
    opt_state: Any,
    grads: Params,
    tx: optax.GradientTransformation,
    place: Placement = ANYWHERE,
) -> tuple[Params, Any]:
    """Update parameters and the optimizer's state; a bad step leaves them unchanged."""
    old, moments = place.constrain(params), place.load_moments(opt_state)
    tx = optax.with_extra_args_support(tx)
    updates, new = tx.update(grads, moments, old, global_norm=verdict.norm)
    params = optax.apply_updates(old, updates)
    return _select(verdict.ok, params, old), _select(verdict.ok, new, moments)


def finish(
    state: TrainState, verdict: Verdict, params: Params, opt_state: Any, comm: Any
) -> TrainState:
    """Return the train state after a step with these new values."""
    ok = verdict.ok
    return state._replace(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        comm=_select(ok, comm, state.comm),
        guard=Guard(
            skipped=state.guard.skipped + (~ok).astype(jnp.int32),
            in_a_row=jnp.where(ok, 0, state.guard.in_a_row + 1).astype(jnp.int32),
        ),
    )


def report(
    new: TrainState,
    verdict: Verdict,
    loss: Loss,
    sums: Sums,
    scale: Mapping[str, Any],
    batch: Batch | Pairs,
) -> dict[str, Any]:
    """Return a step's metrics; see :func:`make_step`."""
    batches = [batch.query, batch.document] if isinstance(batch, Pairs) else [batch]
    metrics = {
        "loss": verdict.value,
        "grad_norm": verdict.norm,
        "skipped": new.guard.skipped,
        "bad_in_a_row": new.guard.in_a_row,
        "bad_leaf": verdict.bad_leaf,
        "tokens": sum(jnp.sum(x.segment > 0) for x in batches),
        "images": sum(jnp.sum(x.image_start >= 0) for x in batches if x.image_start is not None),
    }
    used = [name for name, factor in loss.coefficients().items() if factor]
    metrics |= {f"{NO_WEIGHT}{name}": scale[name] == 0 for name in used}
    terms = {f"loss/{name}": scale[name] * s for name, s in sums.terms.items()}
    metrics |= terms if len(terms) > 1 else {}
    return metrics | {name: s / jnp.maximum(w, 1e-20) for name, (s, w) in sums.metrics.items()}


def _select(ok: jax.Array, new: Any, old: Any) -> Any:
    """Select ``new`` where the step is good, else ``old``, bit for bit."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


class CompiledSteps:
    """Compiles and keeps the step for each shape of batch: ``programs.get(state, batch)``.

    Args:
        build: compiles the step for a state and a batch, or for their shapes.
        log: takes a line whenever a program is compiled.
        sizes: shapes of the states that a run may have, where the sizes of their caches may differ:
            each shape of batch is compiled for all of them at once, so that evicting cache memory
            does not wait for a compilation.
    """

    def __init__(
        self,
        build: Callable[[TrainState, Any], Any],
        log: Callable[[str], None],
        sizes: Sequence[TrainState] = (),
    ):
        self.build, self.log, self.sizes = build, log, sizes
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def get(self, state: TrainState, batch: Batch | Pairs) -> Any:
        """Return the program for a batch's shape: ``program(state, batch) -> (state, metrics)``."""
        leaves, kind = jax.tree.flatten(batch)
        shapes = (kind, *((x.shape, str(x.dtype)) for x in leaves))
        key = shapes, _size(state)
        if key not in self.compiled:
            start = time.perf_counter()
            for other in self.sizes or (state,):
                self.compiled[shapes, _size(other)] = self.build(other, batch)
            seconds = time.perf_counter() - start
            batches = [batch] if isinstance(batch, Batch) else [batch.query, batch.document]
            shape = " and ".join(map(_shape, batches))
            self.log(
                f"compiled the step for {shape} per sequence: {seconds:.1f} s (program "
                f"{len(self.compiled)})"
            )
        return self.compiled[key]


def _shape(batch: Batch) -> str:
    rows, length = math.prod(batch.tokens.shape[:-1]), batch.tokens.shape[-1]
    images = 0 if batch.image_start is None else batch.image_start.shape[-1]
    patches = "" if batch.patches is None else f" of {batch.patches.shape[-2]} patches"
    return f"{rows} sequences x {length} tokens, {images} images{patches}"


def _size(state: TrainState) -> tuple[Any, ...]:
    """Return the shapes of the cache, the only part of the state that may change its size."""
    return tuple(x.shape for x in jax.tree.leaves(state.cache))
