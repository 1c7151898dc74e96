"""What a recipe leaves to the planner (``auto``), chosen for the run's own devices."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxvlm.build import pretrained, record
from jaxvlm.build.merge import json_object
from jaxvlm.config import ConfigError, MeshConfig, StrategyConfig, TrainConfig
from jaxvlm.parallel.strategies import resolve
from jaxvlm.plan import question, search, ways
from jaxvlm.plan.here import machine_of
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.question import Question
from jaxvlm.plan.units import gib
from jaxvlm.plan.ways import Way

AUTO = "auto"


def autos(config: TrainConfig) -> list[str]:
    """Settings that a recipe leaves to the planner."""
    asked = {
        "strategy.name": config.strategy.name == AUTO,
        "model.vision.remat": config.model.vision.remat == AUTO,
        "model.decoder.remat": config.model.decoder.remat == AUTO,
        "microbatches": config.microbatches == 0,
        # What follows is refused: only one mesh, and training on tokens, is known yet.
        "tower.strategy.name": config.tower.strategy.name == AUTO,
        "dual.vision.remat": config.dual.vision.remat == AUTO,
        "dual.text.remat": config.dual.text.remat == AUTO,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def settled(
    config: TrainConfig,
    devices: Sequence[Any],
    say: Callable[[str], None],
    check: Callable[[TrainConfig], None] = lambda config: None,
    workdir: pathlib.Path | None = None,
) -> TrainConfig:
    """``config`` with the planner's choice where it says ``auto``, which is said.

    Args:
        config: of a run.
        devices: of it.
        say: prints a line.
        check: refuses what the run can't take; its mesh and strategy are resolved.
        workdir: of the run; what was chosen when it began stays, on as many devices.

    Raises:
        ConfigError: it can't be planned, nothing fits, or a mesh is set that is to be chosen.
    """
    if not (left := autos(config)):
        return config
    what = f"config.{left[0]}={0 if left[0] == 'microbatches' else AUTO!r}"
    _check_auto(config, left, what)
    if (old := _recorded(config, left, devices, workdir)) is not None:
        say(f"planner ({', '.join(left)}): as this run began")
        return old
    try:
        there = machine_of(devices, config.network.dtype)
        _check_known(there)
        asked = question.ask("this run", _local(config, workdir), there)
        among = _left(asked, config, left, devices, check)
        found = search.search(asked, 1, lambda way: True, None, among)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except Exception as error:  # the planner's mistake, of which the run is told in one line
        raise ConfigError(f"{what}: the planner failed ({first_line(error)}); set it") from error
    if not found.best:
        near = found.nearest
        least = f"; {near.way.text()} needs {gib(near.peak)}" if near else ""
        raise ConfigError(
            f"{what}: nothing that fits is left on {len(devices)} x {there.name}, "
            f"{gib(search.capacity(asked))} usable each{least}"
        )
    best = found.best[0]
    say(f"planner ({', '.join(left)}): {best.way.text()}, {gib(best.peak)} a device")
    return _with(config, best.way, left)


def _check_known(there: Machine) -> None:
    """Refuse to choose by times that leave out what is not known."""
    if there.missing:
        advice = "run jaxvlm plan --calibrate once, or " if there.platform == "cpu" else ""
        raise ConfigError(f"rates are not known ({there.missing[0].split(';')[0]}); {advice}set it")


def _check_auto(config: TrainConfig, left: list[str], what: str) -> None:
    """Refuse what is not known, and settings of what is to be chosen."""
    if why := unknown(config):
        raise ConfigError(f"{what}: {why} can't be planned yet; set it")
    for name in left:
        if name.startswith(("tower.", "dual.")):
            raise ConfigError(f"config.{name}={AUTO!r}: the planner does not choose it; set it")
    if "strategy.name" not in left:
        return
    if config.mesh != MeshConfig():
        raise ConfigError(f"{what} chooses config.mesh too; leave it out")
    default = StrategyConfig(AUTO)
    for field in dataclasses.fields(default):
        if getattr(config.strategy, field.name) != getattr(default, field.name):
            raise ConfigError(f"{what} chooses config.strategy.{field.name} too; leave it out")


def _local(config: TrainConfig, workdir: pathlib.Path | None) -> TrainConfig:
    """``config`` with its checkpoint's folder where that is an id of the hub."""
    given = config.model.checkpoint
    if not given or pathlib.Path(given).expanduser().is_dir():
        return config
    source = pretrained.find(given, workdir)
    folder = str(source.files) if source else given
    return dataclasses.replace(config, model=dataclasses.replace(config.model, checkpoint=folder))


