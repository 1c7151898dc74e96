"""The mean of adapters is the mean of their products."""

import numpy as np
import pytest

from jaxvlm.federate import adapters


def drawn(sites, stack, inner, outer, rank, seed=0):
    draws = np.random.default_rng(seed)
    return [
        (draws.normal(size=(*stack, *inner, rank)), draws.normal(size=(*stack, rank, *outer)))
        for _ in range(sites)
    ]


def product(a, b, stacked):
    rank, stack = a.shape[-1], a.shape[:stacked]
    return a.reshape(*stack, -1, rank) @ b.reshape(*stack, rank, -1)


@pytest.mark.parametrize("stack, inner, outer", [((), (12,), (9,)), ((3,), (10,), (2, 5))])
def test_it_is_the_best_adapter_of_the_mean_product(stack, inner, outer):
    pairs, weights = drawn(3, stack, inner, outer, 2), [1.0, 2.0, 5.0]
    a, b, lost = adapters.mean_product(pairs, weights, len(stack))
    assert a.shape == pairs[0][0].shape and b.shape == pairs[0][1].shape
    wanted = sum(w * product(*p, len(stack)) for p, w in zip(pairs, weights)) / 8
    u, s, vt = np.linalg.svd(wanted, full_matrices=False)
    best = u[..., :2] * s[..., None, :2] @ vt[..., :2, :]  # Eckart and Young
    np.testing.assert_allclose(product(a, b, len(stack)), best, atol=1e-12)
    assert lost == pytest.approx(np.sum(s[..., 2:] ** 2) / np.sum(s**2), rel=1e-9)


def test_what_the_rank_holds_is_exact():
    # Sites' products in one space of two dims: their mean has rank 2.
    draws = np.random.default_rng(1)
    left, right = draws.normal(size=(12, 2)), draws.normal(size=(2, 9))
    pairs = [
        (left @ (m := draws.normal(size=(2, 2))), np.linalg.inv(m) @ right * k) for k in (1, 3)
    ]
    a, b, lost = adapters.mean_product(pairs, [1.0, 1.0], 0)
    np.testing.assert_allclose(a @ b, 2 * left @ right, atol=1e-12)
    assert abs(lost) < 1e-12


def test_one_site_and_equal_first_matrices_are_kept():
    pairs = [(np.float32(a), np.float32(b)) for a, b in drawn(2, (), (12,), (9,), 2)]
    (a, b), (_, other) = pairs
    got_a, got_b, lost = adapters.mean_product([(a, b)], [7.0], 0)
    assert np.array_equal(got_a, a) and np.array_equal(np.float32(got_b), b) and lost == 0
    got_a, got_b, lost = adapters.mean_product([(a, b), (a, other)], [1.0, 3.0], 0)
    assert np.array_equal(got_a, a) and lost == 0
    wanted = (np.float64(b) + 3 * np.float64(other)) / 4
    np.testing.assert_allclose(got_b, wanted, rtol=1e-13)


def test_an_adapter_never_dies():
    """With B = 0 at all sites the mean's A must not be zero too: no gradient would be left."""
    pairs = [(a, 0 * b) for a, b in drawn(3, (), (12,), (9,), 2)]
    a, b, lost = adapters.mean_product(pairs, [1.0] * 3, 0)
    assert not b.any() and lost == 0
    assert np.linalg.norm(a, axis=0).min() > 1


def test_the_mean_of_matrices_apart_is_another_thing():
    pairs = drawn(2, (), (12,), (9,), 2)
    mean = sum(a for a, _ in pairs) / 2 @ (sum(b for _, b in pairs) / 2)
    assert np.linalg.norm(mean - sum(a @ b for a, b in pairs) / 2) > 1


def test_a_map_may_be_narrower_than_the_rank():
    pairs = drawn(2, (), (12,), (4,), 8)
    a, b, lost = adapters.mean_product(pairs, [1.0, 1.0], 0)
    assert a.shape == (12, 8) and b.shape == (8, 4) and lost == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(a @ b, sum(x @ y for x, y in pairs) / 2, atol=1e-12)
