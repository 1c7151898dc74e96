"""What a recipe leaves to the planner (``auto``), chosen for the run's own devices."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxvlm.checkpoint import run_record
from jaxvlm.checkpoint.restore import error_line
from jaxvlm.config import Config, ConfigError, GradCacheConfig, MeshConfig, StrategyConfig
from jaxvlm.config.merge import json_object
from jaxvlm.hf import pretrained
from jaxvlm.hf.families import ChooseFamily, any_family, family_of
from jaxvlm.losses.registry import loss_setting, trains_embeddings
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.hardware.local_machine import machine_of
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.report.units import gib
from jaxvlm.planner.request import request
from jaxvlm.planner.request.request import PlanRequest
from jaxvlm.planner.search import candidates, search
from jaxvlm.planner.search.candidates import Candidate
from jaxvlm.spmd.gradcache import AUTO as CHOSEN
from jaxvlm.trainer.checks import AUTO, auto_settings

_WHOLE: dict[str, tuple[str, Any]] = {
    "strategy.name": ("strategy", StrategyConfig(AUTO)),
    "mesh.data": ("mesh", MeshConfig(data=0)),
    "grad_cache.query_mini_batch": ("grad_cache", GradCacheConfig(CHOSEN)),
}
"""Settings that leave their whole group to the planner."""


def resolve_auto(
    config: Config,
    devices: Sequence[Any],
    say: Callable[[str], None],
    check: Callable[[Config], None] = lambda config: None,
    workdir: pathlib.Path | None = None,
) -> Config:
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
    if not (left := auto_settings(config)):
        return config
    what = _said(config, left[0])
    _check_auto(config, left, what)
    if (old := _recorded(config, left, devices, workdir)) is not None:
        say(f"planner ({', '.join(left)}): as this run began")
        return old
    try:
        there = machine_of(devices, config.network.dtype)
        _check_known(there)
        asked = request.plan_request("this run", _local(config, workdir), there)
        among = _left(asked, config, left, devices, check)
        found = search.search(asked, 1, lambda way: True, None, among)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except Exception as error:  # the planner's mistake, of which the run is told in one line
        raise ConfigError(f"{what}: the planner failed ({error_line(error)}); set it") from error
    if not found.best:
        near = found.nearest
        least = f"; {near.candidate.text()} needs {gib(near.peak)}" if near else ""
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
    say(f"planner ({', '.join(left)}): {best.candidate.text()}, {gib(best.peak)} a device")
    return _with(config, best.candidate, left)


def _check_known(there: Machine) -> None:
    """Refuse to choose by times that leave out what is not known."""
    if there.missing:
        advice = "run jaxvlm plan --calibrate once, or " if there.platform == "cpu" else ""
        raise ConfigError(f"rates are not known ({there.missing[0].split(';')[0]}); {advice}set it")


def _check_auto(config: Config, left: list[str], what: str) -> None:
    """Refuse what is not known, what nothing reads, and settings of what is to be chosen."""
    if why := unsupported(config):
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


def _unread(config: Config, name: str) -> str:
    """Why the planner does not choose a setting; "" where it does."""
    group, pairs = name.split(".")[0], trains_embeddings(config)
    if group == "encoder":
        return "the planner does not choose it; set it"
    if group in ("model", "dual") and (group == "dual") != (config.embedder == "dual"):
        return f"it is not read with config.embedder={config.embedder!r}"
    if group == "microbatches" and pairs:
        return f"pairs have mini-batches: set config.grad_cache.query_mini_batch={CHOSEN} instead"
    if group == "grad_cache" and not pairs:
        return f"it is of losses of pairs, not of {loss_setting(config)}"
    return ""


def _get(config: Config, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _put(config: Any, path: str, value: Any) -> Any:
    """``config`` with a setting changed."""
    name, _, rest = path.partition(".")
    value = _put(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: value})


def _said(config: Config, name: str) -> str:
    return f"config.{name}={_get(config, name)!r}"


def _local(config: Config, workdir: pathlib.Path | None) -> Config:
    """``config`` with its checkpoints' folders where these are ids of the hub."""
    paths: tuple[tuple[str, str], ...] = (("model.checkpoint", ""),)
    if config.embedder == "dual":
        of_towers = ((f"dual.{tower}_checkpoint", tower) for tower in ("vision", "text"))
        paths = (("dual.checkpoint", ""), *of_towers)
    for path, kept in paths:
        given = _get(config, path)
        if given and not pathlib.Path(given).expanduser().is_dir():
            where = workdir / kept if workdir and kept else workdir
            choose: ChooseFamily = any_family
            if path == "model.checkpoint":
                choose = family_of(config.model.family, "config.model.family", any_family)
            source = pretrained.find(given, where, choose)
            config = _put(config, path, str(source.files) if source else given)
    return config


