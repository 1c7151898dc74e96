"""Pipeline parallelism over the mesh axis ``pipeline``: run a model by a schedule's table.

What comes before the layers and what comes after them is no stage: in each tick it runs on the
devices of all stages, so that neither a vision encoder nor a vocabulary makes one stage longer
than the others, and none of its activations are kept longer than the schedule says.

This module has the forward pass; ``backward.py`` adds the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxvlm.parallel.mesh import mesh_here
from jaxvlm.parallel.pipeline import buffers
from jaxvlm.parallel.pipeline.buffers import Flow
from jaxvlm.parallel.pipeline.schedule import Schedule, one_way, rounds, virtual_stage_moves
from jaxvlm.types import Batch, Out, Params

AXIS = "pipeline"


class StageCut(NamedTuple):
    """A model split into three pieces for a pipeline."""

    pre: Callable[[Params, Batch], Flow]
    """Parameters outside of the layers, batch -> the first layer's input."""
    blocks: Callable[[Params, Flow, Batch, jax.Array], Flow]
    """Some layers' parameters, their input, the batch, the index of the first of them -> their
    output."""
    post: Callable[[Params, Flow, Batch], Out]
    """Parameters outside of the layers, the last layer's output, batch -> a loss's input."""
    where: Callable[[str], str]
    """A parameter's path -> ``pre``, ``blocks``, ``post``, or ``both``: pre and post."""


def forward(
    cut: StageCut,
    schedule: Schedule,
    mesh: Mesh,
    params: Params,
    parts: Batch,
    skip: bool = True,
) -> Out:
    """Run the forward pass over microbatches; no residuals are kept for a backward pass.

    Args:
        cut: the model; ``blocks`` are split over :data:`AXIS` by their leading dim.
        schedule: the table, of which only the forward units are read.
        mesh: a mesh with :data:`AXIS`.
        params: all parameters.
        parts: microbatches [M, B, ...].
        skip: see :func:`jaxvlm.parallel.pipeline.backward.loss_grad`.

    Returns:
        ``hidden`` [M, B, ...], and the fields that do not depend on examples (``head``, ``scale``,
        …). ``aux`` is left out: it is defined over the sequences of one microbatch.
    """
    still = Split.of(cut, params)
    return PipelineForward(
        cut, one_way(schedule), mesh, Split.of(cut, {}), still, parts, skip
    ).forward()


def skips(mesh: Mesh) -> bool:
    """Whether an idle stage may skip computation while the others work.

    Not where a stage is sharded further: the compiler moves shards between a stage's own devices
    by collective permutes, and on CPU these wait for all devices (not tried on other platforms).
    """
    return all(mesh.shape[axis] == 1 for axis in ("fsdp", "expert", "context", "tensor"))


def broadcast(mesh: Mesh, is_source: Any, tree: Any) -> Any:
    """Broadcast the values of the one stage for which ``is_source`` holds to all stages."""
    # A bfloat16 psum in a shard_map over some axes aborts XLA on CPU (jaxlib 0.10.2).
    wide = mesh.devices.flat[0].platform == "cpu"

    def one(x: jax.Array) -> jax.Array:
        own = jnp.where(is_source, x, 0)
        return jax.lax.psum(own.astype(jnp.float32) if wide else own, AXIS).astype(x.dtype)

    return jax.tree.map(one, tree)


class Split(NamedTuple):
    """Parameters by piece; those that two pieces share are in ``pre`` and in ``post``."""

    pre: Params
    blocks: Params
    post: Params

    @staticmethod
    def of(cut: StageCut, params: Params) -> Split:
        """Split ``params`` by the pieces that read them."""

        def some(*names: str) -> Params:
            return {path: x for path, x in params.items() if cut.where(path) in names}

        return Split(some("pre", "both"), some("blocks"), some("post", "both"))


