"""What the planner says of a run: its choice where a recipe leaves one to it, memory and step time
beforehand, and what to change where memory is short.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxvlm.build import pretrained, record
from jaxvlm.build.merge import json_object
from jaxvlm.config import ConfigError, MeshConfig, StrategyConfig, TrainConfig
from jaxvlm.parallel.strategies import resolve
from jaxvlm.plan import chips, machine, memory, question, report, search, ways
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.memory import Setup
from jaxvlm.plan.question import Question
from jaxvlm.plan.rough import Rough, Step
from jaxvlm.plan.time import StepTime, step_time
from jaxvlm.plan.ways import Way
from jaxvlm.types import Batch, Pairs

if TYPE_CHECKING:
    from jaxvlm.build.run import Run

AUTO = "auto"
_SMALL = 50_000_000
"""Parameters below which a CPU's run is counted by formula: a trace would take as long as steps."""


class Foreseen(NamedTuple):
    """What a run's step will need, said before it."""

    setup: Setup
    states: dict[str, float]
    """Bytes of a device."""
    work: dict[str, float]
    exact: bool
    """Memory is from the step's trace."""
    time: StepTime | None
    """``None``: rates of this machine are not known."""

    @property
    def peak(self) -> float:
        """Bytes of a device."""
        return sum(self.states.values()) + sum(self.work.values())

    def line(self) -> str:
        """For people."""
        parts = {**self.states, "work": sum(self.work.values())}
        shown = ", ".join(f"{name} {report.gib(n)}" for name, n in parts.items() if n)
        about = "" if self.exact else "about "
        text = f"planned: {about}{report.gib(self.peak)} a device ({shown})"
        if self.time is None:
            return f"{text}; no step time: this machine's rates are not known (plan --calibrate)"
        mfu = f", MFU {self.time.mfu:.0%}" if self.time.mfu else ""
        return f"{text}; {report.seconds(self.time.total)} a step{mfu}, bound by {self.time.bound}"


def machine_of(devices: Sequence[Any], dtype: str) -> Machine:
    """The planner's machine of a run's devices: their chip, and which of them fast links join.

    Raises:
        ConfigError: its chip, or how they are joined, is none that the planner knows.
    """
    kind, count = devices[0].device_kind, len(devices)
    if devices[0].platform == "cpu":
        return machine.parse(f"cpu:{count}", dtype)
    slow = count > 1 and re.search("pcie", kind, re.IGNORECASE)  # the same chip without its links
    chip = None if slow else chips.lookup(kind, dtype)
    for name in machine.names():
        if chip is None or name == "cpu":
            continue
        if machine.parse(f"{name}:{_least(name)}", dtype).chip.name == chip.name:
            return _joined(name, devices, dtype)
    raise ConfigError(f"{kind}: the planner does not know this chip")


def _joined(name: str, devices: Sequence[Any], dtype: str) -> Machine:
    """So many of a kind in the slices or hosts that the devices say they are in."""
    is_tpu = devices[0].platform == "tpu"
    # JAX numbers a GPU's host as a slice too, so that a process of each GPU is no host of its own.
    marks = ("slice_index",) if is_tpu else ("slice_index", "process_index")
    refused: list[ConfigError] = []
    for mark in marks:
        own = collections.Counter(getattr(d, mark, d.process_index) for d in devices)
        try:
            return _of_groups(name, list(own.values()), is_tpu, dtype)
        except ConfigError as error:
            refused.append(error)
    raise refused[-1]


def _of_groups(name: str, sizes: list[int], is_tpu: bool, dtype: str) -> Machine:
    groups, size = len(sizes), sizes[0]
    if len(set(sizes)) > 1:
        raise ConfigError(f"{name}: groups of {sizes} devices; the planner knows equal ones")
    if is_tpu:
        return machine.parse(f"{groups}x{name}:{size}" if groups > 1 else f"{name}:{size}", dtype)
    one = machine.parse(f"{name}:{size}", dtype)
    if one.slices > 1:
        raise ConfigError(f"{size} x {name} in one host; the planner knows hosts of {one.a_host}")
    if groups == 1:
        return one
    unknown = () if one.network else (f"{one.chip.name}: network",)
    return one._replace(
        devices=groups * size, hosts=groups * one.hosts, slices=groups,
        missing=one.missing + unknown,
    )  # fmt: skip


