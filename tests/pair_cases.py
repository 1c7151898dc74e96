"""Embeddings and pairs drawn at random, a loss and its gradients, and the same in torch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.config import MeshConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import batch_sharding, replicated
from jaxvlm.train.grad_accum import total
from jaxvlm.types import Embeddings, Pairs

B, K, E = 13, 3, 8


def pairs_of(b=B, k=K, **fields) -> Pairs:
    """Every query and document of its own content, unless ``fields`` say otherwise."""
    keys = np.arange(b * k, dtype=np.int32).reshape(b, k)
    made = Pairs(None, None, np.ones((b, k), bool), keys[:, 0] + b * k, keys)
    return made._replace(**fields)


def embeddings_of(b=B, k=K, e=E, tokens=(), seed=0, learned=False) -> Embeddings:
    """Positives lie near their queries; nothing has unit length."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(b, *tokens[:1], e))
    document = rng.normal(size=(b, k, *tokens[1:], e))
    if not tokens:
        document[:, 0] += 0.7 * query
    query, document = (x.astype(np.float32) * 1.3 for x in (query, document))
    made = Embeddings(query, document)
    if tokens:
        made = made._replace(
            query_mask=np.arange(tokens[0]) < rng.integers(1, tokens[0] + 1, (b, 1)),
            document_mask=np.arange(tokens[1]) < rng.integers(1, tokens[1] + 1, (b, k, 1)),
        )
    if learned:
        made = made._replace(scale=np.float32(1.7), bias=np.float32(-2.5))
    return made


def tangled(b=B, k=K, seed=0) -> Pairs:
    """Contents that come up again, groups, examples of fewer negatives, one that is padding."""
    rng = np.random.default_rng(seed)
    there = np.arange(k) < rng.integers(1, k + 1, (b, 1))
    there[4] = False
    document_key = np.where(there, rng.integers(0, 2 * b, (b, k)), -1).astype(np.int32)
    query_key = rng.integers(0, b, b).astype(np.int32)
    group = rng.integers(-1, 4, b).astype(np.int32)
    return Pairs(None, None, there, query_key, document_key, group)


@functools.cache
def _step(loss):
    """Compiled once for a loss and shapes."""

    def value(floats, embeddings, pairs):
        sums, weights = loss(embeddings._replace(**floats), pairs), loss.weights(pairs)
        return total(sums, {n: f / weights[n] for n, f in loss.coefficients().items()}), sums

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def gradients(loss, embeddings, pairs, mesh=None):
    """The loss, its gradients by name, and the sums, under jit; split over ``mesh`` if given."""
    floats = {
        name: jnp.asarray(x, jnp.float32)
        for name, x in embeddings._asdict().items()
        if x is not None and not name.endswith("_mask")
    }
    pairs = jax.tree.map(jnp.asarray, pairs)
    seen = embeddings._replace(**dict.fromkeys(floats))
    if mesh is not None:

        def place(x):
            return jax.device_put(x, batch_sharding(mesh) if np.ndim(x) else replicated(mesh))

        floats, seen, pairs = jax.tree.map(place, (floats, seen, pairs))
    (made, sums), grads = _step(loss)(floats, seen, pairs)
    return made, grads, sums


def mesh_of(devices=8, **axes) -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(**axes), jax.devices()[:devices])


def exact(torch, x):
    """A tensor of float64 that learns: what is expected has no rounding of its own."""
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def in_torch(torch, fn, embeddings, *others):
    """``fn`` of torch tensors and its gradients: ``fn(query [b, E], [documents [b, E], ...])``."""
    query, document = (exact(torch, x) for x in (embeddings.query, embeddings.document))
    value = fn(query, list(document.unbind(1)), *others)
    value.backward()
    grads = {"query": query.grad.numpy(), "document": document.grad.numpy()}
    return value.item(), grads


def is_additive(loss, embeddings, pairs):
    """Sums and weights of two parts add up to those of the whole."""

    def sums(case):
        return loss(*case), loss.weights(case[1])

    run, half = jax.jit(sums), len(pairs.valid) // 2
    odd = len(pairs.valid) % 2
    case = jax.tree.map(lambda x: jnp.asarray(x)[odd:] if np.ndim(x) else x, (embeddings, pairs))
    parts = [
        run(jax.tree.map(lambda x, s=s: x[s] if x.ndim else x, case))
        for s in (slice(0, half), slice(half, None))
    ]
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, sum(b), rtol=1e-5), run(case), *parts)


def relation(pairs):
    """Sets, example by example: its positives, and keys of documents that are no negatives."""
    there, group = pairs.valid[:, 0], pairs.group
    numbers, keys = [], []
    for i in range(len(there)):
        real = np.flatnonzero(there).tolist()
        in_one = group is not None and group[i] >= 0
        mates = [j for j in real if in_one and group[j] == group[i]]
        numbers.append({i, *mates})
        same = [j for j in real if pairs.query_key[j] == pairs.query_key[i]]
        known = {int(pairs.document_key[j, 0]) for j in {i, *mates, *same}}
        keys.append(known | {int(pairs.query_key[i])})
    return numbers, keys
