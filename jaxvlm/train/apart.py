"""A training step on two meshes: the vision tower's, and that of all the rest.

Each program runs on one mesh. Between them go the tower's features, their gradients, and one
vector of the gradients' norms. JAX only puts programs into the devices' queues, so what follows
from nothing that the other mesh is at work on runs beside it: a frozen tower is a batch ahead of
the rest, and a trained one encodes microbatches while the rest learns from those before.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxvlm.parallel.sharding import HOST
from jaxvlm.train.alive import Alive
from jaxvlm.train.objective import scales, total
from jaxvlm.train.programs import bytes_of
from jaxvlm.train.runner import FEATURES, check_parts, deal, undeal
from jaxvlm.train.step import Placement, finish, judge, report, squares, update
from jaxvlm.types import Batch, Loss, Params, Runner, Sums, TrainState

OF_TOWER = ("encode", "zeros", "backward", "squares", "update")
"""Programs that run on the tower's mesh."""
_LAST = ("step", "update", "finish")
"""Programs whose results are the new state, in the old one's place."""
AHEAD = 1
"""Waves that a tower which learns encodes ahead of the one that the rest learns from."""


class Sides(NamedTuple):
    """One thing for each mesh."""

    tower: Any
    rest: Any


_NONE = Sides(0, 0)


def is_tower(path: str) -> bool:
    """Whether a parameter is the tower's."""
    return path.startswith("vision/")


def cut(state: TrainState, move: Callable[[Any], Any]) -> Sides:
    """A run's state as that of each side.

    Args:
        state: of the run: each parameter, with its moments, on its mesh; all else on the rest's.
        move: brings what is no parameter's to the tower's mesh.
    """
    sides = []
    for mine, other in ((is_tower, move), (lambda path: not is_tower(path), lambda x: x)):
        own = {path: x for path, x in state.params.items() if mine(path)}
        still = {path: x for path, x in state.frozen.items() if mine(path)}

        def pick(node: Any, mine: Any = mine, other: Any = other) -> Any:
            if not isinstance(node, dict):
                return other(node)
            return {path: x for path, x in node.items() if mine(path)}

        opt_state = jax.tree.map(pick, state.opt_state, is_leaf=_is_dict)
        sides.append(state._replace(params=own, frozen=still, opt_state=opt_state))
    return Sides(*sides)


def join(rest: TrainState, tower: TrainState) -> TrainState:
    """The inverse of :func:`cut`; what is no parameter's is taken from ``rest``."""

    def both(a: Any, b: Any) -> Any:
        return {**a, **b} if isinstance(a, dict) else a

    return rest._replace(
        params={**rest.params, **tower.params},
        frozen={**rest.frozen, **tower.frozen},
        opt_state=jax.tree.map(both, rest.opt_state, tower.opt_state, is_leaf=_is_dict),
    )


def _is_dict(node: Any) -> bool:
    return isinstance(node, dict)


