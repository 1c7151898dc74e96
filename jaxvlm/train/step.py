"""The training step, on one screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxvlm.train.objective import scales, total
from jaxvlm.types import Batch, Guard, Loss, Params, Runner, TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]


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


def init_state(
    params: Params, frozen: Params, tx: optax.GradientTransformation, comm: Any = ()
) -> TrainState:
    """The state before the first step; under ``jit``, so that it is born sharded."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, frozen, tx.init(params), (), comm, Guard(zero, zero))


def make_step(
    runner: Runner,
    loss: Loss,
    tx: optax.GradientTransformation,
    place: Placement = ANYWHERE,
) -> Step:
    """``step(state, batch) -> (state, metrics)``, pure and ready for ``jax.jit``.

    Args:
        runner: how the model is run.
        loss: sums and weights.
        tx: the optimizer over trainable parameters.
        place: what a strategy splits over the mesh.

    Returns:
        The step. Its metrics are scalars: the loss and, where it has several, its terms as
        ``loss/<term>``, scaled as they add up; ``grad_norm``, ``skipped``, ``bad_in_a_row``,
        ``bad_leaf`` (the index, in the order of sorted paths, of the first gradient that is not
        finite, or -1), ``tokens`` and ``pictures`` in the batch, and each of the loss's metrics
        as a mean.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        scale = scales(loss, batch)
        params, frozen = place.gathered(state.params), place.gathered(state.frozen)
        sums, grads = runner.loss_grad(params, frozen, batch, loss, scale)
        grads, comm = place.reduce(grads, state.comm)
        value, grads, old = total(sums, scale), place.update(grads), place.update(state.params)

        norms = jnp.stack(
            [jnp.sum(jnp.square(g.astype(jnp.float32))) for _, g in sorted(grads.items())]
        )
        ok = jnp.isfinite(value) & jnp.isfinite(jnp.sum(norms))
        bad_leaf = jnp.where(jnp.all(jnp.isfinite(norms)), -1, jnp.argmin(jnp.isfinite(norms)))

        moments = place.moments(state.opt_state)
        updates, opt_state = tx.update(grads, moments, old)
        params = optax.apply_updates(old, updates)
        new = state._replace(
            step=state.step + 1,
            params=_select(ok, params, old),
            opt_state=_select(ok, opt_state, moments),
            comm=_select(ok, comm, state.comm),
            guard=Guard(
                skipped=state.guard.skipped + (~ok).astype(jnp.int32),
                in_a_row=jnp.where(ok, 0, state.guard.in_a_row + 1).astype(jnp.int32),
            ),
        )
        metrics = {
            "loss": value,
            "grad_norm": jnp.sqrt(jnp.sum(norms)),
            "skipped": new.guard.skipped,
            "bad_in_a_row": new.guard.in_a_row,
            "bad_leaf": bad_leaf.astype(jnp.int32),
            "tokens": jnp.sum(batch.segment > 0),
            "pictures": jnp.sum(batch.image_start >= 0) if batch.image_start is not None else 0,
        }
        terms = {f"loss/{name}": scale[name] * s for name, s in sums.terms.items()}
        metrics |= terms if len(terms) > 1 else {}
        means = {name: s / jnp.maximum(w, 1e-20) for name, (s, w) in sums.metrics.items()}
        return new, metrics | means

    return step


def _select(ok: jax.Array, new: Any, old: Any) -> Any:
    """``new`` where the step is good, else ``old``, bit for bit."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