def _recorded(
    config: TrainConfig, left: list[str], devices: Sequence[Any], workdir: pathlib.Path | None
) -> TrainConfig | None:
    """``config`` with what was chosen when the run in ``workdir`` began, where that still holds."""
    if workdir is None or not (workdir / "config.json").is_file():
        return None
    try:
        made, there = record.read_config(workdir), json_object(workdir / "config.json")["devices"]
    except (ConfigError, KeyError):
        return None  # said where the file is compared
    batch = [(x.data.batch_size, x.data.max_length) for x in (made, config)]
    if there != f"{len(devices)} x {devices[0].device_kind}" or batch[0] != batch[1]:
        return None
    if autos(made):
        return None
    towers = {
        name: dataclasses.replace(
            getattr(config.model, name), remat=getattr(made.model, name).remat
        )
        for name in ("vision", "decoder")
        if f"model.{name}.remat" in left
    }
    parts = made.microbatches if "microbatches" in left else config.microbatches
    model = dataclasses.replace(config.model, **towers)
    config = dataclasses.replace(config, model=model, microbatches=parts)
    if "strategy.name" not in left:
        return config
    return dataclasses.replace(config, mesh=made.mesh, strategy=made.strategy)


def _left(
    asked: Question,
    config: TrainConfig,
    left: list[str],
    devices: Sequence[Any],
    check: Callable[[TrainConfig], None],
) -> list[Way]:
    """Ways that agree with what the recipe has settled, and that the run would take.

    Raises:
        ConfigError: there is none.
    """
    every: Iterable[Way]
    if "strategy.name" in left:
        every = ways.ways(asked)
    else:
        every = ways.of_mesh(asked, *resolve(config.strategy, config.mesh, devices))
    parts, made = config.microbatches, dict[Way, None]()
    refused: dict[tuple[str, MeshConfig], str] = {}
    for way in every:
        if way.cache != "off":
            continue
        if parts:
            way = way._replace(microbatches=parts)
        if asked.rows // way.shards % way.microbatches or way.microbatches % way.mesh.stage:
            continue
        key = way.preset, way.mesh
        if key not in refused:
            refused[key] = _refused(config, way, devices, check)
        if not refused[key]:
            made[_with_remat(config, way)] = None
    if not made:
        why = next(filter(None, refused.values()), "") or (
            f"{asked.rows} rows, microbatches={parts or 'any'} and {len(devices)} devices do not "
            "go together"
        )
        raise ConfigError(f"the planner has no way: {why}")
    return list(made)


def _refused(
    config: TrainConfig, way: Way, devices: Sequence[Any], check: Callable[[TrainConfig], None]
) -> str:
    """Why the run would not take the way's mesh; "" where it would."""
    try:
        mesh, strategy = resolve(way.strategy, way.mesh, devices)
        check(dataclasses.replace(config, mesh=mesh, strategy=strategy))
    except ConfigError as error:
        return str(error)
    return ""


def _with_remat(config: TrainConfig, way: Way) -> Way:
    """The way with what the recipe says of towers' remat."""
    vision, decoder = (getattr(config.model, t).remat for t in ("vision", "decoder"))
    both = [given if given != AUTO else way.remat for given in (vision, decoder)]
    return way._replace(vision="" if both[0] == both[1] else both[0], remat=both[1])


def first_line(error: Exception) -> str:
    """Kind and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _with(config: TrainConfig, way: Way, left: list[str]) -> TrainConfig:
    model = dataclasses.replace(
        config.model,
        vision=dataclasses.replace(config.model.vision, remat=way.vision or way.remat),
        decoder=dataclasses.replace(config.model.decoder, remat=way.remat),
    )
    config = dataclasses.replace(config, model=model, microbatches=way.microbatches)
    if "strategy.name" not in left:
        return config
    strategy = dataclasses.replace(config.strategy, name=way.preset, context=way.strategy.context)
    return dataclasses.replace(config, mesh=way.mesh, strategy=strategy)


def unknown(config: TrainConfig) -> str:
    """What of a run's settings the planner does not know; "" where it knows all."""
    kept = "visual tokens that are kept" if config.cache.policy != "off" else ""
    return question.unknown(config) or kept