class PipelineForward:
    """The pieces of one pipelined step, bound to its values, and their forward pass."""

    def __init__(
        self,
        cut: StageCut,
        schedule: Schedule,
        mesh: Mesh,
        own: Split,
        still: Split,
        parts: Batch,
        skip: bool,
    ):
        self.skip = skip
        self.cut, self.schedule, self.mesh, self.parts = cut, schedule, mesh, parts
        self.stages = mesh.shape[AXIS]
        self.virtual_stages = 1 + int(schedule.forward_virtual_stage.max())
        # All in one exchange: JAX gives every permute one channel, and XLA on CPU (jaxlib 0.10.2)
        # mixed up those of several exchanges at once, or aborted.
        blocks = self._by_virtual_stage(dict(sorted({**own.blocks, **still.blocks}.items())))
        self.own = own._replace(blocks={path: blocks[path] for path in own.blocks})
        self.still = still._replace(blocks={path: blocks[path] for path in still.blocks})
        layers = next(iter({**own.blocks, **still.blocks}.values())).shape[0]
        self.depth = layers // self.stages // self.virtual_stages
        part = jax.tree.map(lambda x: x[0], parts)
        self.entry = jax.eval_shape(self._begin(part), self.own.pre, self._learned(part))
        flow = jax.eval_shape(
            lambda p, f: cut.blocks(p, f, part, jnp.int32(0)), self._one_virtual_stage(), self.entry
        )
        self.sent = tuple(flow)

    def forward(self) -> Out:
        """See :func:`forward`."""

        def tick(carry: Any, row: Any) -> tuple[Any, None]:
            c = dict(carry)
            left = self._go(c, row)
            part, shared = buffers.take(self.parts, row["end"]), c["shared"]
            out_now = jax.lax.cond(
                row["end"] >= 0,
                lambda: self._end(left, part),
                lambda: shared._replace(hidden=buffers.zeros(out.hidden)),
            )
            at = jnp.maximum(row["end"], 0)
            c["hidden"] = buffers.put(c["hidden"], out_now.hidden, at, row["end"] >= 0)
            return c | {"shared": out_now._replace(hidden=None)}, None

        part = jax.tree.map(lambda x: x[0], self.parts)
        out = jax.eval_shape(self._end, {name: self.entry[name] for name in self.sent}, part)
        M = len(jax.tree.leaves(self.parts)[0])
        carry = {
            **self._empty_buffers([], []),
            "hidden": buffers.zeros(out.hidden, M),
            "shared": buffers.zeros(out._replace(hidden=None)),
        }
        end = jax.lax.scan(tick, carry, self._table())[0]
        return end["shared"]._replace(hidden=end["hidden"])

    def _end(self, left: Flow, part: Batch) -> Out:
        return self.cut.post({**self.own.post, **self.still.post}, left, part)._replace(aux=None)

    def _table(self) -> dict[str, jax.Array]:
        """Return the schedule's columns as arrays to scan over."""
        return {
            name: jnp.asarray(x, jnp.int32)
            for name, x in self.schedule._asdict().items()
            if not isinstance(x, int)
        }

    def _go(self, c: dict[str, Any], row: Any) -> Flow:
        """Run a tick's forward units; updates ``c`` and returns what leaves the last stage."""
        entry, c["pre"] = self._enter(c["pre"], row)
        c["inbox"], left, c["blocks"], c["worked"] = self._on_stages(
            self._forward,
            (self.own.blocks, self.still.blocks, c["inbox"], c["blocks"], c["worked"]),
            (entry, self.parts, row),
            (True, False, True, True),
        )
        return left

    def _run(self, piece: str, f: Any, own: Any, flow: Any, known: Any) -> tuple[Any, Any]:
        """Run ``f(own, flow)``; without a backward pass there are no residuals."""
        return f(own, flow), []

    # Before the first stage.

    def _learned(self, part: Batch) -> Any:
        """Return the part of a microbatch that has a gradient."""
        return ()

    def _begin(self, part: Batch) -> Callable[[Params, Any], Flow]:
        return lambda own, learned: self.cut.pre({**own, **self.still.pre}, part)

    def _enter(self, kept: Any, row: Any) -> tuple[Flow, Any]:
        """Return what enters the first stage in this tick, and the residuals of its vjp."""
        part, old = buffers.take(self.parts, row["begin"]), buffers.take(kept, row["begin_slot"])

        def work() -> tuple[Flow, Any]:
            known = (self.own.pre, self.still.pre, part)
            return self._run("pre", self._begin(part), self.own.pre, self._learned(part), known)

        def idle() -> tuple[Flow, Any]:
            return buffers.zeros(self.entry), old

        entry, new = jax.lax.cond(row["begin"] >= 0, work, idle)
        return entry, buffers.put(kept, new, row["begin_slot"])

    # On the stages.

    def _on_stages(
        self, unit: Callable[..., Any], split: Any, same: Any, out: tuple[bool, ...]
    ) -> Any:
        """Run ``unit`` on each stage; the mesh's other axes are left to the compiler.

        Args:
            unit: a function of values without the dim of stages.
            split: values with a leading dim of stages.
            same: values that are replicated over stages.
            out: for each result, whether it has a leading dim of stages.
        """

        def part(split: Any, same: Any) -> Any:
            mine = jax.tree.map(lambda x: x[0], split)
            results = unit(jax.lax.axis_index(AXIS), *mine, *same)
            return tuple(
                jax.tree.map(lambda a: a[None], x) if own else x for x, own in zip(results, out)
            )

        return jax.shard_map(
            part,
            mesh=mesh_here(self.mesh),
            in_specs=(P(AXIS), P()),
            out_specs=tuple(P(AXIS) if own else P() for own in out),
            axis_names={AXIS},
            check_vma=False,
        )(split, same)

    def _forward(
        self, stage: Any, own: Any, still: Any, inbox: Flow, kept: Any, worked: Any,
        entry: Flow, parts: Batch, row: Any,
    ) -> tuple[Flow, Flow, Any, Any]:  # fmt: skip
        unit, virtual = row["forward"][stage], row["forward_virtual_stage"][stage]
        slot = row["forward_slot"][stage]
        first = (stage == 0) & (virtual == 0)
        flow = buffers.where(first, entry, {**buffers.zeros(entry), **inbox})
        old = buffers.take(kept, slot)

        def work() -> tuple[Flow, Any, Any]:
            f, mine, known = self._unit(stage, unit, virtual, own, still, parts)
            return *self._run("blocks", f, mine, flow, known), worked.at[0].add(1)

        def idle() -> tuple[Flow, Any, Any]:
            return {name: jnp.zeros_like(flow[name]) for name in self.sent}, old, worked

        out, new, worked = self._if(row["forward"], stage, work, idle)
        last = (stage == self.stages - 1) & (virtual == self.virtual_stages - 1)
        left = broadcast(self.mesh, last, out)
        return self._shift(out, 1), left, buffers.put(kept, new, slot), worked

    def _if(self, units: Any, stage: Any, work: Callable[[], Any], idle: Callable[[], Any]) -> Any:
        """Run ``work`` on stages that have a unit; others may compute and discard the result."""
        busy = units[stage] >= 0
        if self.skip:
            return jax.lax.cond(busy, work, idle)

        def chosen() -> Any:
            return jax.tree.map(lambda x, y: jnp.where(busy, x, y), work(), idle())

        return jax.lax.cond((units >= 0).any(), chosen, idle)

    def _unit(self, stage: Any, unit: Any, virtual: Any, own: Any, still: Any, parts: Batch) -> Any:
        """Return a unit as a function of parameters and flow, its parameters, all known values."""
        mine, fixed, part = (
            buffers.take(own, virtual),
            buffers.take(still, virtual),
            buffers.take(parts, unit),
        )
        first = (virtual * self.stages + stage) * self.depth

        def f(mine: Params, flow: Flow) -> Flow:
            return self.cut.blocks({**mine, **fixed}, flow, part, first)

        return f, mine, (mine, fixed, part, first)

    def _shift(self, flow: Flow, by: int, to: Sequence[int] | None = None) -> Flow:
        """Send each stage's flow ``by`` stages further; with ``to``, only to slots of 0 or more."""
        S = self.stages
        ring = [(s, (s + by) % S) for s in range(S) if to is None or to[(s + by) % S] >= 0]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, ring), flow)

    # Shapes.

    def _one_virtual_stage(self) -> Params:
        both = {**self.own.blocks, **self.still.blocks}
        return {p: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for p, x in both.items()}

    def _empty_buffers(self, pre: Any, blocks: Any) -> dict[str, Any]:
        """Return what :meth:`_go` reads, before the first tick.

        Args:
            pre: shapes of the residuals of a microbatch's ``pre``.
            blocks: shapes of the residuals of a stage's layers for one microbatch.
        """
        flow = {name: self.entry[name] for name in self.sent}
        return {
            "pre": buffers.zeros(pre, self.schedule.kept_begin),
            "blocks": buffers.zeros(blocks, self.stages, self.schedule.kept),
            "inbox": buffers.zeros(flow, self.stages),
            "worked": jnp.zeros((self.stages, 3), jnp.int32),
        }

    def _by_virtual_stage(self, tree: Params, back: bool = False) -> Params:
        """[L, ...] -> [S, V, L / S / V, ...]: move layers to the virtual stages of the schedule."""
        S, V = self.stages, self.virtual_stages
        moves = virtual_stage_moves(S, V)
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
        out = buffers.zeros(tree)
        for far, sent, put in rounds(moves, self.stages):
            piece = buffers.take(tree, jnp.asarray(sent)[stage])
            piece = self._shift(piece, far, put) if far else piece
            slot = jnp.asarray(put)[stage]
            out = buffers.put(out, piece, jnp.maximum(slot, 0), slot >= 0)
        return out