def _recorded(
    config: Config, left: list[str], devices: Sequence[Any], workdir: pathlib.Path | None
) -> Config | None:
    """``config`` with what was chosen when the run in ``workdir`` began, where that still holds."""
    if workdir is None or not (workdir / "config.json").is_file():
        return None
    try:
        made, there = (
            run_record.read_config(workdir),
            json_object(workdir / "config.json")["devices"],
        )
    except (ConfigError, KeyError):
        return None  # said where the file is compared
    batch = [(x.data.batch_size, x.data.max_length) for x in (made, config)]
    if there != f"{len(devices)} x {devices[0].device_kind}" or batch[0] != batch[1]:
        return None
    if auto_settings(made):
        return None
    chosen = [_WHOLE[name][0] if name in _WHOLE else name for name in left]
    chosen += ["mesh"] if "strategy.name" in left else []
    return functools.reduce(lambda c, path: _put(c, path, _get(made, path)), chosen, config)


def _left(
    asked: PlanRequest,
    config: Config,
    left: list[str],
    devices: Sequence[Any],
    check: Callable[[Config], None],
) -> list[Candidate]:
    """Ways that agree with what the recipe has settled, and that the run would take.

    Raises:
        ConfigError: there is none.
    """
    parts, made = config.microbatches, dict[Candidate, None]()
    refused: dict[tuple[str, MeshConfig], str] = {}
    for way in _every(asked, config, left, devices):
        if way.cache != "off" or asked.rows % way.shards:
            continue
        if asked.pairs and "grad_cache.query_mini_batch" not in left:
            own, mini_batches = candidates.mini_batches_of(
                asked.pairs, config, asked.rows // way.shards
            )
            way = way._replace(microbatches=own, mini_batches=mini_batches)
        elif parts and not asked.pairs:
            way = way._replace(microbatches=parts)
        cut = asked.rows // way.shards % way.microbatches or way.microbatches % way.mesh.pipeline
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
    asked: PlanRequest, config: Config, left: list[str], devices: Sequence[Any]
) -> Iterable[Candidate]:
    """Ways on the recipe's mesh, on all meshes, or under all strategies."""
    if "strategy.name" in left:
        yield from candidates.candidates(asked)
        return
    sizes = [config.mesh]
    if "mesh.data" in left:
        sizes = list(dict.fromkeys(mesh for _, mesh in candidates.meshes(asked)))
    for mesh in sizes:
        try:
            yield from candidates.of_mesh(asked, *resolve(config.strategy, mesh, devices))
        except ConfigError:
            if len(sizes) == 1:
                raise  # the recipe's own


def _refused(
    config: Config, way: Candidate, devices: Sequence[Any], check: Callable[[Config], None]
) -> str:
    """Why the run would not take the way's mesh; "" where it would."""
    try:
        mesh, strategy = resolve(way.strategy, way.mesh, devices)
        check(dataclasses.replace(config, mesh=mesh, strategy=strategy))
    except ConfigError as error:
        return str(error)
    return ""


def _with_remat(config: Config, way: Candidate) -> Candidate:
    """The way with what the recipe says of towers' remat."""
    vision, other = (_get(config, path) for path in _remats(config))
    both = [given if given != AUTO else way.remat for given in (vision, other)]
    return way._replace(vision="" if both[0] == both[1] else both[0], remat=both[1])


def _remats(config: Config) -> tuple[str, str]:
    """Settings of the towers' remat."""
    if config.embedder == "dual":
        return "dual.vision.remat", "dual.text.remat"
    return "model.vision.remat", "model.decoder.remat"


def _with(config: Config, way: Candidate, left: list[str]) -> Config:
    """``config`` with the way where it leaves a choice."""
    vision, other = _remats(config)
    chosen = {vision: way.vision or way.remat, other: way.remat, "microbatches": way.microbatches}
    config = functools.reduce(lambda c, n: _put(c, n, chosen[n]), chosen.keys() & left, config)
    if "grad_cache.query_mini_batch" in left:
        config = dataclasses.replace(config, grad_cache=GradCacheConfig(*way.mini_batches))
    if not {"strategy.name", "mesh.data"} & set(left):
        return config
    config = dataclasses.replace(config, mesh=way.mesh)
    if "strategy.name" not in left:
        return config
    strategy = dataclasses.replace(config.strategy, name=way.preset, context=way.strategy.context)
    return dataclasses.replace(config, strategy=strategy)


def unsupported(config: Config) -> str:
    """What of a run's settings the planner does not know; "" where it knows all."""
    policy = config.cache.policy
    cached = f"cached visual tokens (config.cache.policy={policy!r})" if policy != "off" else ""
    return request.unsupported(config) or cached
