"""Parallelism presets (ddp, zero1, fsdp, ...): the mesh, and what is sharded over its axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxvlm.config import (
    GRAD_REDUCE_BITS,
    PARAM_GATHER_DTYPES,
    ConfigError,
    MeshConfig,
    StrategyConfig,
    check_choice,
)
from jaxvlm.parallel.grad_reduce import ORDER
from jaxvlm.parallel.mesh import num_hosts, resolved
from jaxvlm.parallel.pipeline.schedule import SCHEDULES

CONTEXTS = ("gather", "ring", "ulysses")
# fsdp first: a shard over both axes is then a piece of an fsdp shard, so that an all-gather over
# data alone moves nothing else.
_ALL, _INNER, _NONE = ORDER, ("fsdp",), ()
_FIELDS = ("params", "all_gathered", "gradients", "optimizer")
_NOT_SET = MeshConfig()
_TWO_LEVELS = ("hybrid_shard", "hpz")


def resolve(
    strategy: StrategyConfig, mesh: MeshConfig, devices: Sequence[Any]
) -> tuple[MeshConfig, StrategyConfig]:
    """Resolve a preset and a mesh into explicit sizes and shardings.

    Args:
        strategy: a preset's name, or explicit fields without a name.
        mesh: sizes of axes; the preset's axis takes all devices that no other axis takes.
        devices: the run's devices, or abstract ones (``jaxvlm.planner``'s abstract devices).

    Returns:
        Both with the preset filled in; resolving them again changes nothing.

    Raises:
        ConfigError: an unknown name, fields or a mesh that contradict the preset, or shardings
            that contradict each other.
    """
    where = "config.strategy"
    if strategy.name:
        check_choice(f"{where}.name", strategy.name, PRESETS)
        preset = PRESETS[strategy.name]
        default = StrategyConfig()
        for field in _FIELDS:
            given, wanted = getattr(strategy, field), getattr(preset, field)
            if given not in (getattr(default, field), wanted):
                raise ConfigError(
                    f"{where}.{field}={given} contradicts {where}.name={strategy.name!r}, whose "
                    f"value is {wanted}; leave one of {where}.{field} and {where}.name out"
                )
        split = {field: getattr(preset, field) for field in _FIELDS}
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
    check_choice(f"{where}.param_gather_dtype", strategy.param_gather_dtype, PARAM_GATHER_DTYPES)
    if strategy.param_gather_dtype == "int8" and strategy.all_gathered == strategy.params:
        raise ConfigError(
            f"{where}.param_gather_dtype='int8' applies to the all-gather at the beginning of a "
            f"step, and there is none: all_gathered={strategy.all_gathered} equals params; 'hpz' "
            "and 'fsdp_no_reshard' have one"
        )
    _check_offload(strategy, devices, where)
    _check_reduce(strategy, mesh, where)
    _check_pipeline(strategy, mesh, where)
    if strategy.sequence_parallel and mesh.tensor == 1:
        raise ConfigError(f"{where}.sequence_parallel=True is not read with config.mesh.tensor=1")
    return mesh, strategy


def _check_offload(strategy: StrategyConfig, devices: Sequence[Any], where: str) -> None:
    if unknown := set(strategy.offload) - {"optimizer"}:
        raise ConfigError(
            f"{where}.offload names {unknown.pop()!r}; known: 'optimizer'; to offload "
            "activations, set config.model.decoder.remat='offload'"
        )
    if strategy.offload and devices[0].platform == "gpu":
        raise ConfigError(
            f"{where}.offload={strategy.offload}: on GPU, JAX cannot write to pinned host memory "
            "inside of a step; shard the moments further (name='zero1') or train adapters"
        )


def _check_reduce(strategy: StrategyConfig, mesh: MeshConfig, where: str) -> None:
    dtype = f"{where}.grad_reduce_dtype={strategy.grad_reduce_dtype!r}"
    check_choice(f"{where}.grad_reduce_dtype", strategy.grad_reduce_dtype, GRAD_REDUCE_BITS)
    if strategy.grad_reduce_dtype != "float32" and not any(getattr(mesh, a) > 1 for a in ORDER):
        raise ConfigError(
            f"{dtype} applies to gradients that are reduced over config.mesh.data or fsdp, which "
            "have size 1 here; leave it at 'float32'"
        )
    if strategy.error_feedback and not reduced_axes(strategy, mesh):
        raise ConfigError(
            f"{where}.error_feedback=True needs gradients that are reduced after the backward "
            f"pass, and here all are reduced layer by layer: all_gathered={strategy.all_gathered}; "
            "'ddp', 'zero1', 'zero2', 'fsdp_no_reshard', and 'hybrid_shard' and 'hpz' over data, "
            "have some"
        )
    if strategy.error_feedback and strategy.grad_reduce_dtype == "float32":
        raise ConfigError(
            f"{where}.error_feedback=True is not read with grad_reduce_dtype='float32'"
        )


def reduced_axes(strategy: StrategyConfig, mesh: MeshConfig) -> tuple[str, ...]:
    """Return the batch axes that gradients are all-reduced over after the backward pass."""
    return tuple(a for a in ORDER if getattr(mesh, a) > 1 and a not in strategy.all_gathered)


def _check_choice(
    field: str, value: str, known: tuple[str, ...], axis: str, mesh: MeshConfig
) -> None:
    """Refuse an unknown value, and a non-default one where the mesh axis has size 1."""
    check_choice(field, value, known)
    if value != known[0] and getattr(mesh, axis) == 1:
        raise ConfigError(f"{field}={value!r} is not read with config.mesh.{axis}=1")


def _check_pipeline(strategy: StrategyConfig, mesh: MeshConfig, where: str) -> None:
    _check_choice(f"{where}.schedule", strategy.schedule, SCHEDULES, "pipeline", mesh)
    is_interleaved = strategy.schedule == "interleaved"
    if (strategy.virtual_stages > 1) != is_interleaved or strategy.virtual_stages < 1:
        raise ConfigError(
            f"{where}.virtual_stages={strategy.virtual_stages} with "
            f"schedule={strategy.schedule!r}: 'interleaved' takes 2 or more, the others 1"
        )


def _check_used(strategy: StrategyConfig, mesh: MeshConfig) -> None:
    """Refuse a mesh on which a preset would shard nothing over the axis that defines it."""
    needs: tuple[str, ...] = ("fsdp", "data") if strategy.name in _TWO_LEVELS else ("fsdp",)
    if strategy.name in ("", "single", "ddp"):
        needs = ()
    for axis in needs:
        if getattr(mesh, axis) == 1:
            raise ConfigError(
                f"config.strategy.name={strategy.name!r} shards over config.mesh.{axis}, which has "
                f"size 1 here: {mesh}"
                + ("; there is one host, so set config.mesh.data" if axis == "data" else "")
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
    for inner, outer in (("all_gathered", "params"), ("params", "optimizer")):
        if extra := set(getattr(strategy, inner)) - set(getattr(strategy, outer)):
            raise ConfigError(
                f"{where}.{inner}={getattr(strategy, inner)} is split over {extra.pop()!r}, which "
                f"{where}.{outer}={getattr(strategy, outer)} does not contain; add it there, or "
                "remove it here"
            )


def _single(mesh: MeshConfig, _devices: Sequence[Any]) -> MeshConfig:
    one = MeshConfig(data=1)
    if mesh not in (_NOT_SET, one):
        raise ConfigError(f"config.strategy.name='single' takes one device, not {mesh}")
    if jax.process_count() > 1:
        raise ConfigError("config.strategy.name='single' takes one process; start only one")
    return one


def _data(mesh: MeshConfig, _devices: Sequence[Any]) -> MeshConfig:
    if mesh.fsdp != 1:
        raise ConfigError(
            f"config.mesh.fsdp={mesh.fsdp}: config.strategy.name='ddp' shards nothing over fsdp; "
            "put its devices on config.mesh.data"
        )
    return mesh


def _fsdp(mesh: MeshConfig, _devices: Sequence[Any]) -> MeshConfig:
    """Put all devices that no other axis takes on ``fsdp``."""
    if mesh.data == -1 and mesh.fsdp == 1:
        mesh = dataclasses.replace(mesh, data=1)
    free = -1 not in dataclasses.astuple(mesh) and mesh.fsdp == 1
    return dataclasses.replace(mesh, fsdp=-1) if free else mesh


def _hybrid(mesh: MeshConfig, devices: Sequence[Any]) -> MeshConfig:
    """Put ``data`` over hosts or slices unless the mesh sets it, and ``fsdp`` inside each."""
    if mesh.data == -1 and mesh.fsdp == 1:
        mesh = dataclasses.replace(mesh, data=max(1, num_hosts(devices) // max(1, mesh.island)))
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
"""Name -> which mesh axes each part of the state is sharded over. Sources: ZeRO, arXiv 1910.02054;
FSDP, arXiv 2304.11277; hpZ of ZeRO++, arXiv 2306.10209."""
_MESHES: dict[str, Callable[[MeshConfig, Sequence[Any]], MeshConfig]] = {
    "single": _single,
    "ddp": _data,
    **dict.fromkeys(_TWO_LEVELS, _hybrid),
}
