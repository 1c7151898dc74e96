"""Strategies by the names that users know: which mesh, and what lies split over its axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxvlm.config import ConfigError, MeshConfig, StrategyConfig
from jaxvlm.parallel.mesh import num_hosts, resolved
from jaxvlm.parallel.reduce import BITS, ORDER
from jaxvlm.parallel.schedule import SCHEDULES

CONTEXTS = ("gather", "ring", "ulysses")
# fsdp first: a shard of both is a piece of a shard of fsdp, so that gathering over data alone
# moves nothing else.
_ALL, _INNER, _NONE = ORDER, ("fsdp",), ()
_FIELDS = ("params", "gathered", "gradients", "optimizer")
_NOT_SET = MeshConfig()
_TWO_LEVELS = ("hybrid_shard", "hpz")


def resolve(
    strategy: StrategyConfig, mesh: MeshConfig, devices: Sequence[Any]
) -> tuple[MeshConfig, StrategyConfig]:
    """The mesh and the split that settings ask for.

    Args:
        strategy: a preset's name, or fields of one's own.
        mesh: the preset's axis takes all devices that the mesh does not give to others.
        devices: of the run, or what stands for them (``plan.absent``).

    Returns:
        Both with the preset filled in; resolving them again changes nothing.

    Raises:
        ConfigError: an unknown name, fields or a mesh that contradict it, or a split that is none.
    """
    where = "config.strategy"
    if strategy.name:
        if strategy.name not in PRESETS:
            known = ", ".join(PRESETS)
            raise ConfigError(f"{where}.name={strategy.name!r}; known: {known}")
        made = PRESETS[strategy.name]
        default = StrategyConfig()
        for field in _FIELDS:
            given, wanted = getattr(strategy, field), getattr(made, field)
            if given not in (getattr(default, field), wanted):
                raise ConfigError(
                    f"{where}.{field}={given} is not {strategy.name}, which has {wanted}; leave "
                    f"one of {where}.{field} and {where}.name out"
                )
        split = {field: getattr(made, field) for field in _FIELDS}
        strategy = dataclasses.replace(strategy, **split)
        mesh = _MESHES.get(strategy.name, _fsdp)(mesh, devices)
    alone = strategy.name == "single"
    mesh = resolved(mesh, 1 if alone else len(devices))
    if len(devices) > 1:
        _check_used(strategy, mesh)
    in_order: dict[str, Any] = {
        field: tuple(sorted(getattr(strategy, field), key=_ALL.index))
        for field in _FIELDS
        if set(getattr(strategy, field)) <= set(_ALL)
    }
    strategy = dataclasses.replace(strategy, **in_order)
    _check(strategy, where)
    _check_choice(f"{where}.context", strategy.context, CONTEXTS, "context", mesh)
    if strategy.gather_bits not in (8, 32):
        raise ConfigError(f"{where}.gather_bits={strategy.gather_bits}; known: 8, 32")
    if strategy.gather_bits == 8 and strategy.gathered == strategy.params:
        raise ConfigError(
            f"{where}.gather_bits=8 is of the gather at a step's begin, and there is none: "
            f"gathered={strategy.gathered} is params; 'hpz' and 'fsdp_no_reshard' have one"
        )
    _check_offload(strategy, devices, where)
    _check_reduce(strategy, mesh, where)
    _check_pipeline(strategy, mesh, where)
    if strategy.sequence and mesh.tensor == 1:
        raise ConfigError(f"{where}.sequence=True is not read with config.mesh.tensor=1")
    return mesh, strategy


def _check_offload(strategy: StrategyConfig, devices: Sequence[Any], where: str) -> None:
    if unknown := set(strategy.offload) - {"optimizer"}:
        raise ConfigError(
            f"{where}.offload names {unknown.pop()!r}; known: 'optimizer'. Activations are "
            "offloaded by config.model.decoder.remat='offload'"
        )
    if strategy.offload and devices[0].platform == "gpu":
        raise ConfigError(
            f"{where}.offload={strategy.offload}: on GPU, JAX cannot write to pinned host memory "
            "inside of a step; split the moments further (name='zero1') or train adapters"
        )


def _check_reduce(strategy: StrategyConfig, mesh: MeshConfig, where: str) -> None:
    bits = f"{where}.reduce_bits={strategy.reduce_bits}"
    if strategy.reduce_bits not in BITS:
        raise ConfigError(f"{bits}; known: {', '.join(map(str, BITS))}")
    if strategy.reduce_bits < 32 and not reduced_axes(strategy, mesh):
        raise ConfigError(
            f"{bits} is of gradients that are added up when a step's backward pass is done, and "
            f"here all are added layer by layer: gathered={strategy.gathered}; 'ddp', 'zero1', "
            "'zero2', 'fsdp_no_reshard', and 'hybrid_shard' and 'hpz' over data, have some"
        )
    if strategy.error_feedback and strategy.reduce_bits == 32:
        raise ConfigError(f"{where}.error_feedback=True is not read with reduce_bits=32")


def reduced_axes(strategy: StrategyConfig, mesh: MeshConfig) -> tuple[str, ...]:
    """Batch axes that a step's gradients are added over behind its backward pass."""
    return tuple(a for a in ORDER if getattr(mesh, a) > 1 and a not in strategy.gathered)


