"""Memoization by identity, for functions of a model's config.

A config has a hundred fields. Its hash takes longer than most of what a plan computes from it, and
plans of hundreds of candidates have only a few configs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_MOST = 512
"""Number of kept results, after which all are dropped."""
First = TypeVar("First")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def per_object(
    function: Callable[Concatenate[First, Rest], Result],
) -> Callable[Concatenate[First, Rest], Result]:
    """Memoize a function by the identity of its first argument and the values of the others.

    Args:
        function: of an immutable object, and of hashable arguments. Its result must not
            be changed.
    """
    kept: dict[Any, tuple[First, Result]] = {}

    @functools.wraps(function)
    def memoized(first: First, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        key = id(first), rest, *sorted(named.items())
        if key not in kept:
            if len(kept) == _MOST:
                kept.clear()
            # An object that is kept shares its identity with no other one.
            kept[key] = first, function(first, *rest, **named)
        return kept[key][1]

    return memoized
