"""Moves arrays between two meshes whose devices belong to the same processes.

Between processes JAX moves arrays from one set of devices to another on some platforms only. Here
each process moves its own parts, from its devices on one mesh to its devices on the other, so
nothing leaves a process; arrays are brought into parts that allow it on the mesh they come from.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxvlm.config import ConfigError


def of_processes(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each process, in the order of the processes."""
    found: dict[int, list[Any]] = {}
    for device in devices:
        found.setdefault(device.process_index, []).append(device)
    return [found[process] for process in sorted(found)]


def move(tree: Any, sharding: Any) -> Any:
    """Copy arrays to a sharding of another mesh, or of their own.

    Args:
        tree: of arrays.
        sharding: of all of them.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _move(x, sharding), tree)


def _move(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if x.sharding.device_set == sharding.device_set:
        return _resharded(sharding)(x)
    if not _is_local(x.sharding, sharding, x.shape):
        assert isinstance(x.sharding, NamedSharding)
        x = _resharded(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    here = {_key(part.index, x.shape): part.data for part in x.addressable_shards}
    whole = here.get(_key((slice(None),) * x.ndim, x.shape))
    parts = []
    for device, index in sharding.addressable_devices_indices_map(x.shape).items():
        assert index is not None
        part = here.get(_key(index, x.shape))
        if part is None:
            assert whole is not None
            part = whole[index]
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


@functools.cache
def _resharded(sharding: Any) -> Any:
    """The program that brings an array into other parts on its own mesh."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def _key(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def _is_local(source: Any, target: Any, shape: Sequence[int]) -> bool:
    """Whether every process has, on the source's devices, what its devices on the target take.

    All processes come to the same answer: by it they run a program together, or none does.
    """
    had, wants = _parts(source, shape), _parts(target, shape)
    return all(parts <= had.get(process, set()) for process, parts in wants.items())


def _parts(sharding: Any, shape: Sequence[int]) -> dict[int, set[Any]]:
    """Process -> the parts of an array that its devices hold."""
    found: dict[int, set[Any]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        found.setdefault(device.process_index, set()).add(_key(index, shape))
    return found


def check_same_rows(ours: Any, theirs: Any, batch_size: int, where: str) -> None:
    """Refuse meshes on which a process has not the same sequences of a batch; all refuse alike.

    Args:
        ours: sharding of a batch on the mesh of the decoder.
        theirs: on the mesh of the encoder.
        batch_size: sequences of a batch.
        where: the setting, for the message.

    Raises:
        ConfigError: the first process that has others.
    """
    rows = [
        {p: {i for part in parts for i in range(*part[0])} for p, parts in found.items()}
        for found in (_parts(ours, (batch_size,)), _parts(theirs, (batch_size,)))
    ]
    for process in sorted(rows[0]):
        mine, others = sorted(rows[0][process]), sorted(rows[1].get(process, ()))
        if mine != others:
            raise ConfigError(
                f"{where}: process {process} would have sequences {_span(mine)} of a batch on the "
                f"decoder's mesh and {_span(others)} on the encoder's, and features do not move "
                "between processes; let data be the outermost axis over processes on both meshes, "
                "and a multiple of their number"
            )


def _span(rows: Sequence[int]) -> str:
    return f"{rows[0]} to {rows[-1]}" if rows else "none"