def _check_choice(
    field: str, value: str, known: tuple[str, ...], axis: str, mesh: MeshConfig
) -> None:
    """Refuse what is not known, and a choice where the mesh has no such axis."""
    if value not in known:
        raise ConfigError(f"{field}={value!r}; known: {', '.join(known)}")
    if value != known[0] and getattr(mesh, axis) == 1:
        raise ConfigError(f"{field}={value!r} is not read with config.mesh.{axis}=1")


def _check_pipeline(strategy: StrategyConfig, mesh: MeshConfig, where: str) -> None:
    _check_choice(f"{where}.schedule", strategy.schedule, SCHEDULES, "stage", mesh)
    if (strategy.chunks > 1) != (strategy.schedule == "interleaved") or strategy.chunks < 1:
        raise ConfigError(
            f"{where}.chunks={strategy.chunks} with schedule={strategy.schedule!r}: 'interleaved' "
            "takes 2 or more, the others 1"
        )


def _check_used(strategy: StrategyConfig, mesh: MeshConfig) -> None:
    """Refuse a mesh on which a preset would not be what it is called."""
    needs: tuple[str, ...] = ("fsdp", "data") if strategy.name in _TWO_LEVELS else ("fsdp",)
    if strategy.name in ("", "single", "ddp"):
        needs = ()
    for axis in needs:
        if getattr(mesh, axis) == 1:
            raise ConfigError(
                f"config.strategy.name={strategy.name!r} is about config.mesh.{axis}, which has "
                f"one device here: {mesh}"
                + ("; there is one host, so say how many groups" if axis == "data" else "")
            )


def _check(strategy: StrategyConfig, where: str) -> None:
    for field in _FIELDS:
        value = getattr(strategy, field)
        if unknown := [axis for axis in value if axis not in _ALL]:
            raise ConfigError(
                f"{where}.{field}={value}: {unknown[0]!r} is none of {', '.join(_ALL)}"
            )
        if len(set(value)) < len(value):
            raise ConfigError(f"{where}.{field}={value} names an axis twice")
    for inner, outer in (("gathered", "params"), ("params", "optimizer")):
        if extra := set(getattr(strategy, inner)) - set(getattr(strategy, outer)):
            raise ConfigError(
                f"{where}.{inner}={getattr(strategy, inner)} is split over {extra.pop()!r}, which "
                f"{where}.{outer}={getattr(strategy, outer)} is not"
            )


def _single(mesh: MeshConfig, _devices: Sequence[Any]) -> MeshConfig:
    one = MeshConfig(data=1)
    if mesh not in (_NOT_SET, one):
        raise ConfigError(f"config.strategy.name='single' takes one device, not {mesh}")
    if jax.process_count() > 1:
        raise ConfigError("config.strategy.name='single' takes one process: start one")
    return one


def _data(mesh: MeshConfig, _devices: Sequence[Any]) -> MeshConfig:
    if mesh.fsdp != 1:
        raise ConfigError(
            f"config.mesh.fsdp={mesh.fsdp}: config.strategy.name='ddp' splits nothing over fsdp; "
            "its devices lie on config.mesh.data"
        )
    return mesh


def _fsdp(mesh: MeshConfig, _devices: Sequence[Any]) -> MeshConfig:
    """All devices that the mesh gives to no axis on ``fsdp``."""
    if mesh.data == -1 and mesh.fsdp == 1:
        mesh = dataclasses.replace(mesh, data=1)
    free = -1 not in dataclasses.astuple(mesh) and mesh.fsdp == 1
    return dataclasses.replace(mesh, fsdp=-1) if free else mesh


def _hybrid(mesh: MeshConfig, devices: Sequence[Any]) -> MeshConfig:
    """``data`` over hosts or slices unless the mesh says how many, ``fsdp`` inside each."""
    if mesh.data == -1 and mesh.fsdp == 1:
        mesh = dataclasses.replace(mesh, data=num_hosts(devices))
    return _fsdp(mesh, devices)


PRESETS: dict[str, StrategyConfig] = {
    "single": StrategyConfig("", _NONE, _NONE, _NONE, _NONE),
    "ddp": StrategyConfig("", _NONE, _NONE, _NONE, _NONE),
    "zero1": StrategyConfig("", _NONE, _NONE, _NONE, _INNER),
    "zero2": StrategyConfig("", _NONE, _NONE, _INNER, _INNER),
    "zero3": StrategyConfig("", _INNER, _INNER, _INNER, _INNER),
    "fsdp": StrategyConfig("", _INNER, _INNER, _INNER, _INNER),
    "fsdp_no_reshard": StrategyConfig("", _INNER, _NONE, _INNER, _INNER),
    "hybrid_shard": StrategyConfig("", _INNER, _INNER, _INNER, _INNER),
    "hpz": StrategyConfig("", _ALL, _INNER, _ALL, _ALL),
}
"""Name -> what is split over which mesh axes. Sources: ZeRO, arXiv 1910.02054; FSDP, arXiv
2304.11277; hpZ of ZeRO++, arXiv 2306.10209."""
_MESHES: dict[str, Callable[[MeshConfig, Sequence[Any]], MeshConfig]] = {
    "single": _single,
    "ddp": _data,
    **dict.fromkeys(_TWO_LEVELS, _hybrid),
}
