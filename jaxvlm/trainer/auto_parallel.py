"""What a recipe leaves to the planner (``auto``), chosen for the run's own devices."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxvlm.checkpoint import run_record
from jaxvlm.config import Config, ConfigError, GradCacheConfig, MeshConfig, StrategyConfig
from jaxvlm.config.merge import json_object
from jaxvlm.hf import pretrained
from jaxvlm.hf.families import ChooseFamily, any_family, family_of
from jaxvlm.losses.registry import loss_setting, trains_embeddings
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.hardware.local_machine import machine_of
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.report.units import gib
from jaxvlm.planner.request.request import PlanRequest, plan_request, undivided
from jaxvlm.planner.request.request import unsupported as not_in_plans
from jaxvlm.planner.search import candidates, search
from jaxvlm.planner.search.candidates import Candidate
from jaxvlm.spmd.gradcache import AUTO_MINI_BATCH
from jaxvlm.stores.errors import error_line
from jaxvlm.trainer.checks import AUTO, auto_settings

_WHOLE: dict[str, tuple[str, Any]] = {
    "strategy.name": ("strategy", StrategyConfig(AUTO)),
    "mesh.data": ("mesh", MeshConfig(data=0)),
    "grad_cache.query_mini_batch": ("grad_cache", GradCacheConfig(AUTO_MINI_BATCH)),
}
"""Settings that leave their whole group to the planner."""


def resolve_auto(
    config: Config,
    devices: Sequence[Any],
    log: Callable[[str], None],
    check: Callable[[Config], None] = lambda config: None,
    workdir: pathlib.Path | None = None,
) -> Config:
    """``config`` with the planner's choice where it says ``auto``; logs the choice.

    Args:
        config: of a run.
        devices: of it.
        log: prints a line.
        check: refuses what the run can't take; its mesh and strategy are resolved.
        workdir: of the run; what was chosen when it began stays, on as many devices.

    Raises:
        ConfigError: it can't be planned, nothing fits, or a mesh is set that is to be chosen.
    """
    if not (auto := auto_settings(config)):
        return config
    setting = _setting(config, auto[0])
    _check_auto(config, auto, setting)
    if (recorded := _recorded(config, auto, devices, workdir)) is not None:
        log(f"planner ({', '.join(auto)}): as this run began")
        return recorded
    try:
        machine = machine_of(devices, config.network.dtype)
        _check_known(machine)
        request = plan_request("this run", _with_local_folders(config, workdir), machine)
        among = allowed(request, config, auto, devices, check)
        result = search.search(request, 1, lambda candidate: True, None, among)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from None
    except Exception as error:  # a fault of the planner
        raise ConfigError(f"{setting}: the planner failed ({error_line(error)}); set it") from error
    if not result.best:
        near = result.nearest
        least = f"; {near.candidate.text()} needs {gib(near.peak)}" if near else ""
        raise ConfigError(
            f"{setting}: nothing that fits is left on {len(devices)} x {machine.name}, "
            f"{gib(search.capacity(request))} usable each{least}; take more devices, or lower "
            "config.data.batch_size or the lengths"
        )
    best = result.best[0]
    if request.pairs:  # the data are not read yet
        assumed = [*request.assumed]
        if config.data.pairs.max_negatives < 0:
            assumed.append("no hard negatives; config.data.pairs.max_negatives says how many")
        for line in assumed:
            log(f"planner: assumed: {line}")
    log(f"planner ({', '.join(auto)}): {best.candidate.text()}, {gib(best.peak)} a device")
    return _with_choice(config, best.candidate, auto)


def _check_known(machine: Machine) -> None:
    """Refuse to choose by times that leave out unknown rates."""
    if machine.missing:
        advice = "run jaxvlm plan --calibrate once, or " if machine.platform == "cpu" else ""
        raise ConfigError(
            f"rates are not known ({machine.missing[0].split(';')[0]}); {advice}set it"
        )


def _check_auto(config: Config, auto: list[str], setting: str) -> None:
    """Refuse settings that can't be planned, that nothing reads, or that are set and chosen."""
    if why := unsupported(config):
        raise ConfigError(f"{setting}: {why} can't be planned yet; set it")
    for name in auto:
        if why := _unread(config, name):
            raise ConfigError(f"{_setting(config, name)}: {why}")
    mesh = dataclasses.replace(config.mesh, island=1)
    if "strategy.name" in auto and mesh not in (MeshConfig(), MeshConfig(data=0)):
        raise ConfigError(f"{setting} chooses config.mesh too; leave it out, but for its island")
    for name in [name for name in _WHOLE if name in auto]:
        group, default = _WHOLE[name]
        for field in dataclasses.fields(default):
            if (group, field.name) == ("mesh", "island"):  # it changes what is learned
                continue
            if getattr(getattr(config, group), field.name) != getattr(default, field.name):
                raise ConfigError(
                    f"{_setting(config, name)} chooses config.{group}.{field.name} too; leave "
                    "it out"
                )


