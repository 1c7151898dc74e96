"""Disaggregated vision encoder: the encoder on devices of its own, and the step on both meshes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxvlm.config import ConfigError, EncoderConfig, ModelConfig, refuse_unread
from jaxvlm.parallel import transfer
from jaxvlm.parallel.mesh import batch_shards, make_mesh
from jaxvlm.parallel.pipeline import schedule
from jaxvlm.parallel.sharding import (
    batch_sharding,
    constrain,
    replicated,
    to_global,
)
from jaxvlm.parallel.strategies import resolve
from jaxvlm.spmd.dropout import without_frozen_dropout
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.runners import runner_of
from jaxvlm.spmd.submodels import vision_encoder_part, without_vision_encoder
from jaxvlm.spmd.train_step import Assembled, assemble, placement, split, state_of
from jaxvlm.train import disaggregated
from jaxvlm.train.disaggregated import EncoderAndRest
from jaxvlm.train.dropout_keys import seeded
from jaxvlm.types import Batch, Loss, Params, TrainState, trains_vision


def divide_devices(config: EncoderConfig, devices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the devices of the encoder, possibly none, and the others.

    Raises:
        ConfigError: no devices would be left, or arrays cannot move between the two meshes.
    """
    refuse_unread(config, "config.encoder")
    count, where = config.devices, f"config.encoder.devices={config.devices}"
    if not 0 <= count < len(devices):
        raise ConfigError(
            f"{where} of {len(devices)} devices: set 0 (the encoder is on config.mesh), -1 (its "
            "share of the FLOPs), or fewer than all, so that some are left for the decoder"
        )
    groups = transfer.of_processes(devices)
    share, rest = divmod(count, len(groups))
    if rest or len({len(group) for group in groups}) > 1 or (count and share >= len(groups[0])):
        each = f"{len(groups)} processes with {', '.join(str(len(group)) for group in groups)}"
        raise ConfigError(
            f"{where} of {each} devices: each process gives the encoder as many, so that features "
            f"stay in their process; set a multiple of {len(groups)} that leaves each process some"
        )
    return (
        [device for group in groups for device in group[:share]],
        [device for group in groups for device in group[share:]],
    )


def encoder_on_devices(
    model: Model[ModelConfig], config: EncoderConfig, devices: Sequence[jax.Device]
) -> Model[ModelConfig]:
    """Return the model's vision encoder on a mesh of ``devices``; allocates nothing.

    Raises:
        ConfigError: a mesh or a strategy that an encoder cannot have.
    """
    for name in ("replicated", "error_feedback"):
        if getattr(config.strategy, name):
            raise ConfigError(
                f"config.encoder.strategy.{name} is not read for a disaggregated encoder; leave it "
                "out"
            )
    if (dtype := config.strategy.grad_reduce_dtype) != "float32":
        raise ConfigError(
            f"config.encoder.strategy.grad_reduce_dtype={dtype!r}: a disaggregated "
            "encoder reduces gradients in float32 only; leave it at 'float32'"
        )
    if config.strategy.context != "gather" and not model.config.vision.packed:
        raise ConfigError(
            f"config.encoder.strategy.context={config.strategy.context!r} is not read: this "
            "encoder takes images one by one, and images are split over the context axis"
        )
    try:
        if config.strategy.name == "single" and len(devices) > 1:
            raise ConfigError(
                "config.strategy.name='single' runs on one device, and "
                f"config.encoder.devices={len(devices)}: set 1, or another name such as 'ddp'"
            )
        sizes, strategy = resolve(config.strategy, config.mesh, devices)
        for axis in ("pipeline", "expert"):
            if getattr(sizes, axis) > 1:
                raise ConfigError(
                    f"config.mesh.{axis}={getattr(sizes, axis)} splits a decoder's layers, and an "
                    "encoder has none; leave it at 1"
                )
        mesh = make_mesh(sizes, devices[:1] if strategy.name == "single" else devices)
        return vision_encoder_part(model, mesh, strategy)
    except ConfigError as error:
        text = str(error).replace("config.mesh", "config.encoder.mesh")
        text = text.replace("config.strategy", "config.encoder.strategy")
        raise ConfigError(text) from error