def _least(name: str) -> int:
    """Devices of the smallest machine of a kind."""
    for count in (1, 2, 4, 8):
        try:
            machine.parse(f"{name}:{count}")
        except ConfigError:
            continue
        return count
    return 1


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
        raise ConfigError(f"{what}: the planner failed ({_line(error)}); set it") from error
    if not found.best:
        near = found.nearest
        least = f"; {near.way.text()} needs {report.gib(near.peak)}" if near else ""
        raise ConfigError(
            f"{what}: nothing that fits is left on {len(devices)} x {there.name}, "
            f"{report.gib(search.capacity(asked))} usable each{least}"
        )
    best = found.best[0]
    say(f"planner ({', '.join(left)}): {best.way.text()}, {report.gib(best.peak)} a device")
    return _with(config, best.way, left)


def _check_known(there: Machine) -> None:
    """Refuse to choose by times that leave out what is not known."""
    if there.missing:
        advice = "run jaxvlm plan --calibrate once, or " if there.platform == "cpu" else ""
        raise ConfigError(f"rates are not known ({there.missing[0].split(';')[0]}); {advice}set it")


def _check_auto(config: TrainConfig, left: list[str], what: str) -> None:
    """Refuse what is not known, and settings of what is to be chosen."""
    if why := _unknown(config):
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


def _line(error: Exception) -> str:
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


def _unknown(config: TrainConfig) -> str:
    """What of a run's settings the planner does not know; "" where it knows all."""
    kept = "visual tokens that are kept" if config.cache.policy != "off" else ""
    return question.unknown(config) or kept


def foresee(run: Run, local: Batch | Pairs) -> Foreseen | str:
    """What a run's step will need, or why that is not known.

    Args:
        run: built.
        local: rows of a batch.
    """
    if (why := _unknown(run.config)) or not isinstance(local, Batch):
        return f"not planned: {why or 'pairs'}: only training on tokens, on one mesh, is known yet"
    config, device = run.config, run.mesh.devices.flat[0]
    pictures = 0 if local.image_start is None else local.image_start.shape[-1]
    lengths, patches = zip(*run.dataset.row_shapes)  # those of later rows may be larger
    setup = Setup(
        config.model, config.mesh, config.strategy, device.platform, config.data.batch_size,
        max(lengths), pictures, max(patches), config.optim.frozen, config.microbatches,
    )  # fmt: skip
    try:
        return _counted(run, setup)
    except ConfigError as error:
        return f"not planned: {error}"
    except Exception as error:  # a figure that can't be told must not end the run that it is of
        return f"not planned: {_line(error)}"


