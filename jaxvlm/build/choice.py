"""What a recipe leaves to the planner (``auto``), chosen for the run's own devices."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxvlm.build import pretrained, record
from jaxvlm.build.losses import of_vectors
from jaxvlm.build.merge import json_object
from jaxvlm.build.pairs import CHOSEN
from jaxvlm.config import ConfigError, GradCacheConfig, MeshConfig, StrategyConfig, TrainConfig
from jaxvlm.models.families import any_family
from jaxvlm.parallel.strategies import resolve
from jaxvlm.plan import question, search, ways
from jaxvlm.plan.here import machine_of
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.question import Question
from jaxvlm.plan.units import gib
from jaxvlm.plan.ways import Way

AUTO = "auto"


_WHOLE: dict[str, tuple[str, Any]] = {
    "strategy.name": ("strategy", StrategyConfig(AUTO)),
    "mesh.data": ("mesh", MeshConfig(data=0)),
    "grad_cache.query": ("grad_cache", GradCacheConfig(CHOSEN)),
}
"""Settings that leave their whole group to the planner."""


def autos(config: TrainConfig) -> list[str]:
    """Settings that a recipe leaves to the planner."""
    asked = {
        "strategy.name": config.strategy.name == AUTO,
        "mesh.data": config.mesh.data == 0,
        "model.vision.remat": config.model.vision.remat == AUTO,
        "model.decoder.remat": config.model.decoder.remat == AUTO,
        "dual.vision.remat": config.dual.vision.remat == AUTO,
        "dual.text.remat": config.dual.text.remat == AUTO,
        "microbatches": config.microbatches == 0,
        "grad_cache.query": config.grad_cache.query == CHOSEN,
        # What follows is refused: only one mesh is known yet.
        "tower.strategy.name": config.tower.strategy.name == AUTO,
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
    what = _said(config, left[0])
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
    if asked.pairs:  # the data are not read yet
        own = config.data.pairs.max_negatives
        more = (
            "" if own >= 0 else "no negatives of their own: data.pairs.max_negatives says how many"
        )
        for line in filter(None, (*asked.assumed, more)):
            say(f"planner: assumed: {line}")
    say(f"planner ({', '.join(left)}): {best.way.text()}, {gib(best.peak)} a device")
    return _with(config, best.way, left)


def _check_known(there: Machine) -> None:
    """Refuse to choose by times that leave out what is not known."""
    if there.missing:
        advice = "run jaxvlm plan --calibrate once, or " if there.platform == "cpu" else ""
        raise ConfigError(f"rates are not known ({there.missing[0].split(';')[0]}); {advice}set it")


def _check_auto(config: TrainConfig, left: list[str], what: str) -> None:
    """Refuse what is not known, what nothing reads, and settings of what is to be chosen."""
    if why := unknown(config):
        raise ConfigError(f"{what}: {why} can't be planned yet; set it")
    for name in left:
        if why := _unread(config, name):
            raise ConfigError(f"{_said(config, name)}: {why}")
    if "strategy.name" in left and config.mesh not in (MeshConfig(), MeshConfig(data=0)):
        raise ConfigError(f"{what} chooses config.mesh too; leave it out")
    for name in [name for name in _WHOLE if name in left]:
        group, default = _WHOLE[name]
        for field in dataclasses.fields(default):
            if getattr(getattr(config, group), field.name) != getattr(default, field.name):
                raise ConfigError(
                    f"{_said(config, name)} chooses config.{group}.{field.name} too; leave it out"
                )


def _unread(config: TrainConfig, name: str) -> str:
    """Why the planner does not choose a setting; "" where it does."""
    group, pairs = name.split(".")[0], of_vectors(config)
    if group == "tower":
        return "the planner does not choose it; set it"
    if group in ("model", "dual") and (group == "dual") != (config.encoder == "dual"):
        return f"it is not read with config.encoder={config.encoder!r}"
    if group == "microbatches" and pairs:
        return f"parts of pairs are chunks of config.grad_cache; query={CHOSEN} leaves them open"
    if group == "grad_cache" and not pairs:
        return f"it is of losses of pairs, not of config.loss={config.loss!r}"
    return ""


def _get(config: TrainConfig, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _put(config: Any, path: str, value: Any) -> Any:
    """``config`` with a setting changed."""
    name, _, rest = path.partition(".")
    value = _put(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: value})


def _said(config: TrainConfig, name: str) -> str:
    return f"config.{name}={_get(config, name)!r}"


def _local(config: TrainConfig, workdir: pathlib.Path | None) -> TrainConfig:
    """``config`` with its checkpoints' folders where these are ids of the hub."""
    paths: tuple[tuple[str, str], ...] = (("model.checkpoint", ""),)
    if config.encoder == "dual":
        of_towers = ((f"dual.{tower}_checkpoint", tower) for tower in ("vision", "text"))
        paths = (("dual.checkpoint", ""), *of_towers)
    for path, kept in paths:
        given = _get(config, path)
        if given and not pathlib.Path(given).expanduser().is_dir():
            where = workdir / kept if workdir and kept else workdir
            source = pretrained.find(given, where, any_family)
            config = _put(config, path, str(source.files) if source else given)
    return config


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
    chosen = [_WHOLE[name][0] if name in _WHOLE else name for name in left]
    chosen += ["mesh"] if "strategy.name" in left else []
    return functools.reduce(lambda c, path: _put(c, path, _get(made, path)), chosen, config)


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
    parts, made = config.microbatches, dict[Way, None]()
    refused: dict[tuple[str, MeshConfig], str] = {}
    for way in _every(asked, config, left, devices):
        if way.cache != "off" or asked.rows % way.shards:
            continue
        if asked.pairs and "grad_cache.query" not in left:
            own, chunk = ways.chunk_of(asked.pairs, config, asked.rows // way.shards)
            way = way._replace(microbatches=own, chunk=chunk)
        elif parts and not asked.pairs:
            way = way._replace(microbatches=parts)
        cut = asked.rows // way.shards % way.microbatches or way.microbatches % way.mesh.stage
        if cut and not asked.pairs:
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


def _every(
    asked: Question, config: TrainConfig, left: list[str], devices: Sequence[Any]
) -> Iterable[Way]:
    """Ways on the recipe's mesh, on all meshes, or under all strategies."""
    if "strategy.name" in left:
        yield from ways.ways(asked)
        return
    sizes = [config.mesh]
    if "mesh.data" in left:
        sizes = list(dict.fromkeys(mesh for _, mesh in ways.meshes(asked)))
    for mesh in sizes:
        try:
            yield from ways.of_mesh(asked, *resolve(config.strategy, mesh, devices))
        except ConfigError:
            if len(sizes) == 1:
                raise  # the recipe's own


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
    vision, other = (_get(config, path) for path in _remats(config))
    both = [given if given != AUTO else way.remat for given in (vision, other)]
    return way._replace(vision="" if both[0] == both[1] else both[0], remat=both[1])


def _remats(config: TrainConfig) -> tuple[str, str]:
    """Settings of the towers' remat."""
    if config.encoder == "dual":
        return "dual.vision.remat", "dual.text.remat"
    return "model.vision.remat", "model.decoder.remat"


def first_line(error: Exception) -> str:
    """Kind and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _with(config: TrainConfig, way: Way, left: list[str]) -> TrainConfig:
    """``config`` with the way where it leaves a choice."""
    vision, other = _remats(config)
    chosen = {vision: way.vision or way.remat, other: way.remat, "microbatches": way.microbatches}
    config = functools.reduce(lambda c, n: _put(c, n, chosen[n]), chosen.keys() & left, config)
    if "grad_cache.query" in left:
        config = dataclasses.replace(config, grad_cache=GradCacheConfig(*way.chunk))
    if not {"strategy.name", "mesh.data"} & set(left):
        return config
    config = dataclasses.replace(config, mesh=way.mesh)
    if "strategy.name" not in left:
        return config
    strategy = dataclasses.replace(config.strategy, name=way.preset, context=way.strategy.context)
    return dataclasses.replace(config, strategy=strategy)


def unknown(config: TrainConfig) -> str:
    """What of a run's settings the planner does not know; "" where it knows all."""
    kept = "visual tokens that are kept" if config.cache.policy != "off" else ""
    return question.unknown(config) or kept