def assemble_disaggregated(
    model: Model[ModelConfig],
    encoder: Model[ModelConfig],
    loss: Loss,
    tx: optax.GradientTransformation,
    microbatches: int = 1, frozen: tuple[str, ...] = (), in_flight: int = 0, seed: int = 0,
) -> Assembled:  # fmt: skip
    """Build a step on two meshes; see :mod:`jaxvlm.train.disaggregated`.

    Args:
        model: the full model, on the mesh of everything but the encoder.
        encoder: that of :func:`encoder_on_devices`.
        loss: the loss, as sums and weights.
        tx: the optimizer over the trainable parameters; must work on a part of them when given the
            gradients' ``global_norm``, as that of ``make_optimizer`` does.
        microbatches: number of microbatches for gradient accumulation or a pipeline.
        frozen: path patterns of frozen parameters.
        in_flight: microbatches that enter a pipeline together; 0: see
            ``schedule.best_microbatches_in_flight``.
        seed: seed of dropout.

    Raises:
        ConfigError: a strategy that cannot be combined with a trained, disaggregated encoder.
    """
    if "vision" in model.strategies["decoder"].replicated:
        raise ConfigError(
            "config.strategy.replicated names 'vision', which config.encoder.devices puts on "
            "devices of its own; set config.encoder.strategy instead ('ddp' replicates it)"
        )
    trainable, fixed = split(model, model.shapes, frozen)
    model, drops = without_frozen_dropout(model, trainable)
    encoder, rest = (
        dataclasses.replace(encoder, has_dropout=model.has_dropout),
        without_vision_encoder(model),
    )
    models = EncoderAndRest(encoder, rest)
    parts = [state_of(m, tx, *split(m, m.shapes, _literal(fixed, m))) for m in models]
    states = EncoderAndRest(*(state for state, _ in parts))
    abstract = disaggregated.join(states.rest, states.encoder)

    def init(params: Params) -> TrainState:
        states = []
        for one, (_, first) in zip(models, parts):
            placed = {p: transfer.move(params.pop(p), one.shardings[p]) for p in one.shapes}
            states.append(first(*split(one, placed, _literal(fixed, one))))
        return disaggregated.join(states[1], states[0])

    def place(local: Batch, count: int) -> Batch:
        images = {"pixels": local.pixels, "patches": local.patches}
        others = local._replace(pixels=None, patches=None)
        placed = to_global(encoder.mesh, Batch(None, None, None, None)._replace(**images), count)
        return to_global(rest.mesh, others, count)._replace(
            pixels=placed.pixels, patches=placed.patches
        )

    def params(state: TrainState) -> Params:
        both = {**state.params, **state.frozen}
        return {p: transfer.move(x, model.shardings[p]) for p, x in both.items()}

    if trains_vision(trainable):
        _check_trained(model)
        group = microbatches_in_flight(model, microbatches, in_flight)
        step: disaggregated.DisaggregatedStep = _trained(
            models, tx, states, loss, microbatches, group
        )
        if drops:
            step = _with_dropout_keys(step, seed)
    else:
        if in_flight:
            raise ConfigError(
                f"config.encoder.microbatches_in_flight={in_flight} is not read: this encoder is "
                "frozen; leave it at 0"
            )
        if encoder.strategies["vision"].offload:
            raise ConfigError(
                "config.encoder.strategy.offload: a frozen encoder has no moments; leave it out"
            )
        run = assemble(rest, loss, tx, microbatches, _literal(fixed, rest), seed=seed)[0]
        step = _frozen(models, run, microbatches)
    return Assembled(step.compiled, abstract, init, place, params)


def _with_dropout_keys(
    step: disaggregated.DisaggregatedStep, seed: int
) -> disaggregated.DisaggregatedStep:
    """Add a program to the step that makes dropout keys."""
    run = jax.jit(seeded(seed), out_shardings=step.rows.rest)
    return dataclasses.replace(step, programs={**step.programs, "dropout_keys": run})


def _literal(fixed: Mapping[str, Any], one: Model) -> tuple[str, ...]:
    return tuple(path for path in fixed if path in one.shapes)


def microbatches_in_flight(model: Model, parts: int, in_flight: int) -> int:
    """Return how many microbatches the rest takes together after a trained encoder.

    Args:
        model: the model on the rest's mesh.
        parts: the number of microbatches of a batch.
        in_flight: the setting; 0: see ``schedule.best_microbatches_in_flight``.

    Raises:
        ConfigError: a setting that does not fit, or that is set without a pipeline.
    """
    stages, virtual = model.mesh.shape["pipeline"], model.strategies["decoder"].virtual_stages
    best = schedule.best_microbatches_in_flight(stages, parts, virtual)
    where = f"config.encoder.microbatches_in_flight={in_flight}"
    if in_flight and stages == 1:
        raise ConfigError(f"{where} is not read with config.mesh.pipeline=1")
    if in_flight < 0 or (in_flight and parts % in_flight) or (virtual > 1 and in_flight % stages):
        raise ConfigError(
            f"{where} does not divide config.microbatches={parts}"
            + (f", or is not a multiple of config.mesh.pipeline={stages}" if virtual > 1 else "")
            + f"; {best} would do"
        )
    return in_flight or best


