"""Gradients of a loss over vectors: of the whole batch at once, or by gradient caching.

A contrastive loss compares every query with every document of the global batch, so its gradient is
no sum over parts of a batch. GradCache (arXiv 2101.06983) takes it a chunk at a time all the same,
and exactly: vectors are made chunk by chunk with nothing kept beside them; the loss is taken once,
of all vectors, and gives the gradient of each; then each chunk is run again, to take its vectors'
gradients back to the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.train.objective import total
from jaxvlm.train.runner import deal, undeal
from jaxvlm.types import Array, Batch, Loss, Out, Pairs, Params, Runner, Sums, Vectors


class Chunk(NamedTuple):
    """How many rows of a side a batch shard runs at once, at most."""

    rows: int = 0
    """0: as many as ``tokens`` says."""
    tokens: int = 0
    """Places of a chunk's rows at most, padding counted; a row that has more is a chunk. 0: any."""

    def parts(self, length: int, rows: int, group: int = 1) -> int:
        """Chunks of a shard's ``rows`` of ``length`` tokens: as few as will do, of one size.

        Args:
            length: tokens of a row.
            rows: of a shard.
            group: what divides the number of chunks.
        """
        fit = self.tokens // max(1, length) if self.tokens else rows
        most = max(1, min(rows, self.rows or rows, fit))
        return -(-rows // most // group) * group


class Side(NamedTuple):
    """How queries, or documents, are run."""

    chunk: Chunk = Chunk()
    still: Callable[[Params, Batch], Batch] | None = None
    """(all parameters, rows) -> rows with what frozen towers make of them in their place, so that
    these are run once; ``None``: no tower is frozen."""
    learns: Callable[[Batch], bool] = lambda batch: True
    """Whether anything trainable has a part in the vectors of such rows; where nothing has, they
    are not run again."""


WHOLE = Side()
"""All rows at once."""


@dataclasses.dataclass(frozen=True)
class Paired:
    """Runs both sides of :class:`Pairs` through one model; see the module's text.

    Args:
        runner: number of chunks -> what runs one side's rows in so many: ``Out.hidden`` [B, E] are
            their vectors, [B, T, E] those of their tokens.
        query: how queries are run.
        document: how documents are.
        shards: parts that the mesh splits rows in.
        again: whether rows that are one chunk are run again too, for their gradients; else what
            these need is kept.
        group: what divides the number of chunks.
    """

    runner: Callable[[int], Runner]
    query: Side = WHOLE
    document: Side = WHOLE
    shards: int = 1
    again: bool = False
    group: int = 1

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """One side's rows at once."""
        return self.runner(self.group).fwd(params, frozen, batch)

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Likewise."""
        return self.runner(self.group).vjp(params, frozen, batch, d_out)

    def loss_grad(
        self, params: Params, frozen: Params, batch: Pairs, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """The loss's sums over all examples, and the gradient of ``sum_k scale_k * S_k``."""
        rows = [batch.query, rows_of(batch.document)]
        sides = [self.query, self.document]
        learns = [side.learns(x) for side, x in zip(sides, rows)]
        # Both have the model's scale and bias: one takes their gradient back.
        lead = learns.index(True) if any(learns) else 0
        learns[lead] = True
        fixed = {**jax.lax.stop_gradient(params), **frozen}
        rows = [self._behind(fixed, side, x) for side, x in zip(sides, rows)]
        runs: list[tuple[Out, Callable[[Out], Params] | None]] = []
        for side, learn, x in zip(sides, learns, rows):
            runs.append(self._run(params, frozen, side, learn, self._after(x, runs and runs[0][0])))

        def objective(outs: list[Out]) -> tuple[jax.Array, Sums]:
            sums = loss(_vectors(outs, rows, batch, lead), batch)
            return total(sums, scale), sums

        outs = [out for out, _ in runs]
        (_, sums), back = jax.value_and_grad(objective, has_aux=True)(outs)
        grads: list[Params] = []
        for (_, run), d in zip(runs, back):
            if run is not None:
                grads.append(run(self._after(d, grads and grads[0])))
        return sums, functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), grads)

    def made(self, params: Params, side: Side, batch: Batch) -> Out:
        """What the model makes of a side, in chunks.

        Args:
            params: all of them.
            side: ``query`` or ``document``.
            batch: its rows.
        """
        parts = self._count(side, batch)
        out = self.runner(parts).fwd(params, {}, self._filled(batch, parts))
        return out._replace(hidden=self._own(out.hidden, self._local(batch)))

    def _after(self, x: Any, before: Any) -> Any:
        """``x``, there when ``before`` is: sides that are run again go one behind the other.

        Nothing else keeps exchanges between the stages of one side from meeting the other's.
        """
        if not self.again or not before:
            return x
        return jax.lax.optimization_barrier((x, before))[0]

    def _count(self, side: Side, batch: Batch) -> int:
        """Chunks of a side."""
        return side.chunk.parts(batch.tokens.shape[1], self._local(batch), self.group)

    def _local(self, batch: Batch) -> int:
        """Rows of a shard."""
        return len(batch.tokens) // self.shards

    def _behind(self, params: Params, side: Side, batch: Batch) -> Batch:
        """Rows behind their frozen towers."""
        if side.still is None:
            return batch
        run = functools.partial(side.still, params)
        if (parts := self._count(side, batch)) == 1:
            return run(batch)
        dealt = deal(self._filled(batch, parts), parts, self.shards)
        made = jax.tree.map(lambda x: undeal(x, self.shards), jax.lax.map(run, dealt))
        return self._own(made, self._local(batch))

    def _run(
        self, params: Params, frozen: Params, side: Side, learns: bool, batch: Batch
    ) -> tuple[Out, Callable[[Out], Params] | None]:
        """What the model makes of a side, and how gradients of that become the parameters'."""
        parts = self._count(side, batch)
        runner = self.runner(parts)
        if learns and parts == 1 and not self.again:
            out, pull = jax.vjp(lambda p: runner.fwd(p, frozen, batch), params)
            return out, lambda d: pull(d)[0]

        def replayed(d: Out) -> Params:
            d = d._replace(hidden=self._filled(d.hidden, parts))
            return runner.vjp(params, frozen, self._filled(batch, parts), d)

        return self.made({**params, **frozen}, side, batch), replayed if learns else None

    def _filled(self, rows: Any, parts: int) -> Any:
        """Each shard's rows, and padding, which has no gradient, up to what ``parts`` divide."""

        def one(x: jax.Array) -> jax.Array:
            local = len(x) // self.shards
            if not (missing := -local % parts):
                return x
            x = x.reshape(self.shards, local, *x.shape[1:])
            x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
            return _flat(x)

        return jax.tree.map(one, rows)

    def _own(self, rows: Any, local: int) -> Any:
        """The inverse of :meth:`_filled`, ``local`` rows a shard."""

        def one(x: jax.Array) -> jax.Array:
            if len(x) == self.shards * local:
                return x
            x = x.reshape(self.shards, len(x) // self.shards, *x.shape[1:])
            return _flat(x[:, :local])

        return jax.tree.map(one, rows)


def _vectors(outs: list[Out], rows: list[Batch], batch: Pairs, lead: int) -> Vectors:
    query, document = (out.hidden.astype(jnp.float32) for out in outs)
    shape = batch.there.shape
    document = document.reshape(*shape, *document.shape[1:])
    seen = [x.segment > 0 for x in rows] if query.ndim == 3 else [None, None]
    return Vectors(
        query,
        document,
        seen[0],
        None if seen[1] is None else seen[1].reshape(*shape, -1),
        outs[lead].scale,
        outs[lead].bias,
    )


def rows_of(document: Batch) -> Batch:
    """``Pairs.document``, [b, K, ...], a row each: [b * K, ...]."""
    return jax.tree.map(_flat, document)


def _flat(x: Array) -> Any:
    """[a, b, ...] -> [a * b, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
