"""Whether a run fits the machine that a job asks for, by the planner."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxvlm.config import Config, ConfigError
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.hardware import machine as machines
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.report.units import gib, seconds
from jaxvlm.planner.request import abstract_devices
from jaxvlm.planner.request.request import PlanRequest, plan_request, undivided
from jaxvlm.planner.search import candidates, search
from jaxvlm.planner.search.candidate_memory import Plan
from jaxvlm.spmd import disaggregated_encoder
from jaxvlm.trainer.auto_parallel import allowed
from jaxvlm.trainer.checks import auto_settings

_SIZES = (2, 4, 8, 16)
"""Factors by which more devices are tried."""


class Verdict(NamedTuple):
    """What the planner says of a run on a machine."""

    fits: bool | None
    """``None``: it can't be planned."""
    text: str
    """For people, one line."""
    step_seconds: float = 0.0
    """Of a step; 0: unknown."""


def check(config: Config, recipe: str, machine: Machine) -> Verdict:
    """Ask the planner for the run as its settings are; what they leave open (``auto``) it chooses.

    Args:
        config: settings of the run.
        recipe: its file.
        machine: of the job.

    Returns:
        The verdict; where the run does not fit, with the nearest that does: other settings, or
        more devices.

    Raises:
        ConfigError: the run's mesh does not go with the machine's devices.
    """
    devices, auto = _devices(machine), auto_settings(config)
    if not auto:
        resolve(config.strategy, config.mesh, devices)
    try:
        request = plan_request(recipe, config, machine)
    except ConfigError as error:
        return Verdict(None, f"not planned: {error}")
    try:
        among = allowed(request, config, auto, devices, lambda _: None)
    except ConfigError as error:
        if undivided(config, machine.devices):
            return Verdict(False, str(error))
        return Verdict(False, f"{error}; {_nearest(config, recipe, request, is_short=False)}")
    result = search.search(request, 1, among=among)
    memory = machine.chip.hbm_bytes
    if result.best:
        best = result.best[0]
        of = f" of {gib(memory)}" if memory else ""
        time = f", {seconds(best.time.total)} a step" if best.time.total else ""
        text = f"planned: it fits: {gib(best.peak)}{of} a device{time} ({best.candidate.text()})"
        return Verdict(True, text, best.time.total)
    need = f"it needs {gib(result.nearest.peak)} a device" if result.nearest else "no layout fits"
    return Verdict(
        False,
        f"{need}, and a device has {gib(memory)}; "
        + _nearest(config, recipe, request, is_short=True),
    )


class Sizes(NamedTuple):
    """With how many processes a run can go on."""

    allowed: tuple[int, ...]
    """Most first."""
    refused: dict[int, str]
    """Number of processes -> why not."""


def sizes(
    config: Config | None, recipe: str, machine: Machine, processes: int, least: int, plan: bool
) -> Sizes:
    """Find the numbers of processes with which a run can go on, once some are lost.

    Args:
        config: settings of the run; ``None`` for a command that does not train.
        recipe: its file.
        machine: of all processes.
        processes: of the job, each with as many devices.
        least: the fewest.
        plan: whether the planner is asked if the run fits; its mesh and batch always have to go
            with the devices.

    Raises:
        ConfigError: ``least`` is none of 1 to ``processes``, the job can't run with all, or it
            can't go on with fewer.
    """
    if not 1 <= least < processes:
        few = "there are no fewer" if processes == 1 else f"name 1 to {processes - 1}"
        raise ConfigError(f"--min_nodes={least}: the job has {processes}; {few}")
    if config is not None and config.mesh.island not in (0, 1):
        raise ConfigError(
            f"--min_nodes={least} with config.mesh.island={config.mesh.island}: each island has a "
            "state of its own, so the job waits for all of its nodes; leave --min_nodes out"
        )
    allowed_sizes, refused = [], {}
    for count in range(processes, least - 1, -1):
        try:
            if config is not None:
                _check_size(config, recipe, _part(machine, processes, count), count, plan)
            allowed_sizes.append(count)
        except ConfigError as error:
            if count == processes:
                raise
            refused[count] = str(error)
    if allowed_sizes == [processes]:
        why = "; ".join(f"with {count}: {text}" for count, text in refused.items())
        raise ConfigError(f"--min_nodes={least}: the job can't go on with fewer: {why}")
    return Sizes(tuple(allowed_sizes), refused)


