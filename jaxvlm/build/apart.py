"""A vision tower on devices of its own: its part of a model, and the step on both meshes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxvlm.build.assemble import Assembled, assemble, placement, split, state_of
from jaxvlm.build.model import Model
from jaxvlm.build.noise import learning
from jaxvlm.build.parts import rest_of, tower_part
from jaxvlm.build.runners import runner_of
from jaxvlm.config import ConfigError, ModelConfig, TowerConfig, refuse_unread
from jaxvlm.parallel import schedule
from jaxvlm.parallel.mesh import batch_shards, make_mesh
from jaxvlm.parallel.sharding import batch_sharding, constrain, replicated, to_global
from jaxvlm.parallel.strategies import resolve
from jaxvlm.train import apart
from jaxvlm.train import noise as noises
from jaxvlm.train.apart import Sides, is_tower
from jaxvlm.types import Batch, Loss, Params, TrainState


def devices_of(
    config: TowerConfig, devices: Sequence[jax.Device]
) -> tuple[list[jax.Device], list[jax.Device]]:
    """The tower's own devices, none where it has none, and the others.

    Raises:
        ConfigError: none would be left, or arrays cannot move between the two.
    """
    refuse_unread(config, "config.tower")
    count, where = config.devices, f"config.tower.devices={config.devices}"
    if not 0 <= count < len(devices):
        raise ConfigError(
            f"{where} of {len(devices)} devices: 0 (the tower is on config.mesh), -1 (as "
            "many as its share of the work), or so many that some are left for the decoder"
        )
    if count and jax.process_count() > 1:
        raise ConfigError(
            f"{where} with {jax.process_count()} processes: features would go from one process's "
            "devices to another's between programs, which JAX does on some platforms alone and as "
            "an experiment; leave it at 0 (the tower is on config.mesh), or start one process"
        )
    return list(devices[:count]), list(devices[count:])


def tower_of(
    model: Model[ModelConfig], config: TowerConfig, devices: Sequence[jax.Device]
) -> Model[ModelConfig]:
    """The model's vision tower on a mesh of ``devices``; allocates nothing.

    Raises:
        ConfigError: a mesh or a strategy that a tower cannot have.
    """
    for name in ("whole", "error_feedback"):
        if getattr(config.strategy, name):
            raise ConfigError(f"config.tower.strategy.{name} is not read: a tower is one tower")
    if config.strategy.reduce_bits != 32:
        raise ConfigError("config.tower.strategy.reduce_bits: a tower of its own sends 32 alone")
    if config.strategy.context != "gather" and not model.config.vision.packed:
        raise ConfigError(
            f"config.tower.strategy.context={config.strategy.context!r} is not read: this tower "
            "takes pictures one by one, and they are dealt over context"
        )
    try:
        if config.strategy.name == "single" and len(devices) > 1:
            raise ConfigError(
                "config.strategy.name='single' runs on one device, and "
                f"config.tower.devices={len(devices)}: take 1, or another name, as 'ddp'"
            )
        sizes, strategy = resolve(config.strategy, config.mesh, devices)
        for axis in ("stage", "expert"):
            if getattr(sizes, axis) > 1:
                raise ConfigError(f"config.mesh.{axis} is of a decoder's layers; a tower has none")
        mesh = make_mesh(sizes, devices[:1] if strategy.name == "single" else devices)
        return tower_part(model, mesh, strategy)
    except ConfigError as error:
        text = str(error).replace("config.mesh", "config.tower.mesh")
        text = text.replace("config.strategy", "config.tower.strategy")
        raise ConfigError(text) from error


def assemble_apart(
    model: Model[ModelConfig],
    tower: Model[ModelConfig],
    loss: Loss,
    tx: optax.GradientTransformation,
    microbatches: int = 1,
    frozen: tuple[str, ...] = (),
    wave: int = 0,
    seed: int = 0,
) -> Assembled:
    """A step on two meshes; see :mod:`jaxvlm.train.apart`.

    Args:
        model: the whole, on the mesh of all that is no tower.
        tower: of :func:`tower_of`.
        loss: sums and weights.
        tx: over the trainable parameters; works on some of them if it is told the gradients'
            ``global_norm``, as that of ``make_optimizer`` does.
        microbatches: parts that a batch's gradient is summed over.
        frozen: path patterns of parameters that stay as they are.
        wave: microbatches that enter a pipeline at once; 0: see ``schedule.wave``.
        seed: of what is dropped.

    Raises:
        ConfigError: a strategy that does not go with a tower that learns elsewhere.
    """
    if "vision" in model.strategies["decoder"].whole:
        raise ConfigError(
            "config.strategy.whole names 'vision', and config.tower.devices takes it elsewhere: "
            "config.tower.strategy says what is split there ('ddp': nothing)"
        )
    own, still = split(model, model.shapes, frozen)
    model, drops = learning(model, own)
    tower, rest = dataclasses.replace(tower, noisy=model.noisy), rest_of(model)
    sides = Sides(tower, rest)
    made = [state_of(m, tx, *split(m, m.shapes, _literal(still, m))) for m in sides]
    states = Sides(*(state for state, _ in made))
    abstract = apart.join(states.rest, states.tower)

    def init(params: Params) -> TrainState:
        found = []
        for side, (_, first) in zip(sides, made):
            here = {p: jax.device_put(params.pop(p), side.shardings[p]) for p in side.shapes}
            found.append(first(*split(side, here, _literal(still, side))))
        return apart.join(found[1], found[0])

    def place(local: Batch, count: int) -> Batch:
        seen = {"pixels": local.pixels, "patches": local.patches}
        others = local._replace(pixels=None, patches=None)
        there = to_global(tower.mesh, Batch(None, None, None, None)._replace(**seen), count)
        return to_global(rest.mesh, others, count)._replace(
            pixels=there.pixels, patches=there.patches
        )

    def params(state: TrainState) -> Params:
        both = {**state.params, **state.frozen}
        return {p: jax.device_put(x, model.shardings[p]) for p, x in both.items()}

    if any(is_tower(path) for path in own):
        _check_trained(model)
        group = wave_of(model, microbatches, wave)
        step: apart.Step = _trained(sides, tx, states, loss, microbatches, group)
        if drops:
            step = _with_noise(step, seed)
    else:
        if wave:
            raise ConfigError(f"config.tower.wave={wave} is not read: this tower does not learn")
        if tower.strategies["vision"].offload:
            raise ConfigError(
                "config.tower.strategy.offload: a tower that is frozen has no moments"
            )
        run = assemble(rest, loss, tx, microbatches, _literal(still, rest), seed=seed)[0]
        step = _frozen(sides, run, microbatches)
    return Assembled(step.compiled, abstract, init, place, params)


def _with_noise(step: apart.Step, seed: int) -> apart.Step:
    """The step with a program that gives rows the keys of their dropout."""
    run = jax.jit(noises.seeded(seed), out_shardings=step.rows.rest)
    return dataclasses.replace(step, programs={**step.programs, "noise": run})


def _literal(still: Mapping[str, Any], side: Model) -> tuple[str, ...]:
    return tuple(path for path in still if path in side.shapes)


def wave_of(model: Model, parts: int, wave: int) -> int:
    """How many of ``parts`` microbatches the rest takes at once behind a tower that learns.

    Args:
        model: on the rest's mesh.
        parts: of a batch.
        wave: what is asked for; 0: see ``schedule.wave``.

    Raises:
        ConfigError: a wave that does not fit, or without stages.
    """
    stages, chunks = model.mesh.shape["stage"], model.strategies["decoder"].chunks
    best = schedule.wave(stages, parts, chunks)
    if wave and stages == 1:
        raise ConfigError(f"config.tower.wave={wave} is not read with config.mesh.stage=1")
    if wave < 0 or (wave and parts % wave) or (chunks > 1 and wave % stages):
        raise ConfigError(
            f"config.tower.wave={wave} does not divide config.microbatches={parts}"
            + (f", or is no multiple of config.mesh.stage={stages}" if chunks > 1 else "")
            + f"; {best} would do"
        )
    return wave or best


def _check_trained(model: Model) -> None:
    if (bits := model.strategies["decoder"].reduce_bits) != 32:
        raise ConfigError(
            f"config.strategy.reduce_bits={bits} with config.tower.devices and a "
            "tower that learns: gradients are added up by the compiler there; leave it at 32"
        )


def _ways(sides: Sides) -> tuple[Sides, Sides, Sides]:
    """Shardings of batches, of what every device has, and of what travels; see ``apart.Step``."""
    rows = Sides(*(batch_sharding(side.mesh) for side in sides))
    # With stages, devices that have the same rows are neighbours inside of data alone.
    parts = [
        side.mesh.shape["data"] if side.mesh.shape["stage"] > 1 else batch_shards(side.mesh)
        for side in sides
    ]
    common, between = math.gcd(*parts), []
    for side in sides:
        devices = side.mesh.devices.reshape(common, -1)
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.sharding.Mesh(devices, ("part", "copy"), axis_types=auto)
        between.append(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("part")))
    return rows, Sides(*(replicated(side.mesh) for side in sides)), Sides(*between)


def _encoder(tower: Model[ModelConfig]) -> Callable[[Params, Batch], Any]:
    return lambda params, taken: tower.module(params, taken.noise)(taken)


def _frozen(sides: Sides, step: Any, parts: int) -> apart.Frozen:
    gathered, apply = placement(sides.tower).gathered, _encoder(sides.tower)
    ways = _ways(sides)

    def encode(params: Params, taken: Batch) -> Any:
        return apart.encode(apply, gathered(params), taken, parts)

    run = jax.jit(encode, out_shardings=ways[2].tower)
    return apart.Frozen({"encode": run, "step": step}, *ways)


def _trained(
    sides: Sides,
    tx: optax.GradientTransformation,
    states: Sides,
    loss: Loss,
    parts: int,
    group: int,
) -> apart.Trained:
    make = apart.Pieces(
        _encoder(sides.tower),
        runner_of(sides.rest, group),
        loss,
        tx,
        Sides(*(placement(side) for side in sides)),
        Sides(*(constrain(side.layout("gradients")) for side in sides)),
        batch_sharding(sides.rest.mesh),
        parts // group,
        group,
    )
    rows, whole, between = _ways(sides)
    lie = Sides(*(jax.tree.map(lambda x: x.sharding, state) for state in states))
    sums = Sides(
        *({p: side.layout("gradients")[p] for p in s.params} for side, s in zip(sides, states))
    )
    carry = (whole.rest, sums.rest)
    programs = {
        "encode": jax.jit(make.encode, out_shardings=between.tower),
        "begin": jax.jit(make.begin, out_shardings=(whole.rest, carry)),
        "zeros": jax.jit(make.zeros, out_shardings=sums.tower),
        "gradients": jax.jit(
            make.gradients, out_shardings=(carry, between.rest), donate_argnums=(5, 6)
        ),
        "backward": jax.jit(make.backward, out_shardings=sums.tower, donate_argnums=5),
        "norms": jax.jit(make.norms, out_shardings=whole.rest),
        "squares": jax.jit(make.squares, out_shardings=whole.tower),
        "update": jax.jit(
            make.update,
            out_shardings=(lie.tower.params, lie.tower.opt_state),
            donate_argnums=(0, 1),
        ),
        "finish": jax.jit(make.finish, out_shardings=(lie.rest, whole.rest), donate_argnums=0),
    }
    return apart.Trained(programs, rows, whole, between, waves=parts // group)
