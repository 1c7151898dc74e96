"""What a compressed KV cache keeps, as a pair: an allocator divides places, a scorer ranks them."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.config import ConfigError, check_choice
from jaxvlm.inference.kv_budget import (
    divided_by_density,
    divided_evenly,
    divided_pyramid,
    share_of,
)
from jaxvlm.inference.kv_selection import PRIORITIES, READ_ROWS

PRESETS = {
    "vl_cache": ("vl_cache", "density", 0.1),
    "snapkv": ("snapkv", "even", 0.0),
    "pyramid": ("snapkv", "pyramid", 0.0),
    "window": ("window", "even", 0.0),
    "random": ("random", "even", 0.0),
}
"""Published methods, and a control, by name: (scorer, allocator, share of recent places)."""
NONE = "none"
"""The name of no method: whole prompts."""
DEFAULT_BUDGET = 0.1
"""The budget of methods where none is given."""
ALLOCATORS = ("even", "density", "pyramid")


class KVPolicy(NamedTuple):
    """Settings of a compressed KV cache; a static argument of jitted functions."""

    scorer: str
    """Ranks places, in :data:`jaxvlm.inference.kv_selection.PRIORITIES`."""
    allocator: str
    """Divides the budget among layers, in :data:`ALLOCATORS`."""
    budget: float = DEFAULT_BUDGET
    """Share of a prompt's places that the layers keep on average, in (0, 1]."""
    recent: float = 0.0
    """Share of a layer's kept places that are the most recent ones, whatever their scores, in
    [0, 1]. Above 0 it is at least one place. VL-Cache: 0.1; SnapKV's window is its scorer's."""
    queries: int = 50
    """Number of a prompt's last tokens that may be observed; SnapKV's window. VL-Cache: 50."""
    threshold: float = 0.01
    """An attention weight counts as dense from this share of its row's largest on, in [0, 1]."""
    clip: bool = False
    """Divide by VL-Cache's own formula, whose sum is not the budget's; only of ``density``."""

    @property
    def reads_density(self) -> bool:
        """Whether the layers' densities are read."""
        return self.allocator == "density"

    @property
    def scores_rows(self) -> bool:
        """Whether the scorer reads attention weights."""
        return self.scorer in READ_ROWS


_DEFAULTS = KVPolicy("", "")


def preset(name: str, **changes: Any) -> KVPolicy:
    """Return a policy by the name of its method.

    Args:
        name: in :data:`PRESETS`.
        changes: fields that differ from their defaults.

    Raises:
        ConfigError: the name is unknown, or a value is outside of its range.
    """
    check_choice("kv", name, PRESETS)
    scorer, allocator, recent = PRESETS[name]
    policy = KVPolicy(scorer, allocator, recent=recent)._replace(**changes)
    check_policy(policy)
    # Numbers of NumPy's, as those of a sweep, compile nothing anew.
    return policy._replace(
        budget=float(policy.budget), recent=float(policy.recent), queries=int(policy.queries),
        threshold=float(policy.threshold),
    )  # fmt: skip


def policy_of(
    kv: str = NONE,
    kv_budget: float | None = None,
    kv_allocator: str | None = None,
    kv_recent: float | None = None,
    kv_queries: int | None = None,
    kv_threshold: float | None = None,
    kv_clip: bool | None = None,
) -> KVPolicy | None:
    """Return the policy that flags or keyword arguments name; ``None``: nothing is compressed.

    Args:
        kv: method, in :data:`PRESETS`, or ``none``.
        kv_budget: share of a prompt's places that the layers keep on average, in (0, 1].
        kv_allocator: divides the budget among layers, in :data:`ALLOCATORS`.
        kv_recent, kv_queries, kv_threshold, kv_clip: see :class:`KVPolicy`. Of all, ``None`` is the
            method's own.

    Raises:
        ConfigError: an unknown name, a value out of range, or settings without a method.
    """
    given = {
        "allocator": kv_allocator,
        "budget": kv_budget,
        "recent": kv_recent,
        "queries": kv_queries,
        "threshold": kv_threshold,
        "clip": kv_clip,
    }
    given = {name: x for name, x in given.items() if x is not None}
    if kv == NONE:
        if given:
            name = f"kv_{next(iter(given))}"
            raise ConfigError(
                f"{name} is for a compressed KV cache: choose a method, such as kv=vl_cache, "
                f"or leave {name} out"
            )
        return None
    check_choice("kv", kv, (NONE, *PRESETS))
    return preset(kv, **given)


