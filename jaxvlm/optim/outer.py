"""Outer optimizers: update shared parameters by the mean change of workers that trained apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxvlm.config import ConfigError, OuterConfig, check_choice
from jaxvlm.types import Params

WHERE = "config.outer"
_OPTIMIZERS: dict[str, Callable[[OuterConfig], optax.GradientTransformation]] = {
    "sgd": lambda c: optax.sgd(c.learning_rate, c.momentum or None),
    "nesterov": lambda c: optax.sgd(c.learning_rate, c.momentum, nesterov=True),
    "adam": lambda c: optax.adam(c.learning_rate, c.b1, c.b2, c.eps),
    "yogi": lambda c: optax.yogi(c.learning_rate, c.b1, c.b2, c.eps),
    "adagrad": lambda c: optax.adagrad(c.learning_rate, 0.0, c.eps),
}


def make_outer_optimizer(config: OuterConfig) -> optax.GradientTransformation:
    """Make the optimizer whose gradient is minus the mean change of the workers' parameters.

    Raises:
        ConfigError: a setting that can't be used.

    Source: FedAvg, arXiv 1602.05629; FedOpt, arXiv 2003.00295; DiLoCo, arXiv 2311.08105.
    """
    check_choice(f"{WHERE}.optimizer", config.optimizer, _OPTIMIZERS)
    check_choice(f"{WHERE}.moments", config.moments, ("keep", "reset"))
    if config.momentum >= 1:
        raise ConfigError(f"{WHERE}.momentum={config.momentum:g}: must be below 1")
    if config.optimizer == "nesterov" and not config.momentum:
        raise ConfigError(f"{WHERE}.optimizer='nesterov' needs {WHERE}.momentum, such as 0.9")
    if not config.learning_rate:
        raise ConfigError(f"{WHERE}.learning_rate=0 would change nothing; set it above 0")
    return _OPTIMIZERS[config.optimizer](config)


def is_mean(config: OuterConfig) -> bool:
    """Whether an outer update sets the parameters to the mean of the workers' (FedAvg)."""
    return config.optimizer == "sgd" and config.learning_rate == 1 and not config.momentum


def outer_update(
    config: OuterConfig, tx: optax.GradientTransformation, params: Params, mean: Params, state: Any
) -> tuple[Params, Any]:
    """Update shared parameters.

    Args:
        config: of the outer updates.
        tx: what :func:`make_outer_optimizer` made of it.
        params: the shared parameters.
        mean: what the workers made of them, averaged; of the same shapes.
        state: of ``tx``.

    Returns:
        The new parameters, in the dtypes of ``params``, and the new state. Where the update is the
        mean itself (:func:`is_mean`), no bit of it is rounded again.
    """
    if is_mean(config):
        return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), params, mean), state
    grads = jax.tree.map(lambda old, new: (old - new).astype(old.dtype), params, mean)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state
