"""GradCache: exact gradients of a loss over embeddings, in mini-batches.

A contrastive loss compares every query with every document of the global batch, so its gradient is
no sum over microbatches. GradCache (arXiv 2101.06983) computes it exactly in mini-batches: first
embeddings of each mini-batch, without keeping activations; then the loss, once, over all
embeddings, which gives each embedding's gradient; then each mini-batch is run again to
backpropagate its embeddings' gradients to the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.train.grad_accum import merge_microbatches, split_microbatches, total
from jaxvlm.types import Array, Batch, Embeddings, Loss, Out, Pairs, Params, Runner, Sums


class MiniBatch(NamedTuple):
    """Most queries, or documents, that a batch shard runs at once."""

    rows: int = 0
    """Most sequences in a mini-batch; 0: as many as ``tokens`` allows."""
    tokens: int = 0
    """Most tokens in a mini-batch, padding included; a longer sequence is a mini-batch. 0: any."""

    def parts(self, length: int, rows: int, group: int = 1) -> int:
        """Return the number of mini-batches: as few as possible, all of one size.

        Args:
            length: tokens of a sequence, padding included.
            rows: sequences of a shard.
            group: the number of mini-batches is a multiple of it.
        """
        fit = self.tokens // max(1, length) if self.tokens else rows
        most = max(1, min(rows, self.rows or rows, fit))
        return -(-rows // most // group) * group


class GradCacheColumn(NamedTuple):
    """How queries, or documents, are run."""

    mini_batch: MiniBatch = MiniBatch()
    encode_frozen: Callable[[Params, Batch], Batch] | None = None
    """(all parameters, batch) -> batch with the outputs of frozen encoders, so that these run once;
    ``None``: no encoder is frozen."""
    learns: Callable[[Batch], bool] = lambda batch: True
    """Whether the embeddings of such a batch depend on trainable parameters; where they do not, it
    has no backward pass."""


WHOLE = GradCacheColumn()
"""The whole column at once."""


@dataclasses.dataclass(frozen=True)
class GradCache:
    """Runs queries and documents of :class:`Pairs` through one model; see the module's docstring.

    Args:
        runner: number of mini-batches -> a runner that uses that many: ``Out.hidden`` is [B, E]
            with an embedding for each sequence, or [B, T, E] with one for each token.
        query: how queries are run.
        document: how documents are run.
        shards: the number of batch shards of the mesh.
        recompute: whether a single mini-batch is run again for its gradients too; else its
            activations are kept.
        group: the number of mini-batches is a multiple of it.
    """

    runner: Callable[[int], Runner]
    query: GradCacheColumn = WHOLE
    document: GradCacheColumn = WHOLE
    shards: int = 1
    recompute: bool = False
    group: int = 1

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """Run the forward pass of queries, or of documents, at once."""
        return self.runner(self.group).fwd(params, frozen, batch)

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Return gradients of ``params`` for the cotangent of :meth:`fwd`'s output."""
        return self.runner(self.group).vjp(params, frozen, batch, d_out)

    def loss_grad(
        self, params: Params, frozen: Params, batch: Pairs, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """Return the loss's sums over all examples, and the gradient of ``sum_k scale_k * S_k``."""
        rows = [batch.query, rows_of(batch.document)]
        sides = [self.query, self.document]
        learns = [side.learns(x) for side, x in zip(sides, rows)]
        # Both outputs have the model's scale and bias: one of them takes their gradient.
        lead = learns.index(True) if any(learns) else 0
        learns[lead] = True
        fixed = {**jax.lax.stop_gradient(params), **frozen}
        rows = [self._encode_frozen(fixed, side, x) for side, x in zip(sides, rows)]
        runs: list[tuple[Out, Callable[[Out], Params] | None]] = []
        for side, learn, x in zip(sides, learns, rows):
            runs.append(self._run(params, frozen, side, learn, self._after(x, runs and runs[0][0])))

        def objective(outs: list[Out]) -> tuple[jax.Array, Sums]:
            sums = loss(_embeddings(outs, rows, batch, lead), batch)
            return total(sums, scale), sums

        outs = [out for out, _ in runs]
        (_, sums), back = jax.value_and_grad(objective, has_aux=True)(outs)
        grads: list[Params] = []
        for (_, run), d in zip(runs, back):
            if run is not None:
                grads.append(run(self._after(d, grads and grads[0])))
        return sums, functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), grads)

    def embed(self, params: Params, side: GradCacheColumn, batch: Batch) -> Out:
        """Embed queries, or documents, in mini-batches.

        Args:
            params: all parameters.
            side: ``query`` or ``document``.
            batch: its sequences.
        """
        parts = self._count(side, batch)
        out = self.runner(parts).fwd(params, {}, self._filled(batch, parts))
        return out._replace(hidden=self._own(out.hidden, self._local(batch)))

    def _after(self, x: Any, before: Any) -> Any:
        """Make ``x`` depend on ``before``, so that queries and documents run one after the other.

        Otherwise the collectives between stages of one could interleave with the other's.
        """
        if not self.recompute or not before:
            return x
        return jax.lax.optimization_barrier((x, before))[0]

    def _count(self, side: GradCacheColumn, batch: Batch) -> int:
        """Return the number of mini-batches of queries, or of documents."""
        return side.mini_batch.parts(batch.tokens.shape[1], self._local(batch), self.group)

    def _local(self, batch: Batch) -> int:
        """Return the sequences of a shard."""
        return len(batch.tokens) // self.shards

    def _encode_frozen(self, params: Params, side: GradCacheColumn, batch: Batch) -> Batch:
        """Run the frozen encoders."""
        if side.encode_frozen is None:
            return batch
        run = functools.partial(side.encode_frozen, params)
        if (parts := self._count(side, batch)) == 1:
            return run(batch)
        split = split_microbatches(self._filled(batch, parts), parts, self.shards)
        out = jax.tree.map(lambda x: merge_microbatches(x, self.shards), jax.lax.map(run, split))
        return self._own(out, self._local(batch))

    def _run(
        self, params: Params, frozen: Params, side: GradCacheColumn, learns: bool, batch: Batch
    ) -> tuple[Out, Callable[[Out], Params] | None]:
        """Embed queries, or documents; also return the vjp, None where nothing is trainable."""
        parts = self._count(side, batch)
        runner = self.runner(parts)
        if learns and parts == 1 and not self.recompute:
            out, pull = jax.vjp(lambda p: runner.fwd(p, frozen, batch), params)
            return out, lambda d: pull(d)[0]

        def replayed(d: Out) -> Params:
            d = d._replace(hidden=self._filled(d.hidden, parts))
            return runner.vjp(params, frozen, self._filled(batch, parts), d)

        return self.embed({**params, **frozen}, side, batch), replayed if learns else None

    def _filled(self, rows: Any, parts: int) -> Any:
        """Pad each shard to a multiple of ``parts``; padding has no gradient."""

        def one(x: jax.Array) -> jax.Array:
            local = len(x) // self.shards
            if not (missing := -local % parts):
                return x
            x = x.reshape(self.shards, local, *x.shape[1:])
            x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
            return _flat(x)

        return jax.tree.map(one, rows)

    def _own(self, rows: Any, local: int) -> Any:
        """Invert :meth:`_filled`, with ``local`` sequences in a shard."""

        def one(x: jax.Array) -> jax.Array:
            if len(x) == self.shards * local:
                return x
            x = x.reshape(self.shards, len(x) // self.shards, *x.shape[1:])
            return _flat(x[:, :local])

        return jax.tree.map(one, rows)


def _embeddings(outs: list[Out], rows: list[Batch], batch: Pairs, lead: int) -> Embeddings:
    query, document = (out.hidden.astype(jnp.float32) for out in outs)
    shape = batch.valid.shape
    document = document.reshape(*shape, *document.shape[1:])
    masks = [x.segment > 0 for x in rows] if query.ndim == 3 else [None, None]
    return Embeddings(
        query,
        document,
        masks[0],
        None if masks[1] is None else masks[1].reshape(*shape, -1),
        outs[lead].scale,
        outs[lead].bias,
    )


def rows_of(document: Batch) -> Batch:
    """Flatten ``Pairs.document`` [b, K, ...] to one sequence each, [b * K, ...]."""
    return jax.tree.map(_flat, document)


def _flat(x: Array) -> Any:
    """[a, b, ...] -> [a * b, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
