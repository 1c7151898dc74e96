"""Average low-rank adapters: the mean of products is not the product of means.

An adapter adds ``A B`` to a weight. Where all sites have the same A, the mean of B is exact; else
the products are averaged in float64, and the best adapter of the same rank takes their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

A, B = "/lora_a", "/lora_b"


def maps_of(paths: Iterable[str]) -> list[str]:
    """Paths of the linear maps whose adapters' two matrices are both among ``paths``."""
    every = set(paths)
    return sorted(
        p.removesuffix(A) for p in every if p.endswith(A) and p.removesuffix(A) + B in every
    )


def mean_product(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], weights: Sequence[float], stacked: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Average adapters of one linear map.

    Args:
        pairs: the sites' A, f[*stack, *in, r], and B, f[*stack, r, *out].
        weights: of the sites.
        stacked: leading dims of layers that both have.

    Returns:
        A and B, f64, and the part of the averaged products' squared norm that rank r can't hold.
        Where there is one site, or all have the same A, nothing is lost, and A is theirs.
    """
    (a, b), total = pairs[0], sum(weights)
    if all(np.array_equal(a, other) for other, _ in pairs):
        mean = (
            np.sum([w * np.asarray(b, np.float64) for (_, b), w in zip(pairs, weights)], 0) / total
        )
        return np.asarray(a, np.float64), mean, 0.0
    stack, rank = a.shape[:stacked], a.shape[-1]
    flat = [
        (np.float64(a).reshape(*stack, -1, rank), np.float64(b).reshape(*stack, rank, -1))
        for a, b in pairs
    ]
    # The products share factors of rank n r, so no matrix of the weight's size is decomposed.
    left = np.concatenate([a for a, _ in flat], axis=-1)
    right = np.concatenate([w / total * b for (_, b), w in zip(flat, weights)], axis=-2)
    q_left, r_left = np.linalg.qr(left)
    q_right, r_right = np.linalg.qr(np.swapaxes(right, -1, -2))
    u, s, vt = np.linalg.svd(r_left @ np.swapaxes(r_right, -1, -2), full_matrices=False)
    whole, kept = float(np.sum(s**2)), float(np.sum(s[..., :rank] ** 2))
    # A keeps its usual size: an adapter whose A and B are both zero would never train again.
    size = np.sqrt(np.mean(left**2) * left.shape[-2])
    new_a = size * (q_left @ u[..., :rank])
    new_b = s[..., :rank, None] / size * (vt[..., :rank, :] @ np.swapaxes(q_right, -1, -2))
    if less := rank - new_a.shape[-1]:  # a map with fewer inputs or outputs than the rank
        none = [(0, 0)] * len(stack)
        new_a = np.pad(new_a, [*none, (0, 0), (0, less)])
        new_b = np.pad(new_b, [*none, (0, less), (0, 0)])
    return new_a.reshape(a.shape), new_b.reshape(b.shape), 1 - kept / whole if whole else 0.0


def combine_adapters(
    sites: Sequence[Mapping[str, np.ndarray]],
    weights: Sequence[float],
    stacked: Mapping[str, int],
) -> tuple[dict[str, np.ndarray], float]:
    """Average all adapters.

    Args:
        sites: each site's matrices by path.
        weights: of the sites.
        stacked: path of a linear map -> its leading dims of layers.

    Returns:
        Matrices f64 by path, and the largest part that was lost, of any map's squared norm.
    """
    result: dict[str, np.ndarray] = {}
    lost = 0.0
    for path in maps_of(sites[0]):
        pairs = [(site[path + A], site[path + B]) for site in sites]
        result[path + A], result[path + B], part = mean_product(
            pairs, weights, stacked.get(path, 0)
        )
        lost = max(lost, part)
    return result, lost
