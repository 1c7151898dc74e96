"""Shardings of parameter and state trees, and global arrays from each process's local batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvlm.config import ConfigError
from jaxvlm.parallel.mesh import BATCH_AXES, batch_shards
from jaxvlm.types import Batch, Pairs, Params

Rows = TypeVar("Rows", Batch, Pairs)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of every field of a Batch: the leading dim over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Return the indices into the global batch that this process's devices hold.

    Args:
        mesh: the device mesh.
        batch_size: packed sequences (or pairs) of the global batch.

    Returns:
        i64[local batch], ascending.

    Raises:
        ConfigError: ``batch_size`` is not divisible by the product of the mesh's batch axes.
    """
    shards = batch_shards(mesh)
    if batch_size % shards:
        raise ConfigError(
            f"config.data.batch_size={batch_size} is not divisible by the {shards} shards of "
            f"mesh axes {'×'.join(BATCH_AXES)}; set it to {_near(batch_size, shards)}"
        )
    index = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    parts = [where[0] for where in index.values() if where is not None]
    rows = {row for part in parts for row in range(*part.indices(batch_size))}
    return np.asarray(sorted(rows))


def _near(size: int, parts: int) -> str:
    """Format the multiples of ``parts`` next to ``size``."""
    below = size // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)


def to_global(mesh: Mesh, local: Rows, batch_size: int) -> Rows:
    """Build the global batch from each process's local part of it.

    Args:
        mesh: the device mesh.
        local: numpy fields; the sequences of :func:`local_rows`, in order.
        batch_size: packed sequences (or pairs) of the global batch.

    Returns:
        The batch with global ``jax.Array``s as fields.
    """
    sharding = batch_sharding(mesh)

    def place(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, x, (batch_size, *x.shape[1:]))

    return jax.tree.map(place, local)


def follow(tree: Any, like: dict[str, NamedSharding], mesh: Mesh) -> Any:
    """Return shardings of an optimizer state: moments get the sharding given for their parameter.

    ``jax.jit(tx.init)`` alone would replicate the moments, so their shardings are explicit.

    Args:
        tree: the state as ShapeDtypeStructs (``jax.eval_shape(tx.init, params)``).
        like: parameter path -> sharding.
        mesh: the mesh on which all other leaves are replicated.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        key = path[-1].key if path and isinstance(path[-1], jax.tree_util.DictKey) else None
        return like[key] if leaf.ndim and key in like else replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, tree)


def constrain(shardings: Mapping[str, NamedSharding]) -> Callable[[Params], Params]:
    """Return a function that constrains parameters, or their gradients, to ``shardings``.

    Args:
        shardings: sharding by parameter path; may have more paths than the function is given.
    """

    def one(path: str, x: jax.Array) -> jax.Array:
        return x if shardings[path].mesh.size == 1 else pinned(x, shardings[path])

    return lambda tree: {path: one(path, x) for path, x in tree.items()}


def pinned(x: jax.Array, wanted: NamedSharding) -> jax.Array:
    """Constrain ``x`` to a sharding; inside of a ``shard_map``, on the axes that are not manual."""
    around = jax.sharding.get_abstract_mesh()
    if not around.empty:
        left = [without_axes(place, around.manual_axes) for place in wanted.spec]
        wanted = NamedSharding(around, PartitionSpec(*left))
    return jax.lax.with_sharding_constraint(x, wanted)


def mesh_axes(place: Any) -> tuple[str, ...]:
    """Return the mesh axes of one dim of a ``PartitionSpec``."""
    if place is None:
        return ()
    return (place,) if isinstance(place, str) else tuple(place)


def without_axes(place: Any, axes: Collection[str]) -> Any:
    """Return one dim of a ``PartitionSpec`` without these mesh axes."""
    return tuple(a for a in mesh_axes(place) if a not in axes) or None


HOST = "pinned_host"
"""JAX's memory kind of host memory that a device can read (host offload)."""


def to_device(tree: Any) -> Any:
    """Copy leaves in host memory to device memory; to be called inside of ``jit``."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def owned_rows(x: jax.Array, copies: bool = False) -> dict[int, np.ndarray]:
    """Return the examples of a global array that this process owns; each has exactly one owner.

    Args:
        x: [B, ...] with the batch's sharding; replicas other than the first are skipped.
        copies: whether examples that this process holds as a replica are returned too.

    Returns:
        Global index in the batch -> numpy array of that example.
    """
    rows: dict[int, np.ndarray] = {}
    for part in x.addressable_shards:
        if copies or part.replica_id == 0:
            first = part.index[0].start or 0
            rows.update({first + i: row for i, row in enumerate(np.asarray(part.data))})
    return rows


def sum_over_processes(x: np.ndarray) -> np.ndarray:
    """All-reduce over processes: the sum of each process's ``x`` f64[n], on every process."""
    if jax.process_count() == 1:
        return x
    from jax.experimental import multihost_utils

    # Two float32 parts carry a float64's counts exactly up to 2**48.
    high = x.astype(np.float32)
    halves = np.stack([high, (x - high).astype(np.float32)])
    return np.asarray(multihost_utils.process_allgather(halves), np.float64).sum(axis=(0, 1))


def max_over_processes(number: int) -> int:
    """Return the largest of the processes' numbers, on every process."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.asarray(number))))
