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
        c.learning_rate, c.learning_rate * c.final_share, n
    ),
    "cosine": lambda c, n: optax.cosine_decay_schedule(c.learning_rate, n, c.final_share),
}


def make_schedule(config: OptimConfig, steps: int) -> Schedule:
    """Linear warm-up from 0, then ``config.schedule`` down to ``final_share`` at ``steps``.

    Args:
        config: the schedule's fields.
        steps: steps of the whole run.

    Returns:
        Step i32[] -> learning rate f32[].

    Raises:
        ConfigError: an unknown schedule, or a warm-up that fills the run.
    """
    if config.schedule not in _DECAYS:
        known = ", ".join(_DECAYS)
        raise ConfigError(f"config.optim.schedule={config.schedule!r}; known: {known}")
    if config.warmup_steps >= steps:
        raise ConfigError(
            f"config.optim.warmup_steps={config.warmup_steps} leaves none of the {steps} steps; "
            "lower it"
        )
    decay = _DECAYS[config.schedule](config, steps - config.warmup_steps)
    if not config.warmup_steps:
        return lambda step: jnp.asarray(decay(step), jnp.float32)
    # Step 0 already learns: its rate is one part of the way up.
    rise = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)

    def schedule(step: jax.Array) -> jax.Array:
        warm = rise(step + 1)
        return jnp.where(step < config.warmup_steps, warm, decay(step - config.warmup_steps))

    return schedule
