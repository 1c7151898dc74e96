"""The way back through a pipeline's stages: gradients of what its microbatches became."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.parallel import slots
from jaxvlm.parallel.halves import Halves, halves
from jaxvlm.parallel.pipeline import Cut, Split, There
from jaxvlm.parallel.schedule import Schedule
from jaxvlm.parallel.slots import Flow
from jaxvlm.types import Batch, Out, Params, Sums

Objective = Callable[[Out, Batch, jax.Array], tuple[jax.Array, Sums]]


def loss_grad(
    cut: Cut,
    schedule: Schedule,
    mesh: Mesh,
    params: Params,
    frozen: Params,
    parts: Batch,
    objective: Objective,
    skip: bool = True,
    features: bool = False,
) -> tuple[Sums, Params, jax.Array, jax.Array | None]:
    """A loss's sums over all microbatches, and the gradient of ``params``.

    Args:
        cut: the model; ``blocks`` are split over the mesh's ``stage`` by their leading dim.
        schedule: its table.
        mesh: with that axis.
        params: that are trained.
        frozen: the others.
        parts: microbatches [M, B, ...].
        objective: ``Out``, rows, and i32[] which microbatch they are -> what is differentiated,
            and its sums. The inner product with given cotangents makes this a vjp.
        skip: a stage without work takes a conditional's empty branch. That is wrong where a unit
            holds a collective that waits for devices of other stages; without it such a stage
            works on anything, and the result is thrown away: it costs no time, for the others
            are what is waited for.
        features: whether the gradient of ``parts.features`` is taken too.

    Returns:
        Sums, gradients, i32[S, 3]: how many forward and backward units and units of weights each
        stage worked on, counted as it did; and the features' gradient [M, B, ...], or ``None``.
    """
    own, still = Split.of(cut, params), Split.of(cut, frozen)
    bound = (cut, schedule, mesh, own, still, parts, skip)
    return _RoundTrip(*bound, features=features, objective=objective).loss_grad()


class _RoundTrip(There):
    """There and back; see the function above."""

    def __init__(self, *bound: Any, features: bool, objective: Objective):
        self.features, self.objective = features, objective
        self.how: dict[str, Any] = {}
        self.early: set[str] = set()  # of blocks, whose gradients the flow's makes anyway
        super().__init__(*bound)
        self.split = self.schedule.kept_rest > 0

    def loss_grad(self) -> tuple[Sums, Params, jax.Array, jax.Array | None]:
        """See the function of this name."""
        end = jax.lax.scan(self._tick, self._nothing(), self._table())[0]
        blocks = self._chunked(end["d_blocks"], back=True)
        grads = {**end["d_pre"], **end["d_post"], **blocks}
        for path in end["d_pre"].keys() & end["d_post"].keys():
            grads[path] = end["d_pre"][path] + end["d_post"][path]
        return end["sums"], grads, end["worked"], end["d_features"]

    def _tick(self, carry: Any, row: Any) -> tuple[Any, None]:
        c = dict(carry)
        left = self._go(c, row)
        (c["sums"], c["d_post"]), d_left = self._leave((c["sums"], c["d_post"]), left, row)
        c["d_left"] = slots.put(c["d_left"], d_left, row["end_slot"], row["end"] >= 0)
        d_left = slots.take(c["d_left"], row["end_back_slot"])
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
                c["d_features"] = slots.put(c["d_features"], d_features, at, yes)
        return c, None

    def _run(self, piece: str, f: Any, own: Any, flow: Any, known: Any) -> tuple[Any, Any]:
        """``f(own, flow)``, and what its way back needs besides ``known``."""
        out, kept, self.how[piece] = slots.record(f, own, flow, known)
        return out, kept

    # Before the first stage

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
        """Gradients with this tick's, and that of the features which entered."""
        part, has = (
            slots.take(self.parts, row["begin_back"]),
            slots.take(kept, row["begin_back_slot"]),
        )

        def work() -> tuple[Params, Any]:
            known = (self.own.pre, self.still.pre, part)
            d_own, d_learned = slots.back(self.how["pre"], known, has)(d_entry)
            return jax.tree.map(jnp.add, grads, d_own), d_learned

        def idle() -> tuple[Params, Any]:
            return grads, slots.zeros(self._learned(part))

        return jax.lax.cond(row["begin_back"] >= 0, work, idle)

    # Behind the last stage

    def _leave(self, sums: Any, left: Flow, row: Any) -> tuple[Any, Flow]:
        """The loss of what leaves the last stage in this tick, and its gradient."""
        part = slots.take(self.parts, row["end"])

        def work() -> tuple[Any, Flow]:
            value = functools.partial(self._value, part, row["end"])
            grad = jax.value_and_grad(value, (0, 1), has_aux=True)
            (_, found), (d_own, d_flow) = grad(self.own.post, left)
            return jax.tree.map(jnp.add, sums, (found, d_own)), d_flow

        return jax.lax.cond(row["end"] >= 0, work, lambda: (sums, slots.zeros(left)))

    def _value(
        self, part: Batch, number: jax.Array, own: Params, flow: Flow
    ) -> tuple[jax.Array, Sums]:
        out = self.cut.post({**own, **self.still.post}, flow, part)
        return self.objective(out, part, number)

    # On the stages

    def _backward(
        self, stage: Any, own: Any, still: Any, inbox: Flow, kept: Any, grads: Any, rest: Any,
        worked: Any, d_left: Flow, parts: Batch, row: Any,
    ) -> tuple[Flow, Flow, Any, Any, Any]:  # fmt: skip
        unit, chunk = row["backward"][stage], row["backward_chunk"][stage]
        slot = row["rest_slot"][stage]
        last = (stage == self.stages - 1) & (chunk == self.chunks - 1)
        d_out = slots.where(last, d_left, inbox)
        has, old = slots.take(kept, row["backward_slot"][stage]), slots.take(rest, slot)

        def work() -> tuple[Flow, Any, Any, Any]:
            known = self._unit(stage, unit, chunk, own, still, parts)[2]
            at_hand = known, has
            count = worked.at[1].add(1)
            if self.split:
                cut = self._halves(at_hand, d_out)
                d_flow, d_own, new = cut.first(at_hand, d_out)
            else:
                (d_own, d_flow), new = slots.back(self.how["blocks"], *at_hand)(d_out), []
            return d_flow, new, slots.add_at(grads, {p: d_own[p] for p in grads}, chunk), count

        def idle() -> tuple[Flow, Any, Any, Any]:
            return slots.zeros(self.entry), old, grads, worked

        d_flow, new, grads, worked = self._if(row["backward"], stage, work, idle)
        first = (stage == 0) & (chunk == 0) & (unit >= 0)
        d_entry = {}
        if self._goes_back():
            d_entry = self._from(first, d_flow)
        sent = {name: d_flow[name] for name in self.sent}
        return self._shift(sent, -1), d_entry, grads, slots.put(rest, new, slot), worked

    def _weights(
        self, stage: Any, own: Any, still: Any, kept: Any, grads: Any, rest: Any, worked: Any,
        parts: Batch, row: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        unit, chunk = row["weights"], row["weights_chunk"]
        has, more = (
            slots.take(kept, row["weights_slot"][stage]),
            slots.take(rest, row["rest_back_slot"][stage]),
        )

        def work() -> tuple[Any, Any]:
            known = self._unit(stage, unit, chunk, own, still, parts)[2]
            d_own = self.how["halves"].second((known, has), more)
            return slots.add_at(grads, {p: d_own[p] for p in grads}, chunk), worked.at[2].add(1)

        # All stages or none.
        return jax.lax.cond(unit >= 0, work, lambda: (grads, worked))

    def _halves(self, at_hand: Any, d_out: Flow) -> Halves:
        """A backward unit, cut into the flow's gradient and the parameters'.

        :meth:`_weights` is traced after :meth:`_backward`, and takes the same cut.
        """
        how = self.how["blocks"]
        self.how["halves"] = halves(lambda has, d: slots.back(how, *has)(d), at_hand, d_out)
        return self.how["halves"]

    # Shapes

    def _nothing(self) -> Any:
        """The carry before the first tick."""
        part = jax.tree.map(lambda x: x[0], self.parts)
        flow = {name: self.entry[name] for name in self.sent}

        def of_blocks(stage: Any, own: Any, still: Any, entry: Flow, parts: Batch) -> Any:
            f, mine, known = self._unit(stage, 0, 0, own, still, parts)
            out, kept = self._run("blocks", f, mine, entry, known)
            if not self.split:
                return kept, []
            _, early, rest = self._halves((known, kept), out).first((known, kept), out)
            self.early = {path for path, x in early.items() if x is not None}
            return kept, rest

        def of_pre(own: Params, part: Batch) -> Any:
            known = (own, self.still.pre, part)
            return self._run("pre", self._begin(part), own, self._learned(part), known)[1]

        # On the stages, for what an inner shard_map keeps has a shape that depends on the outer.
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
            **self._nothing_there(jax.eval_shape(of_pre, self.own.pre, part), blocks),
            "rest": slots.zeros(rest, self.stages, self.schedule.kept_rest),
            "d_inbox": slots.zeros(flow, self.stages),
            "d_left": slots.zeros(flow, self.schedule.kept_end),
            "sums": slots.zeros(jax.eval_shape(value, self.own.post, flow)[1]),
            "d_pre": slots.zeros(self.own.pre),
            "d_features": slots.zeros(self.parts.features) if self.features else None,
            "d_post": slots.zeros(self.own.post),
            "d_blocks": slots.zeros(self.own.blocks),
        }
