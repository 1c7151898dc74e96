"""A model cut into stages over the mesh axis ``stage``: any schedule's table, carried out.

What comes before the layers and what comes behind them is no stage: it runs beside them in each
tick, on the devices of all stages, so that neither a vision tower nor a vocabulary makes one stage
longer than the others, and nothing of them is kept longer than a schedule says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxvlm.parallel import slots
from jaxvlm.parallel.halves import Halves, halves
from jaxvlm.parallel.schedule import Schedule, chunk_moves, rounds
from jaxvlm.parallel.slots import Flow
from jaxvlm.types import Batch, Out, Params, Sums

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


Objective = Callable[[Out, Batch], tuple[jax.Array, Sums]]


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
        cut: the model; ``blocks`` are split over :data:`AXIS` by their leading dim.
        schedule: its table.
        mesh: with :data:`AXIS`.
        params: that are trained.
        frozen: the others.
        parts: microbatches [M, B, ...].
        objective: ``Out`` and rows -> what is differentiated, and its sums.
        skip: a stage without work takes a conditional's empty branch. That is wrong where a unit
            holds a collective that waits for devices of other stages; without it such a stage
            works on anything, and the result is thrown away: it costs no time, for the others
            are what is waited for.
        features: whether the gradient of ``parts.features`` is taken too.

    Returns:
        Sums, gradients, i32[S, 3]: how many forward and backward units and units of weights each
        stage worked on, counted as it did; and the features' gradient [M, B, ...], or ``None``.
    """
    own, still = _Split.of(cut, params), _Split.of(cut, frozen)
    return _Run(cut, schedule, mesh, own, still, parts, skip, features).loss_grad(objective)


class _Split(NamedTuple):
    """Parameters by piece; those of both are in ``pre`` and in ``post``."""

    pre: Params
    blocks: Params
    post: Params

    @staticmethod
    def of(cut: Cut, params: Params) -> _Split:
        def some(*names: str) -> Params:
            return {path: x for path, x in params.items() if cut.where(path) in names}

        return _Split(some("pre", "both"), some("blocks"), some("post", "both"))