def _counted(run: Run, setup: Setup) -> Foreseen:
    there = machine_of(list(run.mesh.devices.flat), setup.config.dtype)
    takes = step_time(setup, there)
    time = takes if takes.total and not there.missing else None
    size = sum(math.prod(x.shape) for x in run.model.shapes.values())
    if setup.platform != "cpu" or size > _SMALL:
        found = memory.estimate(setup)
        states = {name: float(n) for name, n in found.states.items()}
        return Foreseen(setup, states, dict(found.work), True, time)
    vision = setup.config.vision
    patches = setup.patches or setup.pictures * (vision.image_size // vision.patch_size) ** 2
    rough = Rough(run.model, setup.frozen, setup.length, patches, setup.platform)
    states = {name: float(n) for name, n in memory.states(setup, run.model).items()}
    step = Step(setup.mesh, setup.strategy, setup.config.decoder.remat, setup.microbatches,
                setup.rows)  # fmt: skip
    known = sum(n for name, n in states.items() if name != "batch")
    return Foreseen(setup, states, {"work": rough.total(step) - known}, False, time)


def beside(foreseen: Foreseen | str, memory_peak: int, step_ms: list[float]) -> dict[str, Any]:
    """Planned figures beside those of the run: bytes of a device, seconds of a step.

    Args:
        foreseen: by :func:`foresee`.
        memory_peak: the compiler's; 0: not known.
        step_ms: of the run's lines; the first is left out, for its steps may have waited.
    """
    if isinstance(foreseen, str):
        return {}
    real = sorted(step_ms[1:] or step_ms)
    measured = real[len(real) // 2] / 1e3 if real else 0.0
    planned = foreseen.time.total if foreseen.time else 0.0
    return {
        "planned_bytes": round(foreseen.peak),
        "compiled_bytes": memory_peak,
        "planned_seconds": planned,
        "measured_seconds": measured,
    }


def beside_line(found: dict[str, Any]) -> str:
    """:func:`beside` for people."""
    sizes = [report.gib(found[name]) for name in ("planned_bytes", "compiled_bytes")]
    times = [report.seconds(found[name]) for name in ("planned_seconds", "measured_seconds")]
    sizes[1] = sizes[1] if found["compiled_bytes"] else "not known"
    times = [
        text if found[name] else "not known"
        for name, text in zip(("planned_seconds", "measured_seconds"), times)
    ]
    return (
        f"planned and real: {sizes[0]} and {sizes[1]} a device (the compiler's), "
        f"{times[0]} and {times[1]} a step"
    )


def instead(run: Run, foreseen: Foreseen | str) -> str:
    """:func:`cheapest` for a run; "" where it can't be said."""
    try:
        there = machine_of(list(run.mesh.devices.flat), run.config.network.dtype)
        return cheapest(foreseen, run.config, there)
    except Exception:  # it is told of an error, which it must not hide behind one of its own
        return ""


def cheapest(foreseen: Foreseen | str, config: TrainConfig, there: Machine) -> str:
    """What fills a device's memory, and the change that costs least time and makes room.

    Args:
        foreseen: of the run that was short of memory.
        config: of it.
        there: its machine.

    Returns:
        "" where the planner does not know the run, or the device's memory.
    """
    if isinstance(foreseen, str) or not there.chip.hbm_bytes:
        return ""
    setup = foreseen.setup
    data = dataclasses.replace(config.data, batch_size=setup.rows, max_length=setup.length)
    asked = Question(
        "this run", dataclasses.replace(config, data=data), there, setup.pictures, setup.patches,
        given=config,
    )  # fmt: skip
    now = Way(
        setup.strategy.name, setup.mesh, setup.strategy, setup.config.decoder.remat,
        setup.microbatches, "off", setup.config.vision.remat,
    )  # fmt: skip
    parts = sorted(foreseen.work.items(), key=lambda item: -item[1])[:4]
    shown = ", ".join(f"{name} {report.gib(n)}" for name, n in [*foreseen.states.items(), *parts])
    text = f"planned: {report.gib(foreseen.peak)} of {report.gib(there.chip.hbm_bytes)}: {shown}"
    if plan := _smaller(asked, now, foreseen.peak):
        return f"{text}. The cheapest change: {_change(asked, now, plan)}"
    if foreseen.peak <= search.capacity(asked):
        return f"{text}: planned too low. Nothing that needs less is known: {_MORE}"
    return f"{text}. Nothing else fits: {_MORE}"


_MORE = "more devices, a smaller batch or length"


def _smaller(asked: Question, now: Way, peak: float) -> search.Plan | None:
    """The fastest that fits and needs clearly less than ``peak``, on the same mesh if there is one.

    Where the plan was too low for the run, what needs as much would not do either, however fast.
    """
    known = search.Memory(asked)
    for among in (list(ways.of_mesh(asked, now.mesh, now.strategy)), None):
        for share in _LESS:

            def less(way: Way, share: float = share) -> bool:
                return way.cache == "off" and known.about(way) < share * known.about(now)

            found = search.search(asked, 1, less, known, among)
            if found.best and found.best[0].peak < _LESS[0] * peak:
                return found.best[0]
    return None


_LESS = (0.95, 0.75, 0.5)
"""Shares of a run's memory, of which formulas say that a way needs less."""


def _change(asked: Question, now: Way, plan: search.Plan) -> str:
    before = set(ways.overrides(asked, now))
    changed = [line for line in ways.overrides(asked, plan.way) if line not in before]
    was = search.time_of(asked, now).total
    slower = f", {plan.time.total / was - 1:+.0%} time" if was else ""
    return f"{' '.join(changed)} ({report.gib(plan.peak)}{slower})"
