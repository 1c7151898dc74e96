"""Combine what several sites made of the shared parameters: means, and rules robust to poison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxvlm.config import ConfigError, FederateConfig, check_choice

Deltas = Mapping[str, tuple[np.ndarray, np.ndarray | None]]
"""Path -> a change f32[...], and the rest of it that float32 could not hold, or ``None``."""
_AGGREGATORS = ("mean", "median", "trimmed_mean", "krum", "multi_krum")


def check_aggregator(config: FederateConfig, buffer: int) -> None:
    """Refuse a rule that can't withstand what it is asked to.

    Args:
        config: of the federation.
        buffer: updates in an outer update.

    Raises:
        ConfigError: an unknown rule, or a buffer that is too small for ``byzantine``.
    """
    check_choice("config.federate.aggregator", config.aggregator, _AGGREGATORS)
    n, rule = config.byzantine, config.aggregator
    least = {"trimmed_mean": 2 * n + 1, "krum": 2 * n + 3, "multi_krum": 2 * n + 3}.get(rule, 1)
    least = max(least, 2 * n + 1)
    if buffer < least:
        raise ConfigError(
            f"config.federate.aggregator={rule!r} withstands byzantine={n} poisoned updates only "
            f"in a buffer of at least {least}, and here it is {buffer}; lower byzantine, or raise "
            "config.federate.buffer"
        )
    if rule != "mean" and config.deadline_s and config.min_sites < least:
        raise ConfigError(
            f"config.federate.min_sites={config.min_sites}: aggregator={rule!r} with byzantine={n} "
            f"needs at least {least} updates"
        )


def norm_of(deltas: Deltas) -> float:
    """L2 norm of a change, in float64; NaN or infinite where a value is."""
    return float(np.sqrt(sum(np.sum(np.square(_whole(d))) for _, d in sorted(deltas.items()))))


def chosen(config: FederateConfig, updates: Sequence[Deltas]) -> list[int]:
    """Indices of the updates that are averaged: with (Multi-)Krum those nearest to the others.

    Source: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017.
    """
    everyone = list(range(len(updates)))
    if config.aggregator not in ("krum", "multi_krum"):
        return everyone
    n, near = len(updates), len(updates) - config.byzantine - 2
    apart = np.zeros((n, n))
    for i in everyone:
        for j in everyone[:i]:
            apart[i, j] = apart[j, i] = _distance(updates[i], updates[j])
    scores = [float(np.sum(np.sort(np.delete(apart[i], i))[:near])) for i in everyone]
    best = sorted(everyone, key=lambda i: (scores[i], i))
    return sorted(best[: 1 if config.aggregator == "krum" else near])


def combine(
    config: FederateConfig,
    shared: np.ndarray,
    deltas: Sequence[tuple[np.ndarray, np.ndarray | None]],
    weights: Sequence[float],
    scales: Sequence[float],
) -> np.ndarray:
    """Combine one parameter.

    Args:
        config: names the rule.
        shared: f32[...], the parameter of the current version.
        deltas: its changes.
        weights: of the changes, above 0; read by 'mean' alone.
        scales: factors of the changes, at most 1, by which they are clipped.

    Returns:
        f64[...]: what the parameter becomes with an outer learning rate of 1. Of one unclipped
        change it is exactly what its site made of the parameter.
    """
    base = shared.astype(np.float64)
    wholes = (
        became(base, delta) if scale == 1 else np.asarray(base + scale * _whole(delta))
        for delta, scale in zip(deltas, scales, strict=True)
    )
    if config.aggregator in _ROBUST:
        return _ROBUST[config.aggregator](np.stack(list(wholes)), config.byzantine)
    uniform = config.aggregator != "mean"
    total, result = 0.0, np.zeros(base.shape)
    for whole, weight in zip(wholes, weights, strict=True):
        weight = 1.0 if uniform else weight
        result += weight * whole
        total += weight
    return np.asarray(result / total)


def _trimmed_mean(values: np.ndarray, most: int) -> np.ndarray:
    """Mean f64[...] of f64[n, ...] without the ``most`` largest and smallest of each number."""
    return np.asarray(np.mean(np.sort(values, axis=0)[most : len(values) - most], axis=0))


_ROBUST: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "median": lambda values, _: np.asarray(np.median(values, axis=0)),
    "trimmed_mean": _trimmed_mean,
}


def became(shared: np.ndarray, delta: tuple[np.ndarray, np.ndarray | None]) -> np.ndarray:
    """What a site made of a parameter, f64[...], exactly where float64 can hold it."""
    # In this order the sum is exact: first what float32 could hold of the change.
    change, rest = delta
    whole = shared.astype(np.float64) + change
    return np.asarray(whole if rest is None else whole + rest)


def _whole(delta: tuple[np.ndarray, np.ndarray | None]) -> np.ndarray:
    return became(np.zeros(delta[0].shape), delta)


def _distance(a: Deltas, b: Deltas) -> float:
    """Squared L2 distance of two changes."""
    return float(sum(np.sum(np.square(_whole(a[p]) - _whole(b[p]))) for p in sorted(a)))
