"""A model cut into stages over the mesh axis ``stage``: any schedule's table, carried out.

What comes before the layers and what comes behind them is no stage: it runs beside them in each
tick, on the devices of all stages, so that neither a vision tower nor a vocabulary makes one stage
longer than the others, and nothing of them is kept longer than a schedule says.

The way there is here; ``backward.py`` has the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxvlm.parallel import slots
from jaxvlm.parallel.schedule import Schedule, chunk_moves, one_way, rounds
from jaxvlm.parallel.slots import Flow
from jaxvlm.types import Batch, Out, Params

AXIS = "stage"


class Cut(NamedTuple):
    """A model in three pieces."""

    pre: Callable[[Params, Batch], Flow]
    """Parameters outside of the layers, rows -> what the first layer takes."""
    blocks: Callable[[Params, Flow, Batch, jax.Array], Flow]
    """Some layers' parameters, what comes in, the rows, the number of their first layer -> what
    goes on."""
    post: Callable[[Params, Flow, Batch], Out]
    """Parameters outside of the layers, what the last layer gave, rows -> what a loss takes."""
    where: Callable[[str], str]
    """A parameter's path -> ``pre``, ``blocks``, ``post``, or ``both``: pre and post."""


def forward(
    cut: Cut,
    schedule: Schedule,
    mesh: Mesh,
    params: Params,
    parts: Batch,
    skip: bool = True,
) -> Out:
    """What the model makes of microbatches; nothing is kept for a way back.

    Args:
        cut: the model; ``blocks`` are split over :data:`AXIS` by their leading dim.
        schedule: its table; the way there is read alone.
        mesh: with :data:`AXIS`.
        params: all of them.
        parts: microbatches [M, B, ...].
        skip: see :func:`jaxvlm.parallel.backward.loss_grad`.

    Returns:
        ``hidden`` [M, B, ...], and what rows have no part in (``head``, ``scale``, …). ``aux`` is
        left out: it is of rows that go through together.
    """
    still = Split.of(cut, params)
    return There(cut, one_way(schedule), mesh, Split.of(cut, {}), still, parts, skip).forward()


class Split(NamedTuple):
    """Parameters by piece; those of both are in ``pre`` and in ``post``."""

    pre: Params
    blocks: Params
    post: Params

    @staticmethod
    def of(cut: Cut, params: Params) -> Split:
        """All of ``params``, each where it is read."""

        def some(*names: str) -> Params:
            return {path: x for path, x in params.items() if cut.where(path) in names}

        return Split(some("pre", "both"), some("blocks"), some("post", "both"))