def _part(machine: Machine, processes: int, count: int) -> Machine:
    """What is left of a machine with so many of its processes."""
    devices = machine.devices // processes * count
    if machine.hosts == 1:  # not what can be rented, but what is left
        return machine._replace(devices=devices, devices_per_host=devices)
    return machines.parse(f"{machine.name}:{devices}", machine.dtype)


def _check_size(config: Config, recipe: str, machine: Machine, count: int, plan: bool) -> None:
    """Refuse devices that the mesh, the encoder or the batch do not go with, or that are too small.

    Raises:
        ConfigError: the reason.
    """
    each = machine.devices // count
    if config.encoder.devices < 0:
        raise ConfigError("config.encoder.devices=-1 is known once the run starts; name them")
    _check_devices(config, abstract_devices.devices(machine.platform, machine.devices, each))
    if plan and (verdict := check(config, recipe, machine)).fits is False:
        raise ConfigError(verdict.text)


def _check_devices(config: Config, devices: list[Any]) -> None:
    """Refuse devices that the mesh, the encoder's devices or the batch do not go with.

    Raises:
        ConfigError: the reason.
    """
    if auto_settings(config) or config.encoder.devices < 0:
        return  # the planner, or the run itself, finds a mesh that does, or none
    if config.encoder.devices:
        devices = disaggregated_encoder.divide_devices(config.encoder, devices)[1]
    mesh = resolve(config.strategy, config.mesh, devices)[0]
    shards = math.prod(getattr(mesh, axis) for axis in BATCH_AXES)
    rows, parts = config.data.batch_size, config.microbatches
    if rows % (shards * parts):
        raise ConfigError(
            f"config.data.batch_size={rows} is no multiple of {shards} data shards times "
            f"config.microbatches={parts}"
        )


def _nearest(config: Config, recipe: str, request: PlanRequest, is_short: bool) -> str:
    """The smallest change that lets it run: other settings, else, short of memory, more devices."""
    result = search.search(request, 1)
    if result.best:
        best = result.best[0]
        return f"this fits ({gib(best.peak)} a device): {_changes(config, request, best)}"
    if not is_short:
        return f"no mesh of {request.machine.devices} devices does, so take another batch size"
    machine = request.machine
    for factor in _SIZES:
        text = f"{machine.name}:{factor * machine.devices}"
        try:
            larger = machines.parse(text, config.network.dtype)
            found = search.search(plan_request(recipe, config, larger), 1)
        except ConfigError:
            continue
        if found.best:
            changes = _changes(config, found.request, found.best[0])
            return f"--devices={text} would do, with {changes}"
    return f"nor does it on {_SIZES[-1]} times as many devices; take a larger kind, or adapters"


def _changes(config: Config, request: PlanRequest, plan: Plan) -> str:
    """The overrides that turn a run into a plan's."""
    found = []
    for line in candidates.overrides(request, plan.candidate):
        path, _, value = line.removeprefix("--config.").partition("=")
        now: object = config
        for name in path.split("."):
            now = getattr(now, name)
        if str(now) != value and not (path.startswith("mesh.") and value == "1" and now in (1, -1)):
            found.append(line)
    return " ".join(found)


def _devices(machine: Machine) -> list[Any]:
    """Abstract devices of the machine."""
    return abstract_devices.devices(machine.platform, machine.devices, machine.devices_per_host)