class _Run:
    """The pieces of one step, bound to its values."""

    def __init__(
        self,
        cut: Cut,
        schedule: Schedule,
        mesh: Mesh,
        own: _Split,
        still: _Split,
        parts: Batch,
        skip: bool,
        features: bool,
    ):
        self.skip, self.split = skip, schedule.kept_rest > 0
        self.features = features
        self.early: set[str] = set()  # of blocks, whose gradients the flow's makes anyway
        self.cut, self.schedule, self.mesh, self.parts = cut, schedule, mesh, parts
        self.stages, self.chunks = mesh.shape[AXIS], 1 + int(schedule.forward_chunk.max())
        self.own = own._replace(blocks=self._chunked(own.blocks))
        self.still = still._replace(blocks=self._chunked(still.blocks))
        layers = next(iter({**own.blocks, **still.blocks}.values())).shape[0]
        self.depth = layers // self.stages // self.chunks
        part = jax.tree.map(lambda x: x[0], parts)
        self.entry = jax.eval_shape(self._begin(part), self.own.pre, self._learned(part))
        flow = jax.eval_shape(
            lambda p, f: cut.blocks(p, f, part, jnp.int32(0)), self._one_chunk(), self.entry
        )
        self.sent = tuple(flow)
        self.how: dict[str, Any] = {}

    def loss_grad(self, objective: Objective) -> tuple[Sums, Params, jax.Array, jax.Array | None]:
        """See the function of this name."""
        carry = self._nothing(objective)
        body = functools.partial(self._tick, objective)
        table = {
            name: jnp.asarray(x, jnp.int32)
            for name, x in self.schedule._asdict().items()
            if not isinstance(x, int)
        }
        end = jax.lax.scan(body, carry, table)[0]
        blocks = self._chunked(end["d_blocks"], back=True)
        grads = {**end["d_pre"], **end["d_post"], **blocks}
        for path in end["d_pre"].keys() & end["d_post"].keys():
            grads[path] = end["d_pre"][path] + end["d_post"][path]
        return end["sums"], grads, end["worked"], end["d_features"]

    def _tick(self, objective: Objective, carry: Any, row: Any) -> tuple[Any, None]:
        c = dict(carry)
        entry, c["pre"] = self._enter(c["pre"], row)
        c["inbox"], left, c["blocks"], c["worked"] = self._on_stages(
            self._forward,
            (self.own.blocks, self.still.blocks, c["inbox"], c["blocks"], c["worked"]),
            (entry, self.parts, row),
            (True, False, True, True),
        )
        (c["sums"], c["d_post"]), d_left = self._leave(
            objective, (c["sums"], c["d_post"]), left, row
        )
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

    # Before the first stage

    def _learned(self, part: Batch) -> Any:
        """What of a microbatch has a gradient."""
        return part.features if self.features else ()

    def _goes_back(self) -> bool:
        return bool(self.own.pre) or self.features

    def _begin(self, part: Batch) -> Callable[[Params, Any], Flow]:
        def begin(own: Params, learned: Any) -> Flow:
            whole = part._replace(features=learned) if self.features else part
            return self.cut.pre({**own, **self.still.pre}, whole)

        return begin

    def _enter(self, kept: Any, row: Any) -> tuple[Flow, Any]:
        """What enters the first stage in this tick, and what its way back needs."""
        part, old = slots.take(self.parts, row["begin"]), slots.take(kept, row["begin_slot"])

        def work() -> tuple[Flow, Any]:
            known = (self.own.pre, self.still.pre, part)
            learned = self._learned(part)
            entry, new, self.how["pre"] = slots.record(
                self._begin(part), self.own.pre, learned, known
            )
            return entry, new

        def idle() -> tuple[Flow, Any]:
            return slots.zeros(self.entry), old

        entry, new = jax.lax.cond(row["begin"] >= 0, work, idle)
        return entry, slots.put(kept, new, row["begin_slot"])

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

    def _leave(self, objective: Objective, sums: Any, left: Flow, row: Any) -> tuple[Any, Flow]:
        """The loss of what leaves the last stage in this tick, and its gradient."""
        part = slots.take(self.parts, row["end"])

        def value(own: Params, flow: Flow) -> tuple[jax.Array, Sums]:
            return objective(self.cut.post({**own, **self.still.post}, flow, part), part)

        def work() -> tuple[Any, Flow]:
            grad = jax.value_and_grad(value, (0, 1), has_aux=True)
            (_, found), (d_own, d_flow) = grad(self.own.post, left)
            return jax.tree.map(jnp.add, sums, (found, d_own)), d_flow

        return jax.lax.cond(row["end"] >= 0, work, lambda: (sums, slots.zeros(left)))

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
            out, new, self.how["blocks"] = slots.record(f, mine, flow, known)
            return out, new, worked.at[0].add(1)

        def idle() -> tuple[Flow, Any, Any]:
            return {name: jnp.zeros_like(flow[name]) for name in self.sent}, old, worked

        out, new, worked = self._if(row["forward"], stage, work, idle)
        last = (stage == self.stages - 1) & (chunk == self.chunks - 1)
        left = self._from(last, out)
        return self._shift(out, 1), left, slots.put(kept, new, slot), worked

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

    def _nothing(self, objective: Objective) -> Any:
        """The carry before the first tick."""
        part = jax.tree.map(lambda x: x[0], self.parts)
        flow = {name: self.entry[name] for name in self.sent}

        def of_blocks(stage: Any, own: Any, still: Any, entry: Flow, parts: Batch) -> Any:
            f, mine, known = self._unit(stage, 0, 0, own, still, parts)
            out, kept, self.how["blocks"] = slots.record(f, mine, entry, known)
            if not self.split:
                return kept, []
            _, early, rest = self._halves((known, kept), out).first((known, kept), out)
            self.early = {path for path, x in early.items() if x is not None}
            return kept, rest

        def of_pre(own: Params, part: Batch) -> Any:
            known = (own, self.still.pre, part)
            return slots.record(self._begin(part), own, self._learned(part), known)[1]

        def of_post(own: Params, still: Params, flow: Flow, part: Batch) -> Any:
            return objective(self.cut.post({**own, **still}, flow, part), part)[1]

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
        pre = jax.eval_shape(of_pre, self.own.pre, part)
        sums = jax.eval_shape(of_post, self.own.post, self.still.post, flow, part)
        table, S = self.schedule, self.stages
        return {
            "pre": slots.zeros(pre, table.kept_begin),
            "blocks": slots.zeros(blocks, S, table.kept),
            "rest": slots.zeros(rest, S, table.kept_rest),
            "inbox": slots.zeros(flow, S),
            "d_inbox": slots.zeros(flow, S),
            "d_left": slots.zeros(flow, table.kept_end),
            "sums": slots.zeros(sums),
            "d_pre": slots.zeros(self.own.pre),
            "d_features": slots.zeros(self.parts.features) if self.features else None,
            "d_post": slots.zeros(self.own.post),
            "d_blocks": slots.zeros(self.own.blocks),
            "worked": jnp.zeros((S, 3), jnp.int32),
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
            piece = self._shift(slots.take(tree, jnp.asarray(sent)[stage]), far, put)
            slot = jnp.asarray(put)[stage]
            out = slots.put(out, piece, jnp.maximum(slot, 0), slot >= 0)
        return out
