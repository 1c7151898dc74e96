"""The training step, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxvlm.train import noise as noises
from jaxvlm.train.objective import scales, total
from jaxvlm.types import Batch, Cache, Guard, Loss, Pairs, Params, Runner, Sums, TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


class Placement(NamedTuple):
    """Where a step pins what it computes; each takes and gives parameters or gradients."""

    gathered: Callable[[Params], Params] = lambda params: params
    """Parameters before the first layer."""
    update: Callable[[Params], Params] = lambda params: params
    """Gradients, and the parameters that they change."""
    moments: Callable[[Any], Any] = lambda opt_state: opt_state
    """The optimizer's state from where it lies between steps."""
    reduce: Callable[[Params, Any], tuple[Params, Any]] = lambda grads, comm: (grads, comm)
    """What the runner gives, and TrainState.comm -> gradients, and the new one."""


ANYWHERE = Placement()
NO_CACHE = Cache()


def init_state(
    params: Params,
    frozen: Params,
    tx: optax.GradientTransformation,
    comm: Any = (),
    cache: Any = (),
) -> TrainState:
    """The state before the first step; under ``jit``, so that it is born sharded."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, frozen, tx.init(params), cache, comm, Guard(zero, zero))


def make_step(
    runner: Runner,
    loss: Loss,
    tx: optax.GradientTransformation,
    place: Placement = ANYWHERE,
    cache: Cache = NO_CACHE,
    noise: noises.Noise = noises.none,
) -> Step:
    """``step(state, batch) -> (state, metrics)``, pure and ready for ``jax.jit``.

    Args:
        runner: how the model is run.
        loss: sums and weights.
        tx: the optimizer over trainable parameters.
        place: what a strategy splits over the mesh.
        cache: where visual tokens come from.
        noise: what gives rows the keys of their dropout.

    Returns:
        The step, of a Batch or of Pairs. Its metrics are scalars, but for tokens that a cache
        gives: the loss and, where it has several, its terms as ``loss/<term>``, scaled as they add
        up; ``grad_norm``, ``skipped``, ``bad_in_a_row``,
        ``bad_leaf`` (the index, in the order of sorted paths, of the first gradient that is not
        finite, or -1), ``tokens`` and ``pictures`` in the batch, each of the loss's metrics as a
        mean, and the cache's.
    """

    def step(state: TrainState, batch: Batch | Pairs) -> tuple[TrainState, dict[str, Any]]:
        scale, batch = scales(loss, batch), noise(state.step, batch)
        params, frozen = place.gathered(state.params), place.gathered(state.frozen)
        read = cache.read(state.cache, params, frozen, batch)
        sums, given = runner.loss_grad(read.params, read.frozen, read.batch, loss, scale)
        grads, comm = place.reduce(read.back(given), state.comm)
        grads = place.update(grads)
        verdict = judge(total(sums, scale), squares(grads))
        changed = update(verdict, state.params, state.opt_state, grads, tx, place)
        kept, noted = cache.write(state.cache, read, given, verdict.ok)
        new = finish(state, verdict, *changed, comm)._replace(cache=kept)
        return new, {**report(new, verdict, sums, scale, batch), **read.metrics, **noted}

    return step


class Verdict(NamedTuple):
    """What an update goes by: of the gradients of all parameters together."""

    value: Any
    """f32[]: the loss."""
    norm: Any
    """f32[]: the global norm."""
    ok: Any
    """bool[]: all is finite."""
    bad_leaf: Any
    """i32[]: index of the first gradient that is not; -1: none."""


def squares(grads: Params) -> jax.Array:
    """f32[n]: each gradient's squared norm, in the order of sorted paths."""
    each = [jnp.sum(jnp.square(g.astype(jnp.float32))) for _, g in sorted(grads.items())]
    return jnp.stack(each) if each else jnp.zeros(0, jnp.float32)


def judge(value: jax.Array, norms: jax.Array) -> Verdict:
    """The verdict on a loss and the :func:`squares` of its gradients."""
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
    """Parameters and the optimizer's state after a step; as they were where it is bad."""
    old, moments = place.update(params), place.moments(opt_state)
    tx = optax.with_extra_args_support(tx)
    updates, new = tx.update(grads, moments, old, global_norm=verdict.norm)
    params = optax.apply_updates(old, updates)
    return _select(verdict.ok, params, old), _select(verdict.ok, new, moments)


def finish(
    state: TrainState, verdict: Verdict, params: Params, opt_state: Any, comm: Any
) -> TrainState:
    """The state after a step that changed these."""
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
    new: TrainState, verdict: Verdict, sums: Sums, scale: Mapping[str, Any], batch: Batch | Pairs
) -> dict[str, Any]:
    """A step's metrics; see :func:`make_step`."""
    rows = [batch.query, batch.document] if isinstance(batch, Pairs) else [batch]
    metrics = {
        "loss": verdict.value,
        "grad_norm": verdict.norm,
        "skipped": new.guard.skipped,
        "bad_in_a_row": new.guard.in_a_row,
        "bad_leaf": verdict.bad_leaf,
        "tokens": sum(jnp.sum(x.segment > 0) for x in rows),
        "pictures": sum(jnp.sum(x.image_start >= 0) for x in rows if x.image_start is not None),
    }
    terms = {f"loss/{name}": scale[name] * s for name, s in sums.terms.items()}
    metrics |= terms if len(terms) > 1 else {}
    return metrics | {name: s / jnp.maximum(w, 1e-20) for name, (s, w) in sums.metrics.items()}


def _select(ok: jax.Array, new: Any, old: Any) -> Any:
    """``new`` where the step is good, else ``old``, bit for bit."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
