"""The measure that gradients are compared by: what it lets pass, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest
from builders import ROUNDING, assert_gradients_close, norm_of, rounding_of

BK, WK, BQ = "vision/attn/bk", "vision/attn/wk", "vision/attn/bq"


def some_gradients():
    """Of a key bias that has none: its terms, as large as its kernel's gradient, cancelled."""
    rng = np.random.default_rng(0)
    grads = {name: rng.normal(size=(16, 8, 2)).astype(np.float32) for name in (WK, "vision/wo")}
    grads |= {name: rng.normal(size=(8, 2)).astype(np.float32) for name in (BK, BQ)}
    grads[BQ] *= 1e-2
    grads[BK] *= np.float32(0.9 * rounding_of(BK, grads) / norm_of(grads[BK]))
    return grads


def moved(grads, path, by):
    """``grads``, one leaf off by an embedding of length ``by``."""
    step = np.random.default_rng(1).normal(size=grads[path].shape)
    return {**grads, path: grads[path] + step * by / norm_of(step)}


def bar_of(grads, path):
    """DESIGN's 1e-5, written out again."""
    flat = np.concatenate([g.reshape(-1) for g in grads.values()])
    floor = 1e-2 * norm_of(flat) * (grads[path].size / flat.size) ** 0.5
    return 1e-5 * max(norm_of(grads[path]), floor)


def test_two_roundings_of_nothing_are_equal():
    grads = some_gradients()
    assert norm_of(grads[BK]) > bar_of(grads, BK)  # else it would be nothing by the bar alone
    assert_gradients_close({**grads, BK: -grads[BK]}, grads)
    assert_gradients_close({**grads, BK: 0 * grads[BK]}, grads)


@pytest.mark.parametrize("path", [WK, BQ, "vision/wo"])
def test_a_leaf_that_has_a_gradient_is_held_to_the_contract(path):
    grads = some_gradients()
    assert_gradients_close(moved(grads, path, 0.9 * bar_of(grads, path)), grads)
    for fault in (1.1, 10):
        with pytest.raises(AssertionError, match=path):
            assert_gradients_close(moved(grads, path, fault * bar_of(grads, path)), grads)


def test_so_is_a_key_bias_that_has_one():
    """Of keys that are rotated: small, and more than rounding."""
    grads = some_gradients()
    grads[BK] *= 2
    assert_gradients_close(moved(grads, BK, 0.9 * bar_of(grads, BK)), grads)
    with pytest.raises(AssertionError, match=BK):
        assert_gradients_close(moved(grads, BK, 1.1 * bar_of(grads, BK)), grads)


@pytest.mark.parametrize("fault", [1.1, 10])
def test_a_gradient_where_there_is_none_is_found(fault):
    grads = some_gradients()
    grads[BK] *= 0
    bar = 32 * 2**-24 * norm_of(grads[WK]) / 4  # a kernel of 16 inputs: terms are 1/sqrt(16) of it
    with pytest.raises(AssertionError, match=BK):
        assert_gradients_close(moved(grads, BK, fault * bar), grads)


def test_other_leaves_are_not_known_to_cancel():
    grads = some_gradients()
    assert rounding_of(BQ, grads) == rounding_of(WK, grads) == 0
    assert rounding_of(BK, {BK: grads[BK]}) == 0  # without the kernel's: the contract alone
    assert rounding_of(BK, grads) == ROUNDING * norm_of(grads[WK]) / 4
