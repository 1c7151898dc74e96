"""Which documents are positives of which queries, and which may not be its negatives.

A query's *positives* are its own (the first document of its example) and, where examples have
groups, the positives of its group's other examples. A document is *known* to a query if what it
says is said by one of these, or by the positive of another example with the same query: it may be
a positive, and is never a negative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.types import Pairs

_LAST = np.iinfo(np.int32).max


class Facts(NamedTuple):
    """What is known of examples without their vectors; leading dim b, split as they are."""

    number: jax.Array
    """i32[b]: of the example in the batch."""
    there: jax.Array
    """bool[b, K]."""
    query_key: jax.Array
    """i32[b]."""
    document_key: jax.Array
    """i32[b, K]."""
    group: jax.Array
    """i32[b]; -1 is in none."""
    positives: jax.Array
    """i32[b, 2]: where ``Known.documents`` lists the positives of the query, and how many."""
    groups: jax.Array | None
    """i32[b, K, 2]: where ``Known.groups`` lists those whose positive the document is; ``None``:
    examples have no groups."""


class Known(NamedTuple):
    """Which query knows which document, as lists that lie behind each other."""

    documents: jax.Array
    """i32[b]: keys of positives, query by query."""
    most_documents: jax.Array
    """i32[]: entries of the longest list."""
    groups: jax.Array | None = None
    """i32[b]: groups, document by document."""
    most_groups: jax.Array | None = None


def facts(pairs: Pairs) -> tuple[Facts, Known]:
    """What decides over pairs, of the whole batch.

    The keys of queries and of documents make up a relation: who is whose positive. A query that
    stands in many examples knows many documents, and a document may be known to many groups; both
    lists hold each once, so that most have one entry.
    """
    there = jnp.asarray(pairs.there)
    query_key, document_key = jnp.asarray(pairs.query_key), jnp.asarray(pairs.document_key)
    number = jnp.arange(len(there), dtype=jnp.int32)
    positive, has = document_key[:, 0], there[:, 0]
    of, documents = _lists(query_key, positive, has)
    positives = _place(of, query_key)
    known = Known(documents, jnp.max(positives[:, 1]))
    if pairs.group is None:
        none = jnp.full_like(number, -1)
        return Facts(number, there, query_key, document_key, none, positives, None), known
    group = jnp.asarray(pairs.group)
    of, groups = _lists(positive, group, has & (group >= 0))
    places = _place(of, document_key)
    known = known._replace(groups=groups, most_groups=jnp.max(places[..., 1]))
    return Facts(number, there, query_key, document_key, group, positives, places), known


def num_examples(pairs: Pairs) -> jax.Array:
    """f32[]: how many have a positive; the others are padding."""
    return jnp.sum(jnp.asarray(pairs.there)[:, 0], dtype=jnp.float32)


def same_example(rows: Facts, columns: Facts) -> jax.Array:
    """bool[r, c]."""
    both = rows.there[:, :1] & columns.there[:, 0]
    return both & (rows.number[:, None] == columns.number)


def same_group(rows: Facts, columns: Facts) -> jax.Array:
    """bool[r, c]: an example is in its own group, whether it has one or not."""
    both = rows.there[:, :1] & columns.there[:, 0] & (rows.group[:, None] >= 0)
    return same_example(rows, columns) | (both & (rows.group[:, None] == columns.group))


def candidates(rows: Facts, columns: Facts, relation: Known) -> tuple[jax.Array, jax.Array]:
    """Documents that queries may be told apart from, and those that are their positives.

    Returns:
        ``(negative, positive)``, bool[r, c, K] both.
    """
    positive = same_group(rows, columns)[..., None] & (jnp.arange(columns.there.shape[1]) == 0)
    both = columns.there & rows.there[:, :1, None]
    return both & ~known(rows, columns, relation), positive


def known(queries: Facts, documents: Facts, relation: Known) -> jax.Array:
    """bool[q, d, K]: whether a document says what a positive of the query says."""
    key, group = documents.document_key, queries.group[:, None, None]

    def by_query(t: Any, found: jax.Array) -> jax.Array:
        document, is_one = _entry(relation.documents, queries.positives, t)
        return found | ((document[:, None, None] == key) & is_one[:, None, None])

    def by_document(t: Any, found: jax.Array) -> jax.Array:
        of, is_one = _entry(relation.groups, documents.groups, t)
        return found | ((of == group) & is_one & (group >= 0))

    # The first entry is mostly the only one: the loops go over the others, up to the longest list.
    found = by_query(0, jnp.zeros((len(queries.number), *key.shape), bool))
    found = jax.lax.fori_loop(1, relation.most_documents, by_query, found)
    if relation.groups is None:
        return found
    return jax.lax.fori_loop(1, relation.most_groups, by_document, by_document(0, found))


def _lists(of: jax.Array, entry: jax.Array, yes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(of, entry)`` sorted by both, where ``yes`` and each once; the rest is at the end."""
    of, entry = jax.lax.sort((jnp.where(yes, of, _LAST), entry), num_keys=2)
    again = jnp.zeros(of.shape, bool).at[1:].set((of[1:] == of[:-1]) & (entry[1:] == entry[:-1]))
    of, entry = jax.lax.sort((jnp.where(again, _LAST, of), entry), num_keys=2)
    return of, entry


def _place(of: jax.Array, key: jax.Array) -> jax.Array:
    """i32[..., 2]: where the list of each ``key`` begins, and how many entries it has."""
    first, behind = (jnp.searchsorted(of, key, side) for side in ("left", "right"))
    return jnp.stack([first, behind - first], axis=-1).astype(jnp.int32)


def _entry(entries: Any, place: Any, t: Any) -> tuple[jax.Array, jax.Array]:
    """Entry t of each list, and whether it has one."""
    first, count = place[..., 0], place[..., 1]
    return entries[jnp.minimum(first + t, len(entries) - 1)], t < count
