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
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.parallel.reduce import on_own_rows
from jaxvlm.train.objective import total
from jaxvlm.types import Batch, Loss, Out, Pairs, Params, Runner, Sums, Vectors


class Chunk(NamedTuple):
    """How many rows of a side a batch shard runs at once; the last chunk may have fewer."""

    rows: int = 0
    """0: as many as ``tokens`` says."""
    tokens: int = 0
    """Places of a chunk's rows at most, padding counted; a row that has more is a chunk. 0: any."""

    def of(self, length: int, most: int) -> int:
        """Rows of ``length`` tokens in a chunk, where a shard has ``most`` rows."""
        fit = self.tokens // max(1, length) if self.tokens else most
        return max(1, min(most, self.rows or most, fit))


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

    A side whose rows are one chunk keeps what its backward pass needs and is not run again.

    Args:
        runner: of one side's rows: ``Out.hidden`` [B, E] are their vectors, [B, T, E] those of
            their tokens.
        query: how queries are run.
        document: how documents are.
        mesh: of the run; ``None``: one device.
        shards: parts that it splits rows in.
        axes: batch axes over which gradients are not added: each device keeps the sum of its own
            rows' in a leading dim (see ``on_own_rows``). (): the compiler adds each chunk's.
        place: pins where the sums of gradients lie that the compiler adds.
    """

    runner: Runner
    query: Side = WHOLE
    document: Side = WHOLE
    mesh: Mesh | None = None
    shards: int = 1
    axes: tuple[str, ...] = ()
    place: Callable[[Params], Params] = lambda grads: grads

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """The runner's own, of one side's rows."""
        return self.runner.fwd(params, frozen, batch)

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """The runner's own, of one side's rows."""
        return self.runner.vjp(params, frozen, batch, d_out)

    def loss_grad(
        self, params: Params, frozen: Params, batch: Pairs, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """The loss's sums over all examples, and the gradient of ``sum_k scale_k * S_k``."""
        rows = [batch.query, jax.tree.map(_flat, batch.document)]
        sides = [self.query, self.document]
        learns = [side.learns(x) for side, x in zip(sides, rows)]
        # Both have the model's scale and bias: one takes their gradient back.
        lead = learns.index(True) if any(learns) else 0
        learns[lead] = True
        fixed = {**jax.lax.stop_gradient(params), **frozen}
        rows = [self._behind(fixed, side, x) for side, x in zip(sides, rows)]
        runs = [self._run(params, frozen, *of) for of in zip(sides, learns, rows)]

        def objective(outs: list[Out]) -> tuple[jax.Array, Sums]:
            sums = loss(_vectors(outs, rows, batch, lead), batch)
            return total(sums, scale), sums

        outs = [out for out, _ in runs]
        (_, sums), back = jax.value_and_grad(objective, has_aux=True)(outs)
        grads = [run(d) for (_, run), d in zip(runs, back) if run is not None]
        return sums, functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), grads)

    def _rows(self, side: Side, batch: Batch, shards: int) -> int:
        """Of a chunk, in each shard."""
        return side.chunk.of(batch.tokens.shape[1], len(batch.tokens) // shards)

    def _behind(self, params: Params, side: Side, batch: Batch) -> Batch:
        """Rows behind their frozen towers."""
        if side.still is None:
            return batch
        return self._mapped(functools.partial(side.still, params), side, batch)

    def _mapped(self, run: Callable[[Batch], Any], side: Side, batch: Batch) -> Any:
        """``run`` on a chunk of rows after another; its arrays have rows in front, or no dim."""
        local = len(batch.tokens) // self.shards
        if (rows := self._rows(side, batch, self.shards)) == local:
            return run(batch)
        made = jax.lax.map(run, _deal(batch, rows, self.shards))
        return jax.tree.map(lambda x: x[0] if x.ndim == 1 else _undeal(x, local, self.shards), made)

    def _run(
        self, params: Params, frozen: Params, side: Side, learns: bool, batch: Batch
    ) -> tuple[Out, Callable[[Out], Params] | None]:
        """What the model makes of a side, and how gradients of that become the parameters'."""

        def run(p: Params, x: Batch) -> Out:
            return self.runner.fwd(p, frozen, x)

        whole = self._rows(side, batch, self.shards) * self.shards == len(batch.tokens)
        if learns and whole and not self.axes:
            out, pull = jax.vjp(lambda p: run(p, batch), params)
            return out, lambda d: self.place(pull(d)[0])
        out = self._mapped(functools.partial(run, params), side, batch)
        if not learns:
            return out, None
        return out, lambda d: self._replayed(params, frozen, side, batch, d)

    def _replayed(
        self, params: Params, frozen: Params, side: Side, batch: Batch, d_out: Out
    ) -> Params:
        """Gradients by running each chunk again."""
        # Numbers that all rows share come in with the first row, so that they count once.
        first = jnp.arange(len(batch.tokens)) == 0
        spread = jax.tree.map(lambda d: jnp.where(first, d, 0) if not d.ndim else d, d_out)
        around = math.prod(self.mesh.shape[a] for a in self.axes) if self.mesh else 1
        shards = self.shards // around

        def replay(
            params: Params, frozen: Params, rows: tuple[Batch, Out], _: Any
        ) -> tuple[Any, Params]:
            def add(grads: Params, chunk: tuple[Batch, Out]) -> tuple[Params, None]:
                x, d = chunk
                own = jax.tree.map(lambda a, like: a if like.ndim else jnp.sum(a), d, d_out)
                more = self.runner.vjp(params, frozen, x, own)
                return self.place(jax.tree.map(jnp.add, grads, self.place(more))), None

            dealt = _deal(rows, self._rows(side, rows[0], shards), shards)
            zero = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)
            return (), jax.lax.scan(add, self.place(zero), dealt)[0]

        if self.axes and self.mesh is not None:
            replay = on_own_rows(replay, self.mesh, self.axes)
        return replay(params, frozen, (batch, spread), ())[1]


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


def _flat(x: jax.Array) -> jax.Array:
    """[b, K, ...] -> [b * K, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _deal(tree: Any, rows: int, shards: int) -> Any:
    """Rows [B, ...] as chunks [n, shards * rows, ...], each with ``rows`` of every shard's own.

    A shard's last chunk is filled up with zeros: rows of padding, which have no gradient.
    """

    def one(x: jax.Array) -> jax.Array:
        x = x.reshape(shards, x.shape[0] // shards, *x.shape[1:])
        count = -(-x.shape[1] // rows)
        fill = [(0, 0), (0, count * rows - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, fill)
        x = x.reshape(shards, count, rows, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0).reshape(count, shards * rows, *x.shape[3:])

    return jax.tree.map(one, tree)


def _undeal(x: jax.Array, local: int, shards: int) -> jax.Array:
    """The inverse of :func:`_deal`, ``local`` rows a shard."""
    count, rows = x.shape[0], x.shape[1] // shards
    x = jnp.moveaxis(x.reshape(count, shards, rows, *x.shape[2:]), 0, 1)
    x = x.reshape(shards, count * rows, *x.shape[3:])[:, :local]
    return x.reshape(shards * local, *x.shape[2:])
