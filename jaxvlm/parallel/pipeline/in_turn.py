"""Runs a stack's layers on the stages of a pipeline in turn, each where its parameters are.

For forward passes that no microbatches overlap: while tokens are generated, the next token can't
enter the first stage before the last one has left the last stage. What a layer reads and writes
(parameters, KV cache) stays on its stage; what passes through the layers is sent from stage to
stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxvlm.parallel.mesh import mesh_here
from jaxvlm.parallel.pipeline import buffers
from jaxvlm.parallel.pipeline.forward import AXIS, broadcast, skips

Scan = Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]


def in_turn(
    scan: Scan, mesh: Mesh, x: Any, held: Any, xs: Any, own: Any = None
) -> tuple[Any, Any, Any]:
    """Run the layers of all stages, each on its stage.

    Where a stage is sharded further, idle stages compute along (see
    :func:`~jaxvlm.parallel.pipeline.forward.skips`): what they make of values that have not arrived
    yet, they make again, and what they hold is written again.

    Args:
        scan: runs a stage's layers: maps what enters the first of them, ``held``, ``xs`` of these
            layers and ``own`` of the stage to what leaves the last, ``held`` as updated, and a tree
            with a leading dim of layers. Run twice, it leaves what it leaves when run once.
        mesh: a mesh whose axis ``pipeline`` has S stages.
        x: what enters the first layer.
        held: what the layers update in place, with leading dim L, which S divides.
        xs: what the layers read, with leading dim L.
        own: what a stage's layers share, with leading dim S.

    Returns:
        What leaves the last layer, on all stages; ``held``, and what the layers give, on their
        stages.
    """
    stages, skip = mesh.shape[AXIS], skips(mesh)
    ring = [(s, (s + 1) % stages) for s in range(stages)]

    def part(x: Any, held: Any, xs: Any, own: Any) -> tuple[Any, Any, Any]:
        stage, own = jax.lax.axis_index(AXIS), jax.tree.map(lambda a: a[0], own)
        shapes = jax.eval_shape(scan, x, held, xs, own)[2]

        def tick(turn: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            arrived, held, ys = carry
            entry = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), x, arrived)

            def work() -> tuple[Any, Any, Any]:
                return scan(entry, held, xs, own)

            def idle() -> tuple[Any, Any, Any]:
                return entry, held, ys

            left, held, ys = jax.lax.cond(turn == stage, work, idle) if skip else work()
            return jax.tree.map(lambda a: jax.lax.ppermute(a, AXIS, ring), left), held, ys

        x, held, ys = jax.lax.fori_loop(0, stages, tick, (x, held, buffers.zeros(shapes)))
        return broadcast(mesh, stage == 0, x), held, ys  # the last stage has sent it to the first

    return jax.shard_map(
        part,
        mesh=mesh_here(mesh),
        in_specs=(P(), P(AXIS), P(AXIS), P(AXIS)),
        out_specs=(P(), P(AXIS), P(AXIS)),
        axis_names={AXIS},
        check_vma=False,
    )(x, held, xs, own)
