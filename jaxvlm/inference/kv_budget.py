"""How many places of its prompt each decoder layer keeps in a compressed KV cache.

An allocator divides ``round(budget * L * m)`` places among L layers, m being the places of the
prompt, and hands out exactly so many. The formulas of papers do not: VL-Cache's sum exceeds its
budget where many layers are at the lower bound, and falls short where one is at the upper bound.

All of it is arithmetic on integers, elementwise over prompts. So a prompt's numbers are the same
alone and in any batch, and on any device. Limit: 40 * L * m < 2³¹.

Sources: VL-Cache, arXiv 2410.23317, section 4; PyramidKV, arXiv 2406.02069, in the form of kvpress.
"""

from __future__ import annotations

import fractions

import jax
import jax.numpy as jnp

FINEST = 10_000
"""A budget is the nearest fraction whose denominator is at most this, so 0.1 is a tenth."""
LEAST = 100
"""By density, no layer keeps less than one in so many places where the budget allows it (VL-Cache's
lower bound, 0.01)."""
STEEPNESS = 20
"""PyramidKV's beta: the last layer keeps the mean divided by it."""


def num_kept(budget: float, num_layers: int, m: jax.Array) -> jax.Array:
    """Compute the places that all layers keep together.

    Args:
        budget: share of the places to keep, in (0, 1]; static.
        num_layers: L.
        m: i32[B], places of each prompt.

    Returns:
        i32[B]: ``budget * L * m``, half rounded up; at least one place a layer, at most all.
    """
    whole, rest, share = share_of(budget, num_layers * m)
    rounded = whole + (2 * rest >= share.denominator)
    return jnp.clip(rounded, num_layers * jnp.minimum(m, 1), num_layers * m)


def divided_evenly(budget: float, num_layers: int, m: jax.Array) -> jax.Array:
    """Divide the places evenly; the first layers get one more where it does not come out even.

    Args, Returns: see :func:`num_kept`; i32[L, B].
    """
    total, layer = num_kept(budget, num_layers, m), jnp.arange(num_layers, dtype=jnp.int32)
    return total // num_layers + (layer[:, None] < total % num_layers)


