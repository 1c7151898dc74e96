"""Budgets: exact sums, bounds, proportions in exact fractions, kvpress's pyramid."""

from __future__ import annotations

import functools
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import PLACES, golden

from jaxvlm.inference import kv_budget

LAYERS, PROMPTS = 5, 4
BUDGETS = (0.004, 0.1, 0.35, 1.0)
UNIT = 2 ** (30 - LAYERS.bit_length())  # steps of densities

by_density = jax.jit(kv_budget.divided_by_density, static_argnums=(0, 3))
pyramid = jax.jit(kv_budget.divided_pyramid, static_argnums=(0, 1, 3))

lengths = st.one_of(st.integers(0, 12), st.integers(0, 3000), st.just(100_000))
steps = st.one_of(st.just(0), st.just(UNIT), st.integers(0, UNIT))
columns = st.lists(st.lists(steps, min_size=LAYERS, max_size=LAYERS), min_size=4, max_size=4)


def rounded(budget, num_layers, m):
    """The total in decimal arithmetic, within its bounds."""
    exact = (Decimal(str(budget)) * num_layers * m).to_integral_value(ROUND_HALF_UP)
    return max(num_layers * min(m, 1), min(num_layers * m, int(exact)))


@given(
    st.integers(1, 10_000),
    st.sampled_from([1, 2, 5, 28, 80]),
    st.lists(lengths, min_size=4, max_size=4),
)
@settings(max_examples=100, deadline=None)
def test_as_many_are_kept_as_were_asked_for(parts, num_layers, m):
    budget = parts / 10_000
    expected = [rounded(budget, num_layers, x) for x in m]
    array = jnp.asarray(m, jnp.int32)
    assert kv_budget.num_kept(budget, num_layers, array).tolist() == expected
    even = np.asarray(kv_budget.divided_evenly(budget, num_layers, array))
    assert even.sum(axis=0).tolist() == expected
    assert np.all(even.max(axis=0) - even.min(axis=0) <= 1)
    assert np.all(np.diff(even, axis=0) <= 0)


