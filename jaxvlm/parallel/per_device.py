"""Run a kernel that the compiler cannot partition on each device's shard (``shard_map``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxvlm.parallel.mesh import mesh_here
from jaxvlm.parallel.rules import Axes
from jaxvlm.types import Logical


def per_device(
    fn: Callable[..., jax.Array],
    axes: Axes,
    args: Sequence[tuple[Any, Logical]],
    out: tuple[tuple[int, ...], Logical],
    summed: str = "",
) -> jax.Array:
    """Run ``fn`` on each device's shards of its arguments.

    Args:
        fn: takes as many arrays (or None) as ``args``; returns one.
        axes: the submodel's mesh and activation rules.
        args: pairs of an array (or None) and its logical axes.
        out: the global shape of the result and its logical axes.
        summed: logical axis of a dim that ``fn`` contracts: where it is split, results are
            all-reduced.

    Returns:
        The global result.
    """
    if axes.mesh.size == 1:
        return fn(*(x for x, _ in args))
    specs = tuple(None if x is None else axes.activation(words, x.shape).spec for x, words in args)
    out_spec = axes.activation(out[1], out[0]).spec
    places = axes.mesh_axes(summed) if summed else ()

    def part(*parts: Any) -> jax.Array:
        y = fn(*parts)
        return jax.lax.psum(y, places) if places else y

    run = jax.shard_map(
        part, in_specs=specs, out_specs=out_spec, check_vma=False, **free_axes(axes.mesh)
    )
    return run(*(x for x, _ in args))


def free_axes(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return ``mesh`` and ``axis_names`` for a ``shard_map`` over all axes that are not manual."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return {"mesh": mesh_here(mesh), "axis_names": set(mesh.axis_names) - set(manual)}