def _unread(config: Config, name: str) -> str:
    """Why the planner does not choose a setting; "" where it does."""
    group, pairs = name.split(".")[0], trains_embeddings(config)
    if group == "encoder":
        return "the planner does not choose it; set it"
    if group in ("model", "dual") and (group == "dual") != (config.embedder == "dual"):
        return f"it is not read with config.embedder={config.embedder!r}; leave it out"
    if group == "microbatches" and pairs:
        grad_cache = f"config.grad_cache.query_mini_batch={AUTO_MINI_BATCH}"
        return f"pairs have mini-batches: set {grad_cache} instead"
    if group == "grad_cache" and not pairs:
        return f"it is of losses of pairs, not of {loss_setting(config)}; leave it at 0"
    return ""


def _get(config: Config, path: str) -> Any:
    result: Any = config
    for name in path.split("."):
        result = getattr(result, name)
    return result


def _replaced(config: Any, path: str, value: Any) -> Any:
    """``config`` with a setting changed."""
    name, _, rest = path.partition(".")
    value = _replaced(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: value})


def _setting(config: Config, name: str) -> str:
    return f"config.{name}={_get(config, name)!r}"


def _with_local_folders(config: Config, workdir: pathlib.Path | None) -> Config:
    """``config`` with its checkpoints' folders where these are ids of the hub."""
    paths: tuple[tuple[str, str], ...] = (("model.checkpoint", ""),)
    if config.embedder == "dual":
        of_towers = ((f"dual.{name}_checkpoint", name) for name in ("vision", "text"))
        paths = (("dual.checkpoint", ""), *of_towers)
    for path, tower in paths:
        given = _get(config, path)
        if given and not pathlib.Path(given).expanduser().is_dir():
            choose: ChooseFamily = any_family
            if path == "model.checkpoint":
                choose = family_of(config.model.family, "config.model.family", any_family)
            source = pretrained.find(given, workdir, choose, tower)
            config = _replaced(config, path, str(source.files) if source else given)
    return config


def _recorded(
    config: Config, auto: list[str], devices: Sequence[Any], workdir: pathlib.Path | None
) -> Config | None:
    """``config`` with what was chosen when the run in ``workdir`` began, where that still holds."""
    if workdir is None or not (workdir / "config.json").is_file():
        return None
    try:
        recorded = run_record.read_config(workdir)
        recorded_devices = json_object(workdir / "config.json")["devices"]
    except (ConfigError, KeyError):
        return None  # reported where the file is compared
    batch = [(x.data.batch_size, x.data.max_length) for x in (recorded, config)]
    if recorded_devices != f"{len(devices)} x {devices[0].device_kind}" or batch[0] != batch[1]:
        return None
    if auto_settings(recorded) or recorded.mesh.island != config.mesh.island:
        return None
    chosen = [_WHOLE[name][0] if name in _WHOLE else name for name in auto]
    chosen += ["mesh"] if "strategy.name" in auto else []
    return functools.reduce(
        lambda c, path: _replaced(c, path, _get(recorded, path)), chosen, config
    )


