"""Learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxvlm.config import ConfigError, OptimConfig

Schedule = Callable[[jax.Array], jax.Array]

_DECAYS: dict[str, Callable[[OptimConfig, int], optax.Schedule]] = {
    "constant": lambda c, n: optax.constant_schedule(c.learning_rate),
    "linear": lambda c, n: optax.linear_schedule(
        c.learning_rate, c.learning_rate * c.min_lr_ratio, n
    ),
    "cosine": lambda c, n: optax.cosine_decay_schedule(c.learning_rate, n, c.min_lr_ratio),
}


def make_schedule(config: OptimConfig, steps: int) -> Schedule:
    """Make a linear warmup from 0, then ``config.schedule`` down to ``min_lr_ratio`` at ``steps``.

    Args:
        config: the schedule's settings.
        steps: steps of the whole run.

    Returns:
        Step i32[] -> learning rate f32[].

    Raises:
        ConfigError: an unknown schedule, or a warmup as long as the run.
    """
    if config.schedule not in _DECAYS:
        known = ", ".join(_DECAYS)
        raise ConfigError(f"config.optim.schedule={config.schedule!r}; known: {known}")
    given = config.warmup_steps
    if given > 1 and given != int(given):
        raise ConfigError(
            f"config.optim.warmup_steps={given:g}: set a whole number of steps, or a fraction of "
            "all steps below 1"
        )
    warmup = round(given * steps) if given < 1 else round(given)
    if warmup >= steps and given >= 1:
        raise ConfigError(
            f"config.optim.warmup_steps={given:g} leaves none of the {steps} steps; "
            "lower it; below 1 it is a fraction of the steps"
        )
    warmup = min(warmup, steps - 1)
    decay = _DECAYS[config.schedule](config, steps - warmup)
    if not warmup:
        return lambda step: jnp.asarray(decay(step), jnp.float32)
    # Step 0 has a learning rate above 0: the first increment of the warmup.
    rise = optax.linear_schedule(0.0, config.learning_rate, warmup)

    def schedule(step: jax.Array) -> jax.Array:
        rising = rise(step + 1)
        return jnp.where(step < warmup, rising, decay(step - warmup))

    return schedule
