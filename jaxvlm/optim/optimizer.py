"""AdamW with decoupled weight decay and clipping, learning-rate schedule, path patterns."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxvlm.config import ConfigError, OptimConfig, check_choice
from jaxvlm.types import Logical, Params

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
        ConfigError: an unknown schedule, a setting that it does not read, or a warmup as long as
            the run.
    """
    check_choice("config.optim.schedule", config.schedule, _DECAYS)
    if config.schedule == "constant" and config.min_lr_ratio != OptimConfig().min_lr_ratio:
        raise ConfigError(
            f"config.optim.min_lr_ratio={config.min_lr_ratio:g} is not read with "
            "config.optim.schedule='constant'; leave it out, or use cosine or linear"
        )
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


def make_optimizer(
    config: OptimConfig,
    schedule: Schedule,
    logical: dict[str, Logical],
    used_layers: Mapping[str, int] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Build the optimizer over the trainable parameters.

    Args:
        config: learning rates, weight decay, clipping.
        schedule: step -> learning rate.
        logical: trainable path -> logical axes; decides which parameters are decayed.
        used_layers: path pattern of a stack -> how many of its layers are run. Layers after these
            have no gradient, and no weight decay either.
        bounds: path -> the least and the largest value that an update may leave a parameter at.

    Returns:
        An optax transformation over ``{path: array}``, all trainable parameters or a part of them;
        with a part, ``update`` needs the ``global_norm`` f32[] of all gradients.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """
    check_patterns("config.optim.decay", config.decay, logical)
    check_patterns("config.optim.no_decay", config.no_decay, logical)
    decays = decayed(logical, config.decay, config.no_decay)
    scaled = [pattern for pattern, _ in config.lr_multipliers]
    check_patterns("config.optim.lr_multipliers", scaled, logical)
    # Present in either case, so that a run can be resumed with clipping switched on or off.
    clip = _clip(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    parts = [
        clip,
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(
            config.weight_decay, mask=lambda params: {path: decays[path] for path in params}
        ),
        optax.scale_by_learning_rate(schedule),
    ]
    if config.lr_multipliers:
        parts.append(_scale_by_path(config.lr_multipliers))
    if used_layers:
        parts.append(_keep_unused(used_layers))
    if bounds:
        parts.append(_keep_within(bounds))
    return optax.chain(*parts)


def reset_moments(state: Any) -> Any:
    """Return an optimizer's state with Adam's moments and their count at zero, as at the start.

    The count of the learning-rate schedule stays.
    """
    adam = optax.ScaleByAdamState

    def reset(part: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, part) if isinstance(part, adam) else part

    return jax.tree.map(reset, state, is_leaf=lambda part: isinstance(part, adam))


def _clip(most: float) -> optax.GradientTransformationExtraArgs:
    """``optax.clip_by_global_norm``, by a norm that may include gradients not passed here."""

    def update(
        updates: Params, state: Any, _params: Any = None, *, global_norm: Any = None, **_: Any
    ) -> tuple[Params, Any]:
        norm = optax.tree.norm(updates) if global_norm is None else global_norm
        factor = jnp.where(norm < most, 1.0, most / norm)
        return {path: u * factor.astype(u.dtype) for path, u in updates.items()}, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _keep_unused(used_layers: Mapping[str, int]) -> optax.GradientTransformation:
    """Zero the updates of layers that are not run: weight decay alone would shrink them."""

    def kept(path: str, update: jax.Array) -> jax.Array:
        used = next((n for pattern, n in used_layers.items() if matches(path, (pattern,))), None)
        return update if used is None else update.at[used:].set(0)

    def update(updates: Params, _params: Params | None = None) -> Params:
        return {path: kept(path, u) for path, u in updates.items()}

    return optax.stateless(update)


def _keep_within(bounds: Mapping[str, tuple[float, float]]) -> optax.GradientTransformation:
    """Cut updates so that bounded parameters end within their bounds, whatever moved them.

    A gradient that is set to zero at a bound would instead hold the parameter there for ever.
    """

    def update(updates: Params, params: Params | None = None) -> Params:
        assert params is not None
        cut = {
            path: jnp.clip(params[path] + updates[path], *limits) - params[path]
            for path, limits in bounds.items()
            if path in updates
        }
        return updates | cut

    return optax.stateless(update)


def _scale_by_path(scales: tuple[tuple[str, float], ...]) -> optax.GradientTransformation:
    """Multiply updates, weight decay included, by the factor of the first matching pattern."""

    def factor(path: str) -> float:
        return next((value for pattern, value in scales if matches(path, (pattern,))), 1.0)

    def update(updates: Params, _params: Params | None = None) -> Params:
        return {path: u * factor(path) for path, u in updates.items()}

    return optax.stateless(update)


def split_frozen(params: Params, patterns: tuple[str, ...]) -> tuple[Params, Params]:
    """Split a flat dict of parameters into ``(trainable, frozen)``.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """
    check_patterns("config.optim.frozen", patterns, params)
    frozen = {path: x for path, x in params.items() if matches(path, patterns)}
    return {path: x for path, x in params.items() if path not in frozen}, frozen


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether ``path`` matches one of the shell-like ``patterns`` (``*`` crosses slashes)."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def check_patterns(field: str, patterns: Sequence[str], paths: Iterable[str]) -> None:
    """Refuse a pattern that no parameter matches: it would silently have no effect.

    Raises:
        ConfigError: names the pattern, and the parameters' top-level names.
    """
    paths = list(paths)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            known = sorted({path.split("/")[0] + "/*" for path in paths})
            raise ConfigError(f"{field}: no parameter matches {pattern!r}; try {', '.join(known)}")


def decayed(
    logical: dict[str, Logical], decay: Sequence[str], no_decay: Sequence[str]
) -> dict[str, bool]:
    """Return the weight-decay mask: matrices, and what ``decay`` adds.

    Norms, biases, embeddings and positions are not decayed by default.

    Args:
        logical: path -> logical axes.
        decay: patterns of further parameters to decay.
        no_decay: patterns of parameters never to decay.
    """

    def is_matrix(path: str, words: Logical) -> bool:
        inner = [word for word in words if word != "layers"]
        embedding = path.endswith("embed/table")
        return len(inner) > 1 and "position" not in inner and not embedding and not _bias(inner)

    return {
        path: (is_matrix(path, words) or matches(path, decay)) and not matches(path, no_decay)
        for path, words in logical.items()
    }


def _bias(words: Sequence[str]) -> bool:
    """Whether the axes are those of a bias of split heads, which has two dims but no input."""
    return tuple(words) in (("heads", "head_dim"), ("kv_heads", "head_dim"))