def _check_trained(model: Model) -> None:
    if (dtype := model.strategies["decoder"].grad_reduce_dtype) != "float32":
        raise ConfigError(
            f"config.strategy.grad_reduce_dtype={dtype!r} with config.encoder.devices and a "
            "trained "
            "encoder: the compiler reduces gradients there; leave it at 'float32'"
        )


def _shardings(models: EncoderAndRest) -> tuple[EncoderAndRest, EncoderAndRest, EncoderAndRest]:
    """Return shardings of batches, of replicated values, and of transfers between the meshes.

    See :class:`jaxvlm.train.disaggregated.DisaggregatedStep`.
    """
    rows = EncoderAndRest(*(batch_sharding(one.mesh) for one in models))
    # In a pipeline, only data shards of the batch are contiguous in the order of devices.
    parts = [
        one.mesh.shape["data"] if one.mesh.shape["pipeline"] > 1 else batch_shards(one.mesh)
        for one in models
    ]
    common, between = math.gcd(*parts), []
    for one in models:
        devices = one.mesh.devices.reshape(common, -1)
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.sharding.Mesh(devices, ("part", "copy"), axis_types=auto)
        between.append(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("part")))
    return (
        rows,
        EncoderAndRest(*(replicated(one.mesh) for one in models)),
        EncoderAndRest(*between),
    )


def _apply(encoder: Model[ModelConfig]) -> Callable[[Params, Batch], Any]:
    return lambda params, images: encoder.module(params, images.dropout_keys)(images)


def _frozen(models: EncoderAndRest, step: Any, parts: int) -> disaggregated.FrozenEncoder:
    gathered, apply = placement(models.encoder).all_gather, _apply(models.encoder)
    shardings = _shardings(models)

    def encode(params: Params, images: Batch) -> Any:
        return disaggregated.encode(apply, gathered(params), images, parts)

    run = jax.jit(encode, out_shardings=shardings[2].encoder)
    return disaggregated.FrozenEncoder({"encode": run, "step": step}, *shardings)


def _trained(
    models: EncoderAndRest,
    tx: optax.GradientTransformation,
    states: EncoderAndRest,
    loss: Loss,
    parts: int,
    group: int,
) -> disaggregated.TrainedEncoder:
    make = disaggregated.EncoderPrograms(
        _apply(models.encoder),
        runner_of(models.rest, group),
        loss,
        tx,
        EncoderAndRest(*(placement(one) for one in models)),
        EncoderAndRest(*(constrain(one.layout("gradients")) for one in models)),
        batch_sharding(models.rest.mesh),
        parts // group,
        group,
    )
    rows, replicate, between = _shardings(models)
    stored = EncoderAndRest(*(jax.tree.map(lambda x: x.sharding, state) for state in states))
    sums = EncoderAndRest(
        *({p: one.layout("gradients")[p] for p in s.params} for one, s in zip(models, states))
    )
    carry = (replicate.rest, sums.rest)
    programs = {
        "encode": jax.jit(make.encode, out_shardings=between.encoder),
        "begin": jax.jit(make.begin, out_shardings=(replicate.rest, carry)),
        "zeros": jax.jit(make.zeros, out_shardings=sums.encoder),
        "gradients": jax.jit(
            make.gradients, out_shardings=(carry, between.rest), donate_argnums=(5, 6)
        ),
        "backward": jax.jit(make.backward, out_shardings=sums.encoder, donate_argnums=5),
        "norms": jax.jit(make.norms, out_shardings=replicate.rest),
        "squares": jax.jit(make.squares, out_shardings=replicate.encoder),
        "update": jax.jit(
            make.update,
            out_shardings=(stored.encoder.params, stored.encoder.opt_state),
            donate_argnums=(0, 1),
        ),
        "finish": jax.jit(
            make.finish, out_shardings=(stored.rest, replicate.rest), donate_argnums=0
        ),
    }
    return disaggregated.TrainedEncoder(programs, rows, replicate, between, groups=parts // group)
