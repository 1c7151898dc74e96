"""Positives of queries, and documents that are no negatives, against Python sets."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from pair_cases import pairs_of, relation, tangled

from jaxvlm.losses.positives import (
    candidates,
    index_positives,
    is_no_negative,
    num_examples,
    same_group,
)


def roles(pairs):
    of, table = index_positives(pairs)
    return *candidates(of, of, table), is_no_negative(of, of, table)


run = jax.jit(roles)


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_roles_are_those_of_sets(seed, groups):
    """Contents of few kinds: lists of many entries on both sides."""
    pairs = tangled(seed=seed)
    rng = np.random.default_rng(seed)
    few = 2 + 2 * seed
    pairs = pairs._replace(
        document_key=np.where(pairs.valid, rng.integers(0, few, pairs.valid.shape), -1).astype(
            "i4"
        ),
        query_key=rng.integers(-5, few, len(pairs.valid)).astype(np.int32),
        group=pairs.group if groups else None,
    )
    negative, positive, same = (np.asarray(x) for x in run(pairs))
    numbers, keys = relation(pairs)
    for i, j, k in np.ndindex(negative.shape):
        real = pairs.valid[i, 0] and pairs.valid[j, k]
        is_known = int(pairs.document_key[j, k]) in keys[i]
        assert positive[i, j, k] == (real and k == 0 and j in numbers[i])
        assert negative[i, j, k] == (real and not is_known)
        if real:
            assert same[i, j, k] == is_known
    assert num_examples(pairs) == pairs.valid[:, 0].sum()


def test_examples_without_a_group_are_alone():
    pairs = pairs_of(group=np.full(13, -1, np.int32))
    of, _ = index_positives(pairs)
    np.testing.assert_array_equal(same_group(of, of), np.eye(13, dtype=bool))