def water_filled(budget, m, weights):
    """Places of one prompt's layers, in fractions: find the level between two of its bends."""
    total, L = rounded(budget, len(weights), m), len(weights)
    least = min(m, max(1, min(-(-m // 100), total // L)))
    weights = [Fraction(max(w, 1)) for w in weights]

    def at(level):
        return [min(max(level * w, least), m) for w in weights]

    bends = sorted({Fraction(bound) / w for bound in (least, m) for w in weights})
    after = next(x for x in bends if sum(at(x)) >= total)
    share = at(after)
    if sum(share) > total:
        before = bends[bends.index(after) - 1]
        low, high = sum(at(before)), sum(share)
        share = at(before + (after - before) * Fraction(total - low) / (high - low))
    floors = [int(x) for x in share]
    by_rest = sorted(range(L), key=lambda i: (floors[i] - share[i], i))
    for i in by_rest[: total - sum(floors)]:
        floors[i] += 1
    return floors


@pytest.mark.parametrize("budget", BUDGETS)
@given(m=st.lists(lengths, min_size=4, max_size=4), columns=columns)
@settings(max_examples=60, deadline=None)
def test_density_divides_as_exact_fractions_do(budget, m, columns):
    density = np.array(columns).T / UNIT
    density = density.astype(np.float32)  # steps that float32 has are the ones that are compared
    weights = [[int(x * UNIT) for x in column.astype(np.float64)] for column in density.T]
    kept = np.asarray(by_density(budget, jnp.asarray(m, jnp.int32), density))
    for column, places, ours in zip(weights, m, kept.T.tolist(), strict=True):
        assert sum(ours) == rounded(budget, LAYERS, places)
        assert ours == water_filled(budget, places, column), (places, column)


def test_a_share_just_below_the_whole_prompt_is_rounded_with_the_others():
    cases = (
        (11, (2, 5, 2, 13, 1)),
        (7, (0, 5, 2, 4, 16)),
        (6, (0, 4, 4, 0, 13)),
        (9, (16, 0, 0, 0, 0)),
    )
    m = np.array([places for places, _ in cases], np.int32)
    sixteenths = np.array([column for _, column in cases]).T
    kept = np.asarray(by_density(0.35, m, (sixteenths / 16).astype(np.float32)))
    for (places, column), ours in zip(cases, kept.T.tolist(), strict=True):
        assert ours == water_filled(0.35, places, [x * UNIT // 16 for x in column])
    assert kept[:, 0].tolist() == [2, 4, 2, 10, 1]


@pytest.mark.parametrize("clip", [False, True])
def test_a_prompts_division_is_its_own(clip):
    random = np.random.RandomState(1)
    m = random.randint(0, 2000, 12).astype(np.int32)
    density = random.rand(LAYERS, 12).astype(np.float32) ** 4
    run = functools.partial(by_density, 0.1)
    together = np.asarray(run(m, density, clip))
    order = random.permutation(12)
    np.testing.assert_array_equal(run(m[order], density[:, order], clip), together[:, order])
    for b in range(3):
        alone = run(m[b : b + 1], density[:, b : b + 1], clip)
        np.testing.assert_array_equal(alone[:, 0], together[:, b])
    ladder = pyramid(0.3, LAYERS, m, 4)
    np.testing.assert_array_equal(pyramid(0.3, LAYERS, m[3:4], 4)[:, 0], ladder[:, 3])


@pytest.mark.parametrize("num_layers", [1, 32, 80])
def test_models_of_other_depths_divide_exactly(num_layers):
    random = np.random.RandomState(num_layers)
    m = np.array([1, 700, 32768], np.int32)
    density = random.rand(num_layers, 3).astype(np.float32) ** 6
    kept = np.asarray(by_density(0.1, m, density))
    assert kept.sum(axis=0).tolist() == [rounded(0.1, num_layers, int(x)) for x in m]
    assert np.all(kept >= np.minimum(m, -(-m // 100))) and np.all(kept <= m)
    for column, ours in zip(density.T, kept.T, strict=True):  # the denser, the more
        assert np.all(np.diff(ours[np.argsort(column, kind="stable")]) >= 0)
    equal = by_density(0.1, m, np.zeros_like(density))
    np.testing.assert_array_equal(equal, kv_budget.divided_evenly(0.1, num_layers, jnp.array(m)))


def test_the_papers_formula_is_effivlm_benchs_and_off_its_budget():
    expected = golden("kv_effivlm")
    density = (1 - np.array(expected["sparsity"], np.float32))[:, None]
    sums = []
    for case in expected["cases"]:
        kept = by_density(case["budget"], np.array([PLACES], np.int32), density, True)[:, 0]
        # A share times the places, in float64, is no whole number that float32 could miss.
        shares = np.array(case["shares"]) * PLACES
        rest = shares % 1
        assert np.all((shares >= PLACES) | ((rest > 1e-4) & (rest < 1 - 1e-6)))
        np.testing.assert_array_equal(kept, np.floor(shares))
        sums.append(int(kept.sum()) / (case["budget"] * LAYERS * PLACES))
    assert sums[2] < 0.9
    one = np.array([[0.5], [0], [0], [0], [0]], np.float32)
    assert by_density(0.01, np.array([1000], np.int32), one, True)[:, 0].tolist() == [49, *[10] * 4]


def test_the_pyramid_is_kvpresss_with_an_exact_sum():
    pyramids = 0
    for case in golden("kv_kvpress")["pyramid"]:
        m, theirs = case["m"], np.array(case["kept"])
        L = len(theirs)
        ours = np.asarray(pyramid(case["budget"], L, np.array([m], np.int32), case["window"]))[:, 0]
        assert ours.sum() == rounded(case["budget"], L, m)
        assert np.all(np.abs(ours - theirs) <= 1), case
        pyramids += int(theirs[0] > theirs[-1] + 1)
    assert pyramids > 12
