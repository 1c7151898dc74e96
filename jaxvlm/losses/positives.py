"""Positives of each query, and documents that must not be used as its negatives.

A query's *positives* are its own (the first document of its example) and, where examples have
groups, the positives of its group's other examples. A document is *no negative* of a query if it
has the same content as one of these, as the positive of another example with the same query, or as
the query itself: it may be a positive, and is never a negative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.types import Pairs

_LAST = np.iinfo(np.int32).max


class ExampleKeys(NamedTuple):
    """Content keys and groups of examples; leading dim b, sharded as the examples are."""

    number: jax.Array
    """i32[b]: index of the example in the batch."""
    valid: jax.Array
    """bool[b, K]: False for padding."""
    query_key: jax.Array
    """i32[b]: equal for queries with the same content."""
    document_key: jax.Array
    """i32[b, K]: equal for documents with the same content."""
    group: jax.Array
    """i32[b]; -1: in no group."""
    positives: jax.Array
    """i32[b, 2]: offset of the query's positives in ``PositiveIndex.documents``, and their
    number."""
    groups: jax.Array | None
    """i32[b, K, 2]: offset in ``PositiveIndex.groups`` of the groups that have the document as a
    positive, and their number; ``None``: examples have no groups."""


class PositiveIndex(NamedTuple):
    """The known positives of the whole batch, as concatenated lists."""

    documents: jax.Array
    """i32[b]: keys of positives, query by query."""
    most_documents: jax.Array
    """i32[]: entries of the longest list."""
    groups: jax.Array | None = None
    """i32[b]: groups, document by document."""
    most_groups: jax.Array | None = None
    """i32[]: entries of the longest list of groups."""


def index_positives(pairs: Pairs) -> tuple[ExampleKeys, PositiveIndex]:
    """Index the positives of a whole batch by the content keys of queries and documents.

    A query that occurs in several examples has several positives, and a document may be a positive
    of several groups; lists are deduplicated, so that most have one entry.
    """
    valid = jnp.asarray(pairs.valid)
    query_key, document_key = jnp.asarray(pairs.query_key), jnp.asarray(pairs.document_key)
    number = jnp.arange(len(valid), dtype=jnp.int32)
    positive, has = document_key[:, 0], valid[:, 0]
    of, documents = _lists(query_key, positive, has)
    positives = _place(of, query_key)
    index = PositiveIndex(documents, jnp.max(positives[:, 1]))
    if pairs.group is None:
        none = jnp.full_like(number, -1)
        return ExampleKeys(number, valid, query_key, document_key, none, positives, None), index
    group = jnp.asarray(pairs.group)
    of, groups = _lists(positive, group, has & (group >= 0))
    places = _place(of, document_key)
    index = index._replace(groups=groups, most_groups=jnp.max(places[..., 1]))
    return ExampleKeys(number, valid, query_key, document_key, group, positives, places), index


def num_examples(pairs: Pairs) -> jax.Array:
    """Count the examples that have a positive, f32[]; the others are padding."""
    return jnp.sum(jnp.asarray(pairs.valid)[:, 0], dtype=jnp.float32)


def same_example(rows: ExampleKeys, columns: ExampleKeys) -> jax.Array:
    """Whether row and column are the same example, bool[r, c]; False for padding."""
    both = rows.valid[:, :1] & columns.valid[:, 0]
    return both & (rows.number[:, None] == columns.number)


def same_group(rows: ExampleKeys, columns: ExampleKeys) -> jax.Array:
    """Whether row and column are the same example or in one group, bool[r, c]."""
    both = rows.valid[:, :1] & columns.valid[:, 0] & (rows.group[:, None] >= 0)
    return same_example(rows, columns) | (both & (rows.group[:, None] == columns.group))


def candidates(
    rows: ExampleKeys, columns: ExampleKeys, index: PositiveIndex
) -> tuple[jax.Array, jax.Array]:
    """Return masks of the documents that may be a query's negatives, and of its positives.

    Returns:
        ``(negative, positive)``, bool[r, c, K] both.
    """
    positive = same_group(rows, columns)[..., None] & (jnp.arange(columns.valid.shape[1]) == 0)
    both = columns.valid & rows.valid[:, :1, None]
    return both & ~is_no_negative(rows, columns, index), positive


def is_no_negative(queries: ExampleKeys, documents: ExampleKeys, index: PositiveIndex) -> jax.Array:
    """Whether a document has the content of the query or of a positive of it, bool[q, d, K]."""
    key, group = documents.document_key, queries.group[:, None, None]

    def by_query(t: Any, known: jax.Array) -> jax.Array:
        document, is_one = _entry(index.documents, queries.positives, t)
        return known | ((document[:, None, None] == key) & is_one[:, None, None])

    def by_document(t: Any, known: jax.Array) -> jax.Array:
        of, is_one = _entry(index.groups, documents.groups, t)
        return known | ((of == group) & is_one & (group >= 0))

    # The first entry is mostly the only one: the loops go over the others, up to the longest list.
    known = by_query(0, queries.query_key[:, None, None] == key)
    known = jax.lax.fori_loop(1, index.most_documents, by_query, known)
    if index.groups is None:
        return known
    return jax.lax.fori_loop(1, index.most_groups, by_document, by_document(0, known))


def _lists(of: jax.Array, entry: jax.Array, yes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sort and deduplicate ``(of, entry)`` where ``yes``; all others go to the end."""
    of, entry = jax.lax.sort((jnp.where(yes, of, _LAST), entry), num_keys=2)
    again = jnp.zeros(of.shape, bool).at[1:].set((of[1:] == of[:-1]) & (entry[1:] == entry[:-1]))
    of, entry = jax.lax.sort((jnp.where(again, _LAST, of), entry), num_keys=2)
    return of, entry


def _place(of: jax.Array, key: jax.Array) -> jax.Array:
    """Return the offset of each key's list and its number of entries, i32[..., 2]."""
    first, end = (jnp.searchsorted(of, key, side) for side in ("left", "right"))
    return jnp.stack([first, end - first], axis=-1).astype(jnp.int32)


def _entry(entries: Any, place: Any, t: Any) -> tuple[jax.Array, jax.Array]:
    """Return entry t of each list, and whether the list has one."""
    first, count = place[..., 0], place[..., 1]
    return entries[jnp.minimum(first + t, len(entries) - 1)], t < count