class There:
    """The pieces of one run, bound to its values; their way there."""

    def __init__(
        self,
        cut: Cut,
        schedule: Schedule,
        mesh: Mesh,
        own: Split,
        still: Split,
        parts: Batch,
        skip: bool,
    ):
        self.skip = skip
        self.cut, self.schedule, self.mesh, self.parts = cut, schedule, mesh, parts
        self.stages, self.chunks = mesh.shape[AXIS], 1 + int(schedule.forward_chunk.max())
        # In one exchange, which all pipelines of a step share: JAX gives every permute one channel,
        # and XLA on CPU (jaxlib 0.10.2) mixed up those of several exchanges at once, or aborted.
        blocks = self._chunked(dict(sorted({**own.blocks, **still.blocks}.items())))
        self.own = own._replace(blocks={path: blocks[path] for path in own.blocks})
        self.still = still._replace(blocks={path: blocks[path] for path in still.blocks})
        layers = next(iter({**own.blocks, **still.blocks}.values())).shape[0]
        self.depth = layers // self.stages // self.chunks
        part = jax.tree.map(lambda x: x[0], parts)
        self.entry = jax.eval_shape(self._begin(part), self.own.pre, self._learned(part))
        flow = jax.eval_shape(
            lambda p, f: cut.blocks(p, f, part, jnp.int32(0)), self._one_chunk(), self.entry
        )
        self.sent = tuple(flow)

    def forward(self) -> Out:
        """See the function of this name."""

        def tick(carry: Any, row: Any) -> tuple[Any, None]:
            c = dict(carry)
            left = self._go(c, row)
            part, shared = slots.take(self.parts, row["end"]), c["shared"]
            found = jax.lax.cond(
                row["end"] >= 0,
                lambda: self._end(left, part),
                lambda: shared._replace(hidden=slots.zeros(out.hidden)),
            )
            at = jnp.maximum(row["end"], 0)
            c["hidden"] = slots.put(c["hidden"], found.hidden, at, row["end"] >= 0)
            return c | {"shared": found._replace(hidden=None)}, None

        part = jax.tree.map(lambda x: x[0], self.parts)
        out = jax.eval_shape(self._end, {name: self.entry[name] for name in self.sent}, part)
        M = len(jax.tree.leaves(self.parts)[0])
        carry = {
            **self._nothing_there([], []),
            "hidden": slots.zeros(out.hidden, M),
            "shared": slots.zeros(out._replace(hidden=None)),
        }
        end = jax.lax.scan(tick, carry, self._table())[0]
        return end["shared"]._replace(hidden=end["hidden"])

    def _end(self, left: Flow, part: Batch) -> Out:
        return self.cut.post({**self.own.post, **self.still.post}, left, part)._replace(aux=None)

    def _table(self) -> dict[str, jax.Array]:
        """The schedule, tick by tick."""
        return {
            name: jnp.asarray(x, jnp.int32)
            for name, x in self.schedule._asdict().items()
            if not isinstance(x, int)
        }

    def _go(self, c: dict[str, Any], row: Any) -> Flow:
        """A tick's way there; changes ``c`` and gives what leaves the last stage."""
        entry, c["pre"] = self._enter(c["pre"], row)
        c["inbox"], left, c["blocks"], c["worked"] = self._on_stages(
            self._forward,
            (self.own.blocks, self.still.blocks, c["inbox"], c["blocks"], c["worked"]),
            (entry, self.parts, row),
            (True, False, True, True),
        )
        return left

    def _run(self, piece: str, f: Any, own: Any, flow: Any, known: Any) -> tuple[Any, Any]:
        """``f(own, flow)``, and what its way back needs besides ``known``: there is none."""
        return f(own, flow), []

    # Before the first stage

    def _learned(self, part: Batch) -> Any:
        """What of a microbatch has a gradient."""
        return ()

    def _begin(self, part: Batch) -> Callable[[Params, Any], Flow]:
        return lambda own, learned: self.cut.pre({**own, **self.still.pre}, part)

    def _enter(self, kept: Any, row: Any) -> tuple[Flow, Any]:
        """What enters the first stage in this tick, and what its way back needs."""
        part, old = slots.take(self.parts, row["begin"]), slots.take(kept, row["begin_slot"])

        def work() -> tuple[Flow, Any]:
            known = (self.own.pre, self.still.pre, part)
            return self._run("pre", self._begin(part), self.own.pre, self._learned(part), known)

        def idle() -> tuple[Flow, Any]:
            return slots.zeros(self.entry), old

        entry, new = jax.lax.cond(row["begin"] >= 0, work, idle)
        return entry, slots.put(kept, new, row["begin_slot"])

    # On the stages

    def _on_stages(
        self, unit: Callable[..., Any], split: Any, same: Any, out: tuple[bool, ...]
    ) -> Any:
        """``unit`` on each stage; the mesh's other axes are left to the compiler.

        Args:
            unit: of values without the dim of stages.
            split: what has one, in front.
            same: what each stage sees whole.
            out: of each result, whether it has that dim.
        """

        def part(split: Any, same: Any) -> Any:
            mine = jax.tree.map(lambda x: x[0], split)
            made = unit(jax.lax.axis_index(AXIS), *mine, *same)
            return tuple(
                jax.tree.map(lambda a: a[None], x) if own else x for x, own in zip(made, out)
            )

        around = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            part,
            mesh=self.mesh if around.empty else around,
            in_specs=(P(AXIS), P()),
            out_specs=tuple(P(AXIS) if own else P() for own in out),
            axis_names={AXIS},
            check_vma=False,
        )(split, same)

    def _forward(
        self, stage: Any, own: Any, still: Any, inbox: Flow, kept: Any, worked: Any,
        entry: Flow, parts: Batch, row: Any,
    ) -> tuple[Flow, Flow, Any, Any]:  # fmt: skip
        unit, chunk = row["forward"][stage], row["forward_chunk"][stage]
        slot = row["forward_slot"][stage]
        first = (stage == 0) & (chunk == 0)
        flow = slots.where(first, entry, {**slots.zeros(entry), **inbox})
        old = slots.take(kept, slot)

        def work() -> tuple[Flow, Any, Any]:
            f, mine, known = self._unit(stage, unit, chunk, own, still, parts)
            return *self._run("blocks", f, mine, flow, known), worked.at[0].add(1)

        def idle() -> tuple[Flow, Any, Any]:
            return {name: jnp.zeros_like(flow[name]) for name in self.sent}, old, worked

        out, new, worked = self._if(row["forward"], stage, work, idle)
        last = (stage == self.stages - 1) & (chunk == self.chunks - 1)
        left = self._from(last, out)
        return self._shift(out, 1), left, slots.put(kept, new, slot), worked

    def _if(self, units: Any, stage: Any, work: Callable[[], Any], idle: Callable[[], Any]) -> Any:
        """``work`` on stages that have a unit; others may compute what they do not keep."""
        busy = units[stage] >= 0
        if self.skip:
            return jax.lax.cond(busy, work, idle)

        def chosen() -> Any:
            return jax.tree.map(lambda x, y: jnp.where(busy, x, y), work(), idle())

        return jax.lax.cond((units >= 0).any(), chosen, idle)

    def _unit(self, stage: Any, unit: Any, chunk: Any, own: Any, still: Any, parts: Batch) -> Any:
        """A unit as a function of parameters and flow, its parameters, all that is at hand."""
        mine, fixed, part = (
            slots.take(own, chunk),
            slots.take(still, chunk),
            slots.take(parts, unit),
        )
        first = (chunk * self.stages + stage) * self.depth

        def f(mine: Params, flow: Flow) -> Flow:
            return self.cut.blocks({**mine, **fixed}, flow, part, first)

        return f, mine, (mine, fixed, part, first)

    def _from(self, here: Any, flow: Flow) -> Flow:
        """The flow of the one stage that is ``here``, on all stages."""
        # A sum of bfloat16 in a shard_map over some axes aborts XLA on CPU (jaxlib 0.10.2).
        wide = self.mesh.devices.flat[0].platform == "cpu"

        def one(x: jax.Array) -> jax.Array:
            own = jnp.where(here, x, 0)
            return jax.lax.psum(own.astype(jnp.float32) if wide else own, AXIS).astype(x.dtype)

        return jax.tree.map(one, flow)

    def _shift(self, flow: Flow, by: int, to: Sequence[int] | None = None) -> Flow:
        """Each stage's flow ``by`` stages further; with ``to``, to those of -1 or more alone."""
        S = self.stages
        ring = [(s, (s + by) % S) for s in range(S) if to is None or to[(s + by) % S] >= 0]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, ring), flow)

    # Shapes

    def _one_chunk(self) -> Params:
        both = {**self.own.blocks, **self.still.blocks}
        return {p: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for p, x in both.items()}

    def _nothing_there(self, pre: Any, blocks: Any) -> dict[str, Any]:
        """What :meth:`_go` reads, before the first tick.

        Args:
            pre: shapes of what a microbatch's ``pre`` keeps.
            blocks: of what a stage's layers keep of one.
        """
        flow = {name: self.entry[name] for name in self.sent}
        return {
            "pre": slots.zeros(pre, self.schedule.kept_begin),
            "blocks": slots.zeros(blocks, self.stages, self.schedule.kept),
            "inbox": slots.zeros(flow, self.stages),
            "worked": jnp.zeros((self.stages, 3), jnp.int32),
        }

    def _chunked(self, tree: Params, back: bool = False) -> Params:
        """[L, ...] -> [S, V, L / S / V, ...], each stage's chunks where the schedule wants them."""
        S, V = self.stages, self.chunks
        moves = chunk_moves(S, V)
        if back:
            moves = {source: to for to, source in moves.items()}
        else:
            tree = {p: x.reshape(S, V, -1, *x.shape[1:]) for p, x in tree.items()}
        if V > 1:
            tree = self._on_stages(
                lambda stage, tree: (self._moved(stage, tree, moves),), (tree,), (), (True,)
            )[0]
        return {p: x.reshape(-1, *x.shape[3:]) for p, x in tree.items()} if back else tree

    def _moved(self, stage: Any, tree: Params, moves: Any) -> Params:
        out = slots.zeros(tree)
        for far, sent, put in rounds(moves, self.stages):
            piece = slots.take(tree, jnp.asarray(sent)[stage])
            piece = self._shift(piece, far, put) if far else piece
            slot = jnp.asarray(put)[stage]
            out = slots.put(out, piece, jnp.maximum(slot, 0), slot >= 0)
        return out