@dataclasses.dataclass(frozen=True)
class Step(abc.ABC):
    """Programs on two meshes that together are ``(state, batch) -> (state, metrics)``.

    Its base is what they share; :class:`Frozen` and :class:`Trained` call them.
    """

    programs: Mapping[str, Any]
    rows: Sides
    """Shardings of batches."""
    whole: Sides
    """Shardings of what every device of a side has."""
    between: Sides
    """Shardings of features and their gradients on their way: as many parts on both sides, or JAX
    would wait for them and take them through the host."""
    move: Callable[[Any, Any], Any] = jax.device_put
    """Brings arrays to a sharding."""
    held: Sides = _NONE
    """Bytes of a state and a batch on one device of each side."""
    peak: Sides = _NONE
    """Most bytes on it while a program of its side runs."""
    host: int = 0
    """Bytes of the state in host memory, for one device of each side."""
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Compiled programs, by name and what they take."""

    @abc.abstractmethod
    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """As a compiled :func:`jaxvlm.train.step.make_step`."""

    def compiled(self, state: TrainState, batch: Batch) -> Step:
        """This step, its jitted programs compiled for such a state and such a batch."""
        state, batch = jax.tree.map(lambda x: like(x, x.sharding), (state, batch))
        ready: dict[str, Any] = {}
        alive = Alive(OF_TOWER, _LAST)

        def move(tree: Any, where: Any) -> Any:
            return alive.born(like(tree, where))

        def shapes_of(name: str, program: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                taken = [
                    (x.shape, x.dtype, getattr(x, "sharding", None)) for x in jax.tree.leaves(args)
                ]
                key = (name, jax.tree.structure(args), *taken)
                if key not in self.cache:
                    lowered = program.lower(*args)
                    self.cache[key] = lowered.out_info, lowered.compile()
                made, ready[name] = self.cache[key]
                made = jax.tree.map(like, made, ready[name].output_shardings)
                return alive.call(name, ready[name], args, made)

            return run

        asks = {name: shapes_of(name, program) for name, program in self.programs.items()}
        dataclasses.replace(self, programs=asks, move=move)(state, batch)
        held, host = [0, 0], 0
        for x in jax.tree.leaves((state, batch)):
            if x.sharding.memory_kind == HOST:
                host += bytes_of(x)
            else:
                held[x.sharding.device_set != self.whole.tower.device_set] += bytes_of(x)
        most = alive.most(self.whole.tower.device_set)
        return dataclasses.replace(
            self,
            programs=ready,
            held=Sides(*held),
            peak=Sides(held[0] + most[0], held[1] + most[1]),
            host=host,
        )

    def memory(self) -> dict[str, int]:
        """Bytes on a device of each side; see ``jaxvlm.train.programs.memory``."""
        found: dict[str, int] = {}
        for name, held, peak in zip(Sides._fields, self.held, self.peak):
            found |= {f"{name}, state and batch": held, f"{name}, work": peak - held}
            found[f"{name}, peak"] = peak
        return found | ({"host": self.host} if self.host else {})

    def marked(self, step: Any, batch: Batch) -> Batch:
        """The batch, with keys of its rows where something is dropped."""
        if "noise" not in self.programs:
            return batch
        rows = Batch(batch.tokens, None, None, None)
        return batch._replace(noise=self.programs["noise"](step, rows).noise)

    def pictures(self, batch: Batch) -> tuple[Batch | None, Batch]:
        """What of a batch the tower reads (``None``: nothing is there), and what the rest does.

        Its ``pixels`` or ``patches`` are on the tower's mesh, all else on the rest's.
        """
        others = batch._replace(pixels=None, patches=None)
        if batch.pixels is None and batch.patches is None:
            return None, others

        def there(x: Any) -> Any:  # in parts that both sides have; see ``between``
            return (
                x if x is None else self.move(self.move(x, self.between.rest), self.between.tower)
            )

        nothing, seen = Batch(None, None, None, None), {"grid": batch.grid, "noise": batch.noise}
        taken = nothing._replace(pixels=batch.pixels, patches=batch.patches)
        return taken._replace(**{name: there(x) for name, x in seen.items()}), others


def like(tree: Any, where: Any) -> Any:
    """Shapes of arrays that lie as ``where`` says."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def encode(
    encoder: Callable[[Params, Batch], Any], params: Params, taken: Batch, parts: int
) -> Any:
    """Features of all rows, ``parts`` of them one behind the other."""
    if parts == 1:
        return encoder(params, taken)
    return undeal(jax.lax.map(lambda part: encoder(params, part), deal(taken, parts)))


class Frozen(Step):
    """The tower does not learn: features are part of the batch.

    Programs: ``encode(frozen, taken)`` and ``step(state, batch)``.
    """

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """As a compiled :func:`jaxvlm.train.step.make_step`."""
        tower, rest = cut(state, lambda x: x)
        taken, batch = self.pictures(batch)
        if taken is not None:
            made = self.programs["encode"](tower.frozen, taken)
            batch = batch._replace(features=self.move(made, self.between.rest))
        new, metrics = self.programs["step"](rest, batch)
        return join(new, tower._replace(opt_state=new.opt_state)), metrics


