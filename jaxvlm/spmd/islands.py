"""Islands of a model's mesh: the layout of their state, and the programs of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import GRAD_REDUCE_BITS, OuterConfig, check_choice
from jaxvlm.parallel.grad_reduce import GradReduction
from jaxvlm.parallel.islands import each_island
from jaxvlm.parallel.mesh import ISLAND
from jaxvlm.parallel.sharding import follow, replicated
from jaxvlm.spmd.model import Model
from jaxvlm.train.islands import (
    Islands,
    OuterReport,
    OuterUpdate,
    init_islands,
    make_outer_update,
    over_islands,
)
from jaxvlm.train.program_memory import memory
from jaxvlm.types import Params, TrainState

Init = Callable[[Params, Params], TrainState]


def outer_of(model: Model, config: OuterConfig, trained: Collection[str]) -> OuterUpdate:
    """Return the outer update of a model's islands.

    Args:
        model: on a mesh with islands.
        config: of outer updates.
        trained: paths of the trained parameters.

    Raises:
        ConfigError: a setting that can't be used.
    """
    check_choice("config.outer.delta_dtype", config.delta_dtype, GRAD_REDUCE_BITS)
    bits = GRAD_REDUCE_BITS[config.delta_dtype]
    feedback = config.error_feedback and bits < 32
    reduction = GradReduction(model.mesh, (ISLAND,), model.shardings, bits, feedback)
    return make_outer_update(config, reduction, {p: model.shapes[p] for p in trained})


def state_of_islands(
    model: Model, outer: OuterUpdate, one: TrainState, init: Init
) -> tuple[TrainState, Init]:
    """Return the state of islands; see :func:`jaxvlm.spmd.train_step.state_of`.

    Args:
        model: on a mesh with islands.
        outer: the outer update.
        one: the state without islands, as ShapeDtypeStructs with shardings.
        init: makes it.
    """
    mesh = model.mesh

    def first(params: Params, frozen: Params) -> TrainState:
        return init_islands(init(params, frozen), outer, mesh.shape[ISLAND])

    shapes = jax.eval_shape(first, one.params, one.frozen)
    inside = jax.tree.map(lambda x: each_island(x.sharding), one)
    shardings = jax.tree.map(lambda x: x.sharding, one)._replace(
        opt_state=follow(shapes.opt_state, model.shardings, mesh),
        comm={path: outer.reduction.where(path) for path in shapes.comm},
        islands=Islands(
            inside.params, inside.opt_state, inside.comm, inside.guard,
            each_island(replicated(mesh)),
        ),
    )  # fmt: skip
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    return abstract, jax.jit(first, out_shardings=shardings, donate_argnums=(0, 1))


class IslandProgram:
    """A compiled step of islands, and what makes scalars of its metrics, a program of its own: the
    step sends nothing from island to island, and this sends one number for each metric.

    Args:
        step: compiled ``(state, batch) -> (state, metrics of each island)``.
        mesh: of all islands.
    """

    def __init__(self, step: Any, mesh: jax.sharding.Mesh):
        self.step = step
        self._over_islands = jax.jit(over_islands, out_shardings=replicated(mesh))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take a step."""
        state, metrics = self.step(state, batch)
        return state, self._over_islands(metrics)

    def memory(self) -> dict[str, int]:
        """Bytes of the step on a device; see :func:`jaxvlm.train.program_memory.memory`."""
        return memory(self.step)


class OuterPrograms:
    """The compiled outer update of each fragment; all consume their state.

    Args:
        outer: the outer update.
        abstract: from :func:`state_of_islands`.
    """

    def __init__(self, outer: OuterUpdate, abstract: TrainState):
        self.abstract, self.late = abstract, outer.config.overlap_steps > 0
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        everywhere = replicated(abstract.step.sharding.mesh)
        numbers = range(len(outer.fragments))
        first = outer.send if self.late else outer.update
        self._update = [
            self._compiled(functools.partial(first, fragment=i), (shardings, everywhere))
            for i in numbers
        ]
        self._receive = [
            self._compiled(functools.partial(outer.receive, fragment=i), shardings, jnp.float32(0))
            for i in (numbers if self.late else ())
        ]

    def _compiled(self, fn: Callable[..., Any], out: Any, *args: Any) -> Any:
        run = jax.jit(lambda state, *args: fn(state, **dict(zip(("mixing",), args))),
                      donate_argnums=0, out_shardings=out)  # fmt: skip
        return run.lower(self.abstract, *args).compile()

    def update(self, state: TrainState, fragment: int) -> tuple[TrainState, OuterReport]:
        """Update a fragment's shared parameters, and without an overlap the islands' too."""
        return self._update[fragment](state)

    def receive(self, state: TrainState, fragment: int, mixing: float) -> TrainState:
        """Mix a fragment's shared parameters into the islands', where there is an overlap."""
        return self._receive[fragment](state, jnp.float32(mixing))

    def as_text(self, fragment: int = 0) -> str:
        """The compiled program of a fragment's update."""
        return self._update[fragment].as_text()
