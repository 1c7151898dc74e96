"""Policies that say when cached tokens are stale: by version lag, by measured drift, by draw."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import CacheConfig, ConfigError, extension

_EVEN = 0.5
"""Share of a draw's probability that is equal for all images, so that none is close to 0."""
NEVER = 2**30
"""A version or lag that no run reaches."""
_CUSTOM = "config.cache.custom_policy"


@dataclasses.dataclass(frozen=True)
class Policy:
    """Decides which cached tokens are stale. Staleness is in updates of the vision encoder.

    ``config.cache.custom_policy`` names a subclass: it may add fields, and replace
    :meth:`next_refresh` and :meth:`draw`, which run inside of the compiled step.
    """

    max_staleness: int = 0
    """Tokens with a higher lag are never read."""
    prefetch_staleness: int = NEVER
    """Above this lag tokens are recomputed early, where an encode batch that runs has free room."""
    drift_threshold: float = 0.0
    """Tokens are stale once they are estimated to have changed by this, relative to their norm;
    0: never for that reason."""
    refresh_fraction: float = 0.0
    """Expected fraction of the hits that are drawn at random and encoded nevertheless."""
    seed: int = 0
    """Of the draws."""
    by_importance: bool = False
    """Draw by how much a refresh would change the loss, instead of uniformly."""
    refresh_burst: int = 0
    """Number of consecutive steps that a burst refreshes completely, with no draws between bursts;
    0: draw some images in each step."""

    @property
    def measures(self) -> bool:
        """Whether the policy uses the measured drift of tokens."""
        return self.drift_threshold > 0 or self.by_importance

    def next_refresh(self, version: jax.Array, drift: jax.Array) -> jax.Array:
        """Return the version from which on tokens computed at ``version`` are stale.

        Intervals are powers of two, since the drift is not known more precisely than that.

        Args:
            version: i32.
            drift: f32, of the same shape: relative change that one update makes.

        Returns:
            i32, of the same shape.
        """
        if not self.drift_threshold:
            return jnp.full_like(drift, NEVER, jnp.int32)
        least = self.drift_threshold / (self.max_staleness + 1)
        updates = self.drift_threshold / jnp.maximum(drift, least)
        return version + jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(updates, 1)))).astype(jnp.int32)

    def draw(
        self, allowed: jax.Array, need: jax.Array | None, step: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Images whose tokens could be read, but are recomputed; where ``refresh_fraction`` is set.

        Args:
            allowed: bool[n]: what may be drawn.
            need: f32[n]: how much a new gradient would change; ``None``: all the same.
            step: i32[]: of the run.

        Returns:
            bool[n]: which are drawn; f32[n]: the probability with which each was, above 0 where
            ``allowed``. Gradients are divided by it.
        """
        if self.refresh_burst:
            step = step // self.refresh_burst
            return draw_step(allowed, self.refresh_fraction, step, self.seed)
        return draw(allowed, need, self.refresh_fraction, step, self.seed)


def make_policy(config: CacheConfig, seed: int = 0) -> Policy:
    """What the settings say of when tokens are stale.

    Raises:
        ConfigError: the user's own policy can't be used.
    """
    if config.policy == "custom":
        return _custom_policy(config, seed)
    late = config.policy in ("lazy", "hybrid", "adaptive")
    return Policy(
        max_staleness=config.max_staleness if late else 0,
        prefetch_staleness=config.prefetch_staleness if config.policy == "hybrid" else NEVER,
        drift_threshold=config.drift_threshold if config.policy == "adaptive" else 0.0,
        refresh_fraction=config.refresh_fraction,
        seed=seed,
        by_importance=config.policy == "adaptive"
        and config.refresh_fraction > 0
        and not config.refresh_burst,
        refresh_burst=config.refresh_burst,
    )


def _custom_policy(config: CacheConfig, seed: int) -> Policy:
    """The policy of the user's own; as built-in ones, it draws by the run's seed."""
    if not extension.is_set(config.custom_policy, _CUSTOM):
        raise ConfigError(f"config.cache.policy='custom' needs {_CUSTOM}.target=FILE.py:CLASS")
    found = extension.resolve(config.custom_policy, _CUSTOM)
    what = f"{_CUSTOM}.target={config.custom_policy.target!r}"
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"{what} is no subclass of jaxvlm.cache.policy.Policy; derive it")
    made = extension.make(config.custom_policy, _CUSTOM, {"seed": seed})
    for name in ("max_staleness", "prefetch_staleness", "drift_threshold", "refresh_fraction"):
        most = 1 if name == "refresh_fraction" else NEVER
        if not 0 <= getattr(made, name) <= most:
            raise ConfigError(f"{what}: set {name}={getattr(made, name)} between 0 and {most}")
    if made.refresh_fraction and made.prefetch_staleness < made.max_staleness:
        raise ConfigError(
            f"{what}: refresh_fraction={made.refresh_fraction} with a prefetch_staleness below "
            "max_staleness: images that are encoded ahead of time were not drawn, so gradients "
            "would be biased; set one of them"
        )
    return made


def draw_step(
    allowed: jax.Array, share: float, number: Any, seed: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Draw either all images of a step or none; drawn steps are equally spaced.

    Args:
        allowed: bool[n]: which images may be drawn.
        share: fraction of the steps that are drawn.
        number: i32[]: number of the step, or of the burst of steps.
        seed: of the run; it sets the first drawn step.

    Returns:
        As :func:`draw`: bool[n], which are drawn; f32[n], ``share`` where allowed, else 0.
    """
    start = jax.random.uniform(jax.random.key(seed))
    # Computed with numbers below 1, so that rounding loses no step in a long run.
    low, high = jnp.mod(number, 1 << 12), number >> 12
    phase = jnp.mod(low * share + high * ((share * (1 << 12)) % 1), 1)
    drawn = jnp.mod(phase + start, 1) + share >= 1
    return allowed & drawn, jnp.where(allowed, share, 0.0)


def draw(
    allowed: jax.Array, need: jax.Array | None, share: float, step: Any, seed: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Draw images by systematic sampling: a random start, then steps of 1 along the cumulated
    probabilities.

    Args:
        allowed: bool[n]: which images may be drawn.
        need: f32[n], not negative: probabilities are half uniform, half proportional to it where
            that is below 1; ``None``: uniform.
        share: expected fraction of ``allowed`` that is drawn.
        step: i32[]: number of the step; draws of different steps are independent.
        seed: of the run.

    Returns:
        bool[n]: ``share * sum(allowed)`` of them are set; where that is no integer, one of its
        two neighbours, so that it is the mean. f32[n]: the probability that each was drawn with:
        at least half of ``share`` where it is allowed, else 0.

    Source: Madow, On the theory of systematic sampling II (1949).
    """
    chance = jnp.where(allowed, share, 0.0)
    if need is not None:
        chance = _EVEN * chance + (1 - _EVEN) * _proportional(allowed, need, jnp.sum(chance))
    start = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), step))
    steps = jnp.floor(jnp.cumsum(chance) + start)
    return steps > jnp.concatenate([jnp.zeros(1), steps[:-1]]), chance


def _proportional(allowed: jax.Array, need: jax.Array, k: jax.Array) -> jax.Array:
    """Return probabilities f32[n]: proportional to ``need``, at most 1, with sum k."""
    size = jnp.where(allowed, need + 1e-6 * jnp.max(need) + 1e-30, 0)
    size /= jnp.maximum(jnp.max(size), 1e-30)
    falling = -jnp.sort(-size)
    # The j largest are 1; the others share the rest of k.
    rest = jnp.cumsum(falling[::-1])[::-1]
    factor = (k - jnp.arange(len(size))) / jnp.maximum(rest, 1e-30)
    return jnp.minimum(1, size * factor[jnp.argmax(factor * falling <= 1)])