@dataclasses.dataclass(frozen=True)
class Trained(Step):
    """The tower learns too; ``waves`` of microbatches go one behind the other.

    Programs: the methods of :class:`Pieces`.
    """

    waves: int = 1

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """As a compiled :func:`jaxvlm.train.step.make_step`."""
        run, between, whole = self.programs, self.between, self.whole
        batch = self.marked(state.step, batch)
        tower, rest = cut(state, lambda x: self.move(x, whole.tower))
        taken, batch = self.pictures(batch)
        theirs, ours = (tower.params, tower.frozen), (rest.params, rest.frozen)

        def features(m: int) -> Any:
            if taken is None or m >= self.waves:
                return None
            return self.move(run["encode"](*theirs, taken, np.int32(m)), between.rest)

        made = [features(m) for m in range(AHEAD)]
        scale, carry = run["begin"](*ours, batch, made[0])
        grads = run["zeros"](tower.params)
        for m in range(self.waves):
            made.append(features(m + AHEAD))
            part = np.int32(m)
            carry, back = run["gradients"](*ours, batch, part, scale, carry, made.pop(0))
            if taken is not None:
                back = self.move(back, between.tower)
                grads = run["backward"](*theirs, taken, part, back, grads)
        value, norms = run["norms"](scale, carry)
        own = run["squares"](grads)
        here, there = self.move((value, norms), whole.tower), self.move(own, whole.rest)
        changed = run["update"](tower.params, tower.opt_state, grads, *here, own)
        new, metrics = run["finish"](rest, batch, scale, carry, value, norms, there)
        return join(new, tower._replace(params=changed[0], opt_state=changed[1])), metrics


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What :class:`Trained` compiles: pure functions, of the tower's side or of the rest's."""

    encoder: Callable[[Params, Batch], Any]
    """The tower's parameters and its part of a batch -> ``Batch.features``."""
    runner: Runner
    """Of the rest; features are among its parameters."""
    loss: Loss
    tx: optax.GradientTransformation
    place: Sides
    """A Placement of each."""
    sums: Sides
    """Pins where each side's gradients lie while they are added up."""
    rows: Any
    """The sharding of the rest's rows."""
    waves: int
    group: int
    """Microbatches in a wave: as many as the rest's runner takes at once."""

    def _wave(self, batch: Batch, m: Any) -> Batch:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, m, 0, False), deal(batch, self.waves)
        )

    def encode(self, params: Params, frozen: Params, taken: Batch, m: Any) -> Any:
        """Tower: the features of wave ``m``."""
        gathered = self.place.tower.gathered
        both = {**gathered(params), **gathered(frozen)}
        return encode(self.encoder, both, self._wave(taken, m), self.group)

    def begin(
        self, params: Params, frozen: Params, batch: Batch, features: Any
    ) -> tuple[Any, tuple[Sums, Params]]:
        """Rest: the terms' scales, and zeros to add to; reads shapes alone but for the batch's.

        Raises:
            ConfigError: microbatches that would change the gradient, or do not divide the batch.
        """
        check_parts(self.waves * self.group, self.loss, batch.tokens.shape[0])
        scale, m = scales(self.loss, batch), jnp.int32(0)
        sums, (grads, _) = jax.eval_shape(self._grads, params, frozen, batch, m, scale, features)
        sums, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sums, grads))
        return scale, (sums, self.sums.rest(grads))

    def _grads(
        self, params: Params, frozen: Params, batch: Batch, m: Any, scale: Any, features: Any
    ) -> tuple[Sums, tuple[Params, Any]]:
        gathered = self.place.rest.gathered
        params, part = gathered(params), self._wave(batch, m)
        if features is not None:
            params = {**params, FEATURES: jax.lax.with_sharding_constraint(features, self.rows)}
        sums, grads = self.runner.loss_grad(params, gathered(frozen), part, self.loss, scale)
        back = grads.pop(FEATURES, None)
        return sums, (grads, back)

    def gradients(
        self,
        params: Params,
        frozen: Params,
        batch: Batch,
        m: Any,
        scale: Any,
        carry: tuple[Sums, Params],
        features: Any,
    ) -> tuple[tuple[Sums, Params], Any]:
        """Rest: sums and gradients with those of wave ``m``, and its features' gradient."""
        sums, (grads, back) = self._grads(params, frozen, batch, m, scale, features)
        sums, grads = jax.tree.map(jnp.add, carry, (sums, self.sums.rest(grads)))
        return (sums, self.sums.rest(grads)), back

    def zeros(self, params: Params) -> Params:
        """Tower: zeros to add gradients to."""
        return self.sums.tower({p: jnp.zeros(x.shape, x.dtype) for p, x in params.items()})

    def backward(
        self, params: Params, frozen: Params, taken: Batch, m: Any, back: Any, grads: Params
    ) -> Params:
        """Tower: ``grads`` with those of wave ``m``, by its features' gradient ``back``.

        It encodes again: what a backward pass needs would else be kept of each microbatch.
        """
        # Gathered before: where that rounds to bytes, gradients are those of the rounded weights.
        gathered, wave = self.place.tower.gathered, self._wave(taken, m)
        own, still = gathered(params), gathered(frozen)

        def add(grads: Params, part: Any) -> tuple[Params, None]:
            rows, d_features = part
            _, pull = jax.vjp(lambda p: self.encoder({**p, **still}, rows), own)
            more = self.sums.tower(pull(d_features)[0])
            return self.sums.tower(jax.tree.map(jnp.add, grads, more)), None

        if self.group == 1:
            return add(grads, (wave, back))[0]
        return jax.lax.scan(add, grads, deal((wave, back), self.group))[0]

    def squares(self, grads: Params) -> Any:
        """Tower: squared norms of its gradients."""
        return squares(self.place.tower.update(grads))

    def norms(self, scale: Any, carry: tuple[Sums, Params]) -> tuple[Any, Any]:
        """Rest: the loss, and squared norms of its gradients."""
        return total(carry[0], scale), squares(self.place.rest.update(carry[1]))

    def update(
        self, params: Params, opt_state: Any, grads: Params, value: Any, norms: Any, own: Any
    ) -> tuple[Params, Any]:
        """Tower: parameters and moments after the step. The rest's norms come before its own."""
        place: Placement = self.place.tower
        verdict = judge(value, jnp.concatenate([norms, own]))
        return update(verdict, params, opt_state, place.update(grads), self.tx, place)

    def finish(
        self,
        state: TrainState,
        batch: Batch,
        scale: Any,
        carry: tuple[Sums, Params],
        value: Any,
        norms: Any,
        theirs: Any,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Rest: its state after the step, and the metrics."""
        place: Placement = self.place.rest
        sums, grads = carry
        verdict = judge(value, jnp.concatenate([norms, theirs]))
        changed = update(
            verdict, state.params, state.opt_state, place.update(grads), self.tx, place
        )
        new = finish(state, verdict, *changed, state.comm)
        return new, report(new, verdict, sums, scale, batch)
