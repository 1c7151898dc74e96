"""Forward and backward pass of a pipeline: sums of a loss over microbatches, and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.parallel.pipeline import buffers
from jaxvlm.parallel.pipeline.buffers import Flow
from jaxvlm.parallel.pipeline.forward import PipelineForward, Split, StageCut, broadcast
from jaxvlm.parallel.pipeline.schedule import Schedule
from jaxvlm.parallel.pipeline.split_backward import SplitBackward, split_backward
from jaxvlm.types import Batch, Out, Params, Sums

Objective = Callable[[Out, Batch, jax.Array], tuple[jax.Array, Sums]]


def loss_grad(
    cut: StageCut,
    schedule: Schedule,
    mesh: Mesh,
    params: Params,
    frozen: Params,
    parts: Batch,
    objective: Objective,
    skip: bool = True,
    features: bool = False,
) -> tuple[Sums, Params, jax.Array, jax.Array | None]:
    """Return a loss's sums over all microbatches, and the gradient of ``params``.

    Args:
        cut: the model; ``blocks`` are split over the mesh axis ``pipeline`` by their leading dim.
        schedule: the table to follow.
        mesh: a mesh with that axis.
        params: trainable parameters.
        frozen: frozen parameters.
        parts: microbatches [M, B, ...].
        objective: ``Out``, a microbatch and its index i32[] -> the scalar to differentiate, and
            its sums. With the inner product of given cotangents, this function is a vjp.
        skip: whether an idle stage takes a conditional's empty branch. That is wrong where a unit
            holds a collective that waits for devices of other stages; without it an idle stage
            computes on arbitrary values and discards the result, which costs no time, as other
            stages determine the duration of a tick.
        features: whether to take the gradient of ``parts.features`` too.

    Returns:
        Sums; gradients; i32[S, 3], the forward units, backward units and W units that each stage
        worked on, counted as they ran; and the features' gradient [M, B, ...], or ``None``.
    """
    own, still = Split.of(cut, params), Split.of(cut, frozen)
    bound = (cut, schedule, mesh, own, still, parts, skip)
    return _ForwardBackward(*bound, features=features, objective=objective).loss_grad()


class _ForwardBackward(PipelineForward):
    """The pipeline's forward and backward pass; see :func:`loss_grad`."""

    def __init__(self, *bound: Any, features: bool, objective: Objective):
        self.features, self.objective = features, objective
        self.how: dict[str, Any] = {}
        self.early: set[str] = set()  # block parameters whose gradients the B unit computes anyway
        super().__init__(*bound)
        self.split = self.schedule.kept_rest > 0

    def loss_grad(self) -> tuple[Sums, Params, jax.Array, jax.Array | None]:
        """See the function of this name."""
        end = jax.lax.scan(self._tick, self._nothing(), self._table())[0]
        blocks = self._by_virtual_stage(end["d_blocks"], back=True)
        grads = {**end["d_pre"], **end["d_post"], **blocks}
        for path in end["d_pre"].keys() & end["d_post"].keys():
            grads[path] = end["d_pre"][path] + end["d_post"][path]
        return end["sums"], grads, end["worked"], end["d_features"]

    def _tick(self, carry: Any, row: Any) -> tuple[Any, None]:
        c = dict(carry)
        left = self._go(c, row)
        (c["sums"], c["d_post"]), d_left = self._leave((c["sums"], c["d_post"]), left, row)
        c["d_left"] = buffers.put(c["d_left"], d_left, row["end_slot"], row["end"] >= 0)
        d_left = buffers.take(c["d_left"], row["end_back_slot"])
        blocks = self.own.blocks, self.still.blocks
        soon = {p: x for p, x in c["d_blocks"].items() if not self.split or p in self.early}
        late = {p: x for p, x in c["d_blocks"].items() if p not in soon}
        c["d_inbox"], d_entry, soon, c["rest"], c["worked"] = self._on_stages(
            self._backward,
            (*blocks, c["d_inbox"], c["blocks"], soon, c["rest"], c["worked"]),
            (d_left, self.parts, row),
            (True, False, True, True, True),
        )
        if self.split:
            late, c["worked"] = self._on_stages(
                self._weights,
                (*blocks, c["blocks"], late, c["rest"], c["worked"]),
                (self.parts, row),
                (True, True),
            )
        c["d_blocks"] = {**soon, **late}
        if self._goes_back():
            c["d_pre"], d_features = self._enter_back(c["d_pre"], c["pre"], d_entry, row)
            if self.features:
                at = jnp.maximum(row["begin_back"], 0)
                yes = row["begin_back"] >= 0
                c["d_features"] = buffers.put(c["d_features"], d_features, at, yes)
        return c, None

    def _run(self, piece: str, f: Any, own: Any, flow: Any, known: Any) -> tuple[Any, Any]:
        """Run ``f(own, flow)``; also return the residuals of its vjp that are not in ``known``."""
        out, kept, self.how[piece] = buffers.record(f, own, flow, known)
        return out, kept

    # Before the first stage.

    def _learned(self, part: Batch) -> Any:
        return part.features if self.features else ()

    def _goes_back(self) -> bool:
        return bool(self.own.pre) or self.features

    def _begin(self, part: Batch) -> Callable[[Params, Any], Flow]:
        def begin(own: Params, learned: Any) -> Flow:
            whole = part._replace(features=learned) if self.features else part
            return self.cut.pre({**own, **self.still.pre}, whole)

        return begin

    def _enter_back(self, grads: Params, kept: Any, d_entry: Flow, row: Any) -> tuple[Params, Any]:
        """Add this tick's gradients, and return that of the features that entered."""
        part, has = (
            buffers.take(self.parts, row["begin_back"]),
            buffers.take(kept, row["begin_back_slot"]),
        )

        def work() -> tuple[Params, Any]:
            known = (self.own.pre, self.still.pre, part)
            d_own, d_learned = buffers.back(self.how["pre"], known, has)(d_entry)
            return jax.tree.map(jnp.add, grads, d_own), d_learned

        def idle() -> tuple[Params, Any]:
            return grads, buffers.zeros(self._learned(part))

        return jax.lax.cond(row["begin_back"] >= 0, work, idle)

    # After the last stage.

    def _leave(self, sums: Any, left: Flow, row: Any) -> tuple[Any, Flow]:
        """Add the loss of what leaves the last stage in this tick, and return its gradient."""
        part = buffers.take(self.parts, row["end"])

        def work() -> tuple[Any, Flow]:
            value = functools.partial(self._value, part, row["end"])
            grad = jax.value_and_grad(value, (0, 1), has_aux=True)
            (_, new_sums), (d_own, d_flow) = grad(self.own.post, left)
            return jax.tree.map(jnp.add, sums, (new_sums, d_own)), d_flow

        return jax.lax.cond(row["end"] >= 0, work, lambda: (sums, buffers.zeros(left)))

    def _value(
        self, part: Batch, number: jax.Array, own: Params, flow: Flow
    ) -> tuple[jax.Array, Sums]:
        out = self.cut.post({**own, **self.still.post}, flow, part)
        return self.objective(out, part, number)

    # On the stages.

    def _backward(
        self, stage: Any, own: Any, still: Any, inbox: Flow, kept: Any, grads: Any, rest: Any,
        worked: Any, d_left: Flow, parts: Batch, row: Any,
    ) -> tuple[Flow, Flow, Any, Any, Any]:  # fmt: skip
        unit, virtual = row["backward"][stage], row["backward_virtual_stage"][stage]
        slot = row["rest_slot"][stage]
        last = (stage == self.stages - 1) & (virtual == self.virtual_stages - 1)
        d_out = buffers.where(last, d_left, inbox)
        has, old = buffers.take(kept, row["backward_slot"][stage]), buffers.take(rest, slot)

        def work() -> tuple[Flow, Any, Any, Any]:
            known = self._unit(stage, unit, virtual, own, still, parts)[2]
            available = known, has
            count = worked.at[1].add(1)
            if self.split:
                cut = self._split_unit(available, d_out)
                d_flow, d_own, new = cut.first(available, d_out)
            else:
                (d_own, d_flow), new = buffers.back(self.how["blocks"], *available)(d_out), []
            return d_flow, new, buffers.add_at(grads, {p: d_own[p] for p in grads}, virtual), count

        def idle() -> tuple[Flow, Any, Any, Any]:
            return buffers.zeros(self.entry), old, grads, worked

        d_flow, new, grads, worked = self._if(row["backward"], stage, work, idle)
        first = (stage == 0) & (virtual == 0) & (unit >= 0)
        d_entry = {}
        if self._goes_back():
            d_entry = broadcast(self.mesh, first, d_flow)
        sent = {name: d_flow[name] for name in self.sent}
        return self._shift(sent, -1), d_entry, grads, buffers.put(rest, new, slot), worked

    def _weights(
        self, stage: Any, own: Any, still: Any, kept: Any, grads: Any, rest: Any, worked: Any,
        parts: Batch, row: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        unit, virtual = row["weights"], row["weights_virtual_stage"]
        has, more = (
            buffers.take(kept, row["weights_slot"][stage]),
            buffers.take(rest, row["rest_back_slot"][stage]),
        )

        def work() -> tuple[Any, Any]:
            known = self._unit(stage, unit, virtual, own, still, parts)[2]
            d_own = self.how["split"].second((known, has), more)
            new = buffers.add_at(grads, {p: d_own[p] for p in grads}, virtual)
            return new, worked.at[2].add(1)

        # All stages have a W unit in the same ticks.
        return jax.lax.cond(unit >= 0, work, lambda: (grads, worked))

    def _split_unit(self, available: Any, d_out: Flow) -> SplitBackward:
        """Split a backward unit into the flow's gradient (B) and the parameters' (W).

        :meth:`_weights` is traced after :meth:`_backward`, and uses the same split.
        """
        how = self.how["blocks"]
        self.how["split"] = split_backward(
            lambda has, d: buffers.back(how, *has)(d), available, d_out
        )
        return self.how["split"]

    # Shapes.

    def _nothing(self) -> Any:
        """Return the carry before the first tick."""
        part = jax.tree.map(lambda x: x[0], self.parts)
        flow = {name: self.entry[name] for name in self.sent}

        def of_blocks(stage: Any, own: Any, still: Any, entry: Flow, parts: Batch) -> Any:
            f, mine, known = self._unit(stage, 0, 0, own, still, parts)
            out, kept = self._run("blocks", f, mine, entry, known)
            if not self.split:
                return kept, []
            _, early, rest = self._split_unit((known, kept), out).first((known, kept), out)
            self.early = {path for path, x in early.items() if x is not None}
            return kept, rest

        def of_pre(own: Params, part: Batch) -> Any:
            known = (own, self.still.pre, part)
            return self._run("pre", self._begin(part), own, self._learned(part), known)[1]

        # On the stages: residuals of an inner shard_map have shapes that depend on the outer one.
        blocks, rest = jax.eval_shape(
            lambda entry: self._on_stages(
                of_blocks, (self.own.blocks, self.still.blocks), (entry, self.parts), (True, True)
            ),
            self.entry,
        )
        blocks, rest = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (blocks, rest)
        )
        value = functools.partial(self._value, part, jnp.int32(0))
        return {
            **self._empty_buffers(jax.eval_shape(of_pre, self.own.pre, part), blocks),
            "rest": buffers.zeros(rest, self.stages, self.schedule.kept_rest),
            "d_inbox": buffers.zeros(flow, self.stages),
            "d_left": buffers.zeros(flow, self.schedule.kept_end),
            "sums": buffers.zeros(jax.eval_shape(value, self.own.post, flow)[1]),
            "d_pre": buffers.zeros(self.own.pre),
            "d_features": buffers.zeros(self.parts.features) if self.features else None,
            "d_post": buffers.zeros(self.own.post),
            "d_blocks": buffers.zeros(self.own.blocks),
        }