def allowed(
    request: PlanRequest,
    config: Config,
    auto: list[str],
    devices: Sequence[Any],
    check: Callable[[Config], None],
) -> list[Candidate]:
    """Candidates that agree with the recipe's settings, and that the run would take.

    Raises:
        ConfigError: there is none.
    """
    if why := undivided(config, len(devices)):
        raise ConfigError(why)
    parts, found = config.microbatches, dict[Candidate, None]()
    refused: dict[tuple[str, MeshConfig], str] = {}
    for candidate in _candidates(request, config, auto, devices):
        if candidate.cache != "off" or request.rows % candidate.shards:
            continue
        if request.pairs and "grad_cache.query_mini_batch" not in auto:
            local = request.rows // candidate.shards
            count, sizes = candidates.mini_batches_of(request.pairs, config, local)
            candidate = candidate._replace(microbatches=count, mini_batches=sizes)
        elif parts and not request.pairs:
            candidate = candidate._replace(microbatches=parts)
        microbatches = candidate.microbatches
        uneven = request.rows // candidate.shards % microbatches
        if (uneven or microbatches % candidate.mesh.pipeline) and not request.pairs:
            continue
        key = candidate.preset, candidate.mesh
        if key not in refused:
            refused[key] = _refusal(config, candidate, devices, check)
        if not refused[key]:
            found[_with_remat(config, candidate)] = None
    if not found:
        why = next(filter(None, refused.values()), "") or (
            f"{request.rows} rows, microbatches={parts or 'any'} and {len(devices)} devices do not "
            "go together"
        )
        raise ConfigError(
            f"the planner has no candidate: {why}; set fewer of strategy, mesh and microbatches, "
            "or another data.batch_size"
        )
    return list(found)


def _candidates(
    request: PlanRequest, config: Config, auto: list[str], devices: Sequence[Any]
) -> Iterable[Candidate]:
    """Candidates on the recipe's mesh, on all meshes, or under all strategies."""
    if "strategy.name" in auto:
        yield from candidates.candidates(request)
        return
    sizes = [config.mesh]
    if "mesh.data" in auto:
        sizes = list(dict.fromkeys(mesh for _, mesh in candidates.meshes(request)))
    for mesh in sizes:
        try:
            yield from candidates.of_mesh(request, *resolve(config.strategy, mesh, devices))
        except ConfigError:
            if len(sizes) == 1:
                raise  # the recipe's own


def _refusal(
    config: Config, candidate: Candidate, devices: Sequence[Any], check: Callable[[Config], None]
) -> str:
    """Why the run would refuse the candidate's mesh; "" where it would not."""
    try:
        mesh, strategy = resolve(candidate.strategy, candidate.mesh, devices)
        check(dataclasses.replace(config, mesh=mesh, strategy=strategy))
    except ConfigError as error:
        return str(error)
    return ""


def _with_remat(config: Config, candidate: Candidate) -> Candidate:
    """The candidate with the recipe's settings of remat."""
    vision, other = (_get(config, path) for path in _remat_settings(config))
    both = [given if given != AUTO else candidate.remat for given in (vision, other)]
    return candidate._replace(vision="" if both[0] == both[1] else both[0], remat=both[1])


def _remat_settings(config: Config) -> tuple[str, str]:
    """Names of the settings of remat: of the vision encoder, and of the decoder or text tower."""
    if config.embedder == "dual":
        return "dual.vision.remat", "dual.text.remat"
    return "model.vision.remat", "model.decoder.remat"


def _with_choice(config: Config, candidate: Candidate, auto: list[str]) -> Config:
    """``config`` with the candidate's values where it says ``auto``."""
    vision, other = _remat_settings(config)
    chosen = {
        vision: candidate.vision or candidate.remat,
        other: candidate.remat,
        "microbatches": candidate.microbatches,
    }
    config = functools.reduce(lambda c, n: _replaced(c, n, chosen[n]), chosen.keys() & auto, config)
    if "grad_cache.query_mini_batch" in auto:
        config = dataclasses.replace(config, grad_cache=GradCacheConfig(*candidate.mini_batches))
    if not {"strategy.name", "mesh.data"} & set(auto):
        return config
    config = dataclasses.replace(config, mesh=candidate.mesh)
    if "strategy.name" not in auto:
        return config
    strategy = dataclasses.replace(
        config.strategy, name=candidate.preset, context=candidate.strategy.context
    )
    return dataclasses.replace(config, strategy=strategy)


def unsupported(config: Config) -> str:
    """The first of a run's settings that can't be planned; "" if there is none."""
    policy = config.cache.policy
    cached = f"cached visual tokens (config.cache.policy={policy!r})" if policy != "off" else ""
    return not_in_plans(config) or cached
