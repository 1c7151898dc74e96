"""Run a function on each island of a mesh by itself (``shard_map`` over the axis ``island``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvlm.parallel.mesh import ISLAND, on_island


def on_islands(
    fn: Callable[..., Any], mesh: Mesh, args: Sequence[bool], out: Sequence[bool]
) -> Callable[..., Any]:
    """Run ``fn`` on each island. Inside, the other mesh axes are the compiler's as ever.

    Args:
        fn: of one island; what it returns that is not split must be equal on all islands.
        mesh: of all islands.
        args: for each argument, whether the first dim of its leaves is split over islands.
        out: the same for each result.
    """

    def specs(split: Sequence[bool]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(ISLAND) if own else PartitionSpec() for own in split)

    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=specs(args),
        out_specs=specs(out),
        axis_names={ISLAND},
        check_vma=False,
    )


def each_island(where: NamedSharding) -> NamedSharding:
    """Return the sharding of a leaf with a leading dim of islands, from that of one island's."""
    return NamedSharding(where.mesh, PartitionSpec(ISLAND, *where.spec))


def first_row(rows: int) -> Any:
    """Return the index in the global batch of the first of an island's ``rows`` rows; 0 where there
    is no island, i32[]."""
    return jax.lax.axis_index(ISLAND) * rows if on_island() else 0
