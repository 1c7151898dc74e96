"""Rules that combine updates, against NumPy and SciPy in float64, and what poison does to each."""

import itertools

import numpy as np
import pytest
import scipy.stats

from jaxvlm.config import ConfigError, FederateConfig
from jaxvlm.federate import aggregate

SHARED = np.random.default_rng(9).normal(size=(5, 3)).astype(np.float32)


def changes(count, seed=0):
    draws = np.random.default_rng(seed)
    return [draws.normal(0, 0.1, SHARED.shape).astype(np.float32) for _ in range(count)]


def combined(rule, every, byzantine=0, weights=None):
    config = FederateConfig(sites=len(every), aggregator=rule, byzantine=byzantine)
    deltas = [{"w": (x, None)} for x in every]
    used = aggregate.chosen(config, deltas)
    weights = [1.0] * len(used) if weights is None else [weights[i] for i in used]
    parts = [deltas[i]["w"] for i in used]
    return aggregate.combine(config, SHARED, parts, weights, [1.0] * len(used)), used


def test_means_medians_and_trimmed_means():
    every = changes(7)
    whole = np.stack([np.float64(SHARED) + x for x in every])
    weights = [1.0, 2.0, 0.5, 3.0, 1.0, 1.0, 4.0]
    mean, _ = combined("mean", every, weights=weights)
    np.testing.assert_allclose(mean, np.average(whole, axis=0, weights=weights), rtol=1e-13)
    np.testing.assert_allclose(combined("median", every, 2)[0], np.median(whole, axis=0))
    trimmed = scipy.stats.trim_mean(whole, 2 / 7, axis=0)
    np.testing.assert_allclose(combined("trimmed_mean", every, 2)[0], trimmed, rtol=1e-13)


def test_krum_takes_the_update_nearest_to_its_neighbours():
    every = changes(9, seed=3)
    near = 9 - 2 - 2
    scores = []
    for x in every:
        apart = sorted(np.linalg.norm(np.float64(x) - y) ** 2 for y in every)[1 : near + 1]
        scores.append(sum(apart))
    best = sorted(range(9), key=lambda i: scores[i])
    result, used = combined("krum", every, 2)
    assert used == [best[0]]
    np.testing.assert_array_equal(result, np.float64(SHARED) + every[best[0]])
    result, used = combined("multi_krum", every, 2)
    assert used == sorted(best[:near])
    wanted = np.mean([np.float64(SHARED) + every[i] for i in used], axis=0)
    np.testing.assert_allclose(result, wanted, rtol=1e-13)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum"])
@pytest.mark.parametrize("poison", [1e6, -1e6, 30.0])
def test_poisoned_updates_move_no_robust_rule_beyond_the_honest_ones(rule, poison):
    honest = changes(5)
    bad = [np.full_like(SHARED, poison), np.full_like(SHARED, poison * 0.7)]
    low, high = np.min(honest, axis=0), np.max(honest, axis=0)
    for order in itertools.islice(itertools.permutations(honest + bad), 0, None, 700):
        moved = combined(rule, list(order), 2)[0] - SHARED
        assert (moved >= low - 1e-6).all() and (moved <= high + 1e-6).all()
    assert np.abs(combined("mean", honest + bad)[0] - SHARED).max() > 3  # what a mean does


def test_one_update_is_taken_as_it_is():
    base = np.array([0.1, -3.0, 1e-12], np.float32)
    new = np.array([1e-12, 4.0, 0.1], np.float32)
    config = FederateConfig(sites=1)
    change = new - base
    back = change - new
    rest = (new - (change - back)) - (base + back)
    result = aggregate.combine(config, base, [(change, rest)], [123.0], [1.0])
    assert np.array_equal(result.astype(np.float32), new)


@pytest.mark.parametrize(
    "rule, byzantine, buffer", [("krum", 2, 6), ("multi_krum", 1, 4), ("trimmed_mean", 2, 4)]
)
def test_buffers_that_are_too_small_are_refused(rule, byzantine, buffer):
    config = FederateConfig(sites=9, aggregator=rule, byzantine=byzantine)
    with pytest.raises(ConfigError, match=f"at least {buffer + 1}"):
        aggregate.check_aggregator(config, buffer)
    aggregate.check_aggregator(config, buffer + 1)
