"""Numbers that the code uses are derived from settings in one place."""

import math

import pytest

from jaxvlm.config import (
    GRAD_REDUCE_BITS,
    CacheConfig,
    ConfigError,
    StrategyConfig,
    cache_halvings,
    grad_reduce_bits,
)
from jaxvlm.config.describe import groups


def test_the_smallest_fraction_of_pages_is_a_number_of_halvings():
    assert cache_halvings(CacheConfig()) == 0
    for n in (1, 2, 3, 40):
        assert cache_halvings(CacheConfig(min_pages_fraction=0.5**n)) == n


@pytest.mark.parametrize(
    ("fraction", "nearest"),
    [(0.3, "0.25"), (0.4, "0.5"), (0.1, "0.125"), (0.9, "1"), (0.7, "0.5"), (2.0, "1")],
)
def test_other_fractions_are_refused_with_the_nearest(fraction, nearest):
    says = (
        rf"^config\.cache\.min_pages_fraction={fraction:g}: .* allowed; the nearest is {nearest}$"
    )
    with pytest.raises(ConfigError, match=says):
        cache_halvings(CacheConfig(min_pages_fraction=fraction))


@pytest.mark.parametrize("fraction", [0.0, -0.5, math.nan, math.inf])
def test_what_is_no_fraction_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"min_pages_fraction=.* are allowed$|the nearest is 1$"):
        cache_halvings(CacheConfig(min_pages_fraction=fraction))


def test_bits_of_gradients():
    (strategy,) = [group for group in groups() if group.path == "config.strategy"]
    (setting,) = [x for x in strategy.settings if x.path.endswith("grad_reduce_dtype")]
    assert setting.allowed == tuple(GRAD_REDUCE_BITS)
    given = [grad_reduce_bits(StrategyConfig(grad_reduce_dtype=name)) for name in GRAD_REDUCE_BITS]
    assert given == [32, 16, 8, 4]