def without_scores(policy: KVPolicy, places: int, num_layers: int) -> str:
    """A line where a method keeps so little of a prompt that it is another one; else ""."""
    mean = policy.budget * places
    if policy.scorer == "snapkv" and mean <= policy.queries:
        return (
            f"kv: of {places} places about {mean:.0f} are kept a layer, all of them among the last "
            f"{policy.queries} (kv_queries), so no score is read and most of an image is lost; "
            "lower kv_queries, or raise kv_budget"
        )
    prompt = jnp.asarray([places], jnp.int32)
    even = divided_evenly(policy.budget, num_layers, prompt)
    if policy.allocator == "pyramid" and np.array_equal(
        even, divided_pyramid(policy.budget, num_layers, prompt, policy.queries)
    ):
        return (
            f"kv: of {places} places about {mean:.0f} are kept a layer, too few for a pyramid over "
            f"a window of {policy.queries} (kv_queries): all layers keep equally many"
        )
    return ""


def check_policy(policy: KVPolicy) -> None:
    """Check a policy's values.

    Raises:
        ConfigError: one is unknown or outside of its range.
    """
    for name in ("budget", "recent", "threshold"):
        if not isinstance(value := getattr(policy, name), numbers.Real):
            raise ConfigError(f"kv_{name}={value!r} must be a number")
    if not isinstance(policy.queries, numbers.Integral):
        raise ConfigError(f"kv_queries={policy.queries!r} must be a whole number")
    check_choice("kv_scorer", policy.scorer, PRIORITIES)
    check_choice("kv_allocator", policy.allocator, ALLOCATORS)
    if not 0 < policy.budget <= 1:
        raise ConfigError(f"kv_budget={policy.budget}; it is a share of the places, in (0, 1]")
    for name in ("recent", "threshold"):
        if not 0 <= getattr(policy, name) <= 1:
            raise ConfigError(f"kv_{name}={getattr(policy, name)}; it is a share, in [0, 1]")
    if policy.queries < 1:
        raise ConfigError(f"kv_queries={policy.queries}; at least one query is observed")
    if policy.clip and not policy.reads_density:
        raise ConfigError(f"kv_clip is read by kv_allocator=density, not {policy.allocator}")
    has_window = policy.scores_rows or policy.reads_density or policy.allocator == "pyramid"
    for name, is_read in (("threshold", policy.reads_density), ("queries", has_window)):
        if not is_read and getattr(policy, name) != getattr(_DEFAULTS, name):
            raise ConfigError(
                f"kv_{name} is not read by the scorer {policy.scorer} with the allocator "
                f"{policy.allocator}; leave it out"
            )


def allocate(policy: KVPolicy, m: jax.Array, density: jax.Array) -> jax.Array:
    """Divide the budget among the layers.

    Args:
        policy: settings; static.
        m: i32[B], places of each prompt.
        density: f32[L, B]; see :func:`jaxvlm.nn.attention_rows.densities`. Of other allocators than
            ``density`` only the shape is read.

    Returns:
        i32[L, B] places that a layer keeps of a prompt.
    """
    num_layers = density.shape[0]
    if policy.allocator == "density":
        return divided_by_density(policy.budget, m, density, policy.clip)
    if policy.allocator == "pyramid":
        return divided_pyramid(policy.budget, num_layers, m, policy.queries)
    return divided_evenly(policy.budget, num_layers, m)


def most_of_layer(allocator: str, total: int, num_layers: int) -> int:
    """Return the most places that a layer may keep where all layers together keep ``total``."""
    if allocator == "even":
        return -(-total // num_layers)
    if allocator == "pyramid":  # the first layer keeps nearly twice the mean
        return -(-2 * total // num_layers)
    return total


def recent_places(policy: KVPolicy, count: jax.Array) -> jax.Array:
    """Compute how many of the kept places are the most recent, of any i32 ``count`` of kept ones.

    The share is rounded down, and is at least one place if it is above 0.
    """
    whole, _, _ = share_of(policy.recent, count)
    return jnp.minimum(jnp.maximum(whole, int(policy.recent > 0)), count)