def divided_by_density(
    budget: float, m: jax.Array, density: jax.Array, clip: bool = False
) -> jax.Array:
    """Divide the places in proportion to the layers' densities.

    Where a layer's share would be below a hundredth of the prompt (or below one place) or above the
    whole prompt, it gets the bound, and the others share the rest (water-filling). Shares are
    rounded by largest remainders, of equal ones the lower layer's first.

    Args:
        budget: share of the places to keep, in (0, 1]; static.
        m: i32[B], places of each prompt.
        density: f32[L, B] in [0, 1]; see :func:`jaxvlm.nn.attention_rows.densities`. Equal ones,
            zeros too, divide evenly.
        clip: use the paper's formula, ``clip(density / sum * budget * L, 0.01, 1) * m``, rounded
            down and at least 1, whose sum is not the budget's; to compare with. Static.

    Returns:
        i32[L, B].
    """
    num_layers = density.shape[0]
    unit = 1 << (30 - num_layers.bit_length())  # sums over layers stay below 2³⁰
    weight = jnp.clip(jnp.rint(density.astype(jnp.float32) * unit), 1, unit).astype(jnp.uint32)
    if clip:
        return _clipped(budget, m, weight)
    total = num_kept(budget, num_layers, m)
    least = jnp.maximum(jnp.minimum((m + LEAST - 1) // LEAST, total // num_layers), 1)
    least = jnp.minimum(least, m)
    # The level at which a layer reaches a bound is bound / weight: the layer is at its lower bound
    # if all layers together take the total at that level, or more; the upper bound is the mirror.
    low = _sum_at(least, weight, least, m) >= total
    high = ~low & (_sum_at(m, weight, least, m, up=True) <= total)
    free = ~(low | high)
    fixed = jnp.where(low, least, jnp.where(high, m, 0))
    rest = total - jnp.sum(fixed, axis=0)
    weight = jnp.where(free, weight, 0)
    count, remainder = _times(rest, weight, jnp.sum(weight, axis=0))
    return jnp.where(free, _rounded(count, remainder, rest, free), fixed)


def divided_pyramid(budget: float, num_layers: int, m: jax.Array, window: int) -> jax.Array:
    """Divide the places so that layers keep linearly fewer, from the first to the last.

    The last layer's share is a twentieth of the mean, unless the first one's would then exceed what
    is outside of the window. As in kvpress, layers share evenly if the last one's would be smaller
    than the window. Shares are rounded by largest remainders, of equal ones the lower layer's
    first; kvpress rounds each, so its sum may be off.

    Args:
        budget: share of the places to keep, in (0, 1]; static.
        num_layers: L; static.
        m: i32[B], places of each prompt.
        window: the most recent places, which SnapKV always keeps; at least 1; static.

    Returns:
        i32[L, B].
    """
    even = divided_evenly(budget, num_layers, m)
    if num_layers == 1:
        return even
    total, unit = num_kept(budget, num_layers, m), num_layers * STEEPNESS
    outside = jnp.maximum(m - window, 0) * unit
    first = jnp.minimum(total * (2 * STEEPNESS - 1), outside)  # in units of 1 / unit of a place
    last = total * (2 * STEEPNESS) - first
    layer = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    steps = unit * (num_layers - 1)
    count, remainder = _times(first, num_layers - 1 - layer, steps)
    count_last, remainder_last = _times(last, layer, steps)
    remainder = remainder + remainder_last
    count = count + count_last + (remainder // steps).astype(jnp.int32)
    pyramid = _rounded(count, remainder % steps, total, jnp.ones_like(count, bool))
    return jnp.where((first >= last) & (last >= window * unit), pyramid, even)


def fraction_of(share: float) -> fractions.Fraction:
    """Read a share as a fraction: see :data:`FINEST`."""
    return fractions.Fraction(share).limit_denominator(FINEST)


def share_of(share: float, n: jax.Array) -> tuple[jax.Array, jax.Array, fractions.Fraction]:
    """Compute ``share * n`` exactly, for a share that is read as a fraction: see :data:`FINEST`.

    Returns:
        The whole part; the rest, in units of 1 / denominator; and the fraction.
    """
    f = fraction_of(share)
    rest = f.numerator * (n % f.denominator)
    whole = f.numerator * (n // f.denominator) + rest // f.denominator
    return whole, rest % f.denominator, f


def _clipped(budget: float, m: jax.Array, weight: jax.Array) -> jax.Array:
    whole, rest, share = share_of(budget, weight.shape[0] * m)
    sum_of = jnp.sum(weight, axis=0)
    count, remainder = _times(whole, weight, sum_of)
    of_rest, _ = _times(rest, weight, share.denominator)
    count = count + ((remainder + of_rest.astype(jnp.uint32)) // sum_of).astype(jnp.int32)
    return jnp.minimum(jnp.maximum(jnp.maximum(count, m // LEAST), 1), m)


def _sum_at(
    bound: jax.Array, weight: jax.Array, least: jax.Array, most: jax.Array, up: bool = False
) -> jax.Array:
    """i32[L, B]: what all layers take at the level where each reaches ``bound``, i32[B]."""
    count, remainder = _times(bound, weight[None], weight[:, None])  # [level of, layer, B]
    inside = (count >= least) & (count < most)
    parts = jnp.sum(jnp.where(inside, remainder, 0), axis=1)  # of one weight: below 2³⁰ together
    parts = parts + (weight - 1 if up else 0)
    whole = jnp.sum(jnp.clip(count, least, most), axis=1)
    return whole + (parts // weight).astype(jnp.int32)


def _times(a: jax.Array, b: jax.Array, d: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Compute ``a * b / d``, whose product may need 60 bits, by long division.

    Args:
        a: i32, not negative.
        b: i32 or u32, in [0, 2³⁰).
        d: i32 or u32, in [0, 2³⁰); 0 is taken for 1.

    Returns:
        The quotient, i32, where it is above 2²⁹ that or more; and the remainder, u32.
    """
    a, b, d = (jnp.asarray(x).astype(jnp.uint32) for x in (a, b, jnp.maximum(d, 1)))
    a, b, d = jnp.broadcast_arrays(a, b, d)
    enough = jnp.uint32(1 << 29)

    def bit(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, rest = carry
        rest = 2 * rest + b * ((a >> (30 - i).astype(jnp.uint32)) & 1)
        # Both are below 2³⁰ + 2³¹: nothing is cut off.
        return jnp.minimum(2 * count + rest // d, enough), rest % d

    count, rest = jax.lax.fori_loop(0, 31, bit, (jnp.zeros_like(a), jnp.zeros_like(a)))
    return count.astype(jnp.int32), rest


def _rounded(
    count: jax.Array, remainder: jax.Array, total: jax.Array, free: jax.Array
) -> jax.Array:
    """Add one to the free layers of the largest remainders, until they come to ``total``."""
    missing = total - jnp.sum(jnp.where(free, count, 0), axis=0)
    layer = jnp.arange(count.shape[0])
    lower = (layer[:, None] > layer[None])[:, :, None]  # [of, layer, 1]
    larger = remainder[None] > remainder[:, None]
    before = free[None] & (larger | (lower & (remainder[None] == remainder[:, None])))
    return count + (jnp.sum(before, axis=1, dtype=jnp.int32) < missing)
