"""The parts of a training run: state, its shardings, and the compiled step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxvlm.build.losses import make_loss
from jaxvlm.build.model import Model
from jaxvlm.build.stages import cut, skips
from jaxvlm.config import (
    ConfigError,
    MeshConfig,
    StrategyConfig,
    TrainConfig,
    VisionConfig,
    feature_blocks,
)
from jaxvlm.models.lora import is_adapter
from jaxvlm.optim.optimizer import make_optimizer, split_frozen
from jaxvlm.optim.schedule import make_schedule
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.quantized import gather_in_bytes
from jaxvlm.parallel.reduce import ORDER, Reduction
from jaxvlm.parallel.schedule import timetable
from jaxvlm.parallel.sharding import HOST, constrain, follow, replicated, to_device
from jaxvlm.parallel.strategies import reduced_axes
from jaxvlm.plan import count
from jaxvlm.train.programs import Programs
from jaxvlm.train.runner import (
    Microbatched,
    OnOwnRows,
    Pipelined,
    PlainRunner,
    check_own_rows,
    check_parts,
)
from jaxvlm.train.step import Placement, init_state, make_step
from jaxvlm.types import Batch, Loss, Params, Runner, TrainState


@dataclasses.dataclass(frozen=True)
class Training:
    """A model with its optimizer and step."""

    model: Model
    step: Programs
    abstract: TrainState
    """ShapeDtypeStructs with shardings: what a checkpoint is restored onto."""
    learning_rate: Callable[[int], float]
    leaves: list[str]
    """Trainable parameters, sorted: the order of the step's ``bad_leaf``."""
    init: Callable[[Params], TrainState]
    """All parameters -> the first state; consumes them."""

    def flops_per_step(self, batch: Batch, scale: float) -> float:
        """Model FLOPs of a step (see ``jaxvlm.plan.count``).

        Args:
            batch: rows that stand for all, numpy.
            scale: rows of a step to these.
        """
        num_tokens = scale * float((np.asarray(batch.segment) > 0).sum())
        num_pictures, patches = count.pictures(batch)
        towers = ("vision", "connector", "decoder")
        owns = {path.split("/")[0] for path in self.leaves if not is_adapter(path)}
        adapted = {path.split("/")[0] for path in self.leaves if is_adapter(path)}
        trained = {tower: tower in owns for tower in towers}
        reach = count.reach(batch)
        one = count.forward(self.model.config, num_tokens, reach, scale * num_pictures, patches)
        return count.step(one, trained, adapted).total


def total_steps(config: TrainConfig, steps_per_epoch: Callable[[], int]) -> int:
    """Steps of the whole run.

    Raises:
        ConfigError: not exactly one of ``steps`` and ``epochs`` is set.
    """
    if (config.steps > 0) == (config.epochs > 0):
        raise ConfigError(
            f"set one of config.steps={config.steps} and config.epochs={config.epochs:g} "
            "above 0, the other to 0"
        )
    return config.steps or math.ceil(config.epochs * steps_per_epoch())


def build_training(
    config: TrainConfig, model: Model, steps: int, say: Callable[[str], None]
) -> Training:
    """The optimizer, the step and the shardings of its state; allocates nothing.

    Args:
        config: of the run.
        model: on its mesh.
        steps: of the whole run.
        say: takes lines for people.

    Raises:
        ConfigError: an unknown loss, patterns that match nothing, or a schedule that does not
            fit ``steps``.
    """
    trainable, _ = _split(model, model.shapes, config.optim.frozen)
    if not trainable:
        raise ConfigError("config.optim.frozen freezes every parameter; nothing would be trained")
    schedule = make_schedule(config.optim, steps)
    tx = make_optimizer(
        config.optim,
        schedule,
        {p: model.logical[p] for p in trainable},
        _used_layers(config.model.vision),
    )
    loss = make_loss(config)
    check_parts(config.microbatches, loss, config.data.batch_size)
    check_own_rows(config.strategy.reduce_bits, loss)
    shards = batch_shards(model.mesh)
    if config.data.batch_size % (config.microbatches * shards):
        raise ConfigError(
            f"config.microbatches={config.microbatches} on {shards} data shards does not divide "
            f"data.batch_size={config.data.batch_size}: each part needs a row for every shard"
        )
    parts = (loss, tx, config.microbatches, config.optim.frozen)
    if (stages := model.mesh.shape["stage"]) > 1:
        say(_pipeline_line(model.strategies["decoder"], stages, config.microbatches))
    step, abstract, init = assemble(model, *parts)
    return Training(
        model,
        Programs(step, say),
        abstract,
        lambda step: float(schedule(jnp.asarray(step))),
        sorted(trainable),
        init,
    )


def _pipeline_line(strategy: StrategyConfig, stages: int, parts: int) -> str:
    table = timetable(strategy.schedule, stages, parts, strategy.chunks)
    return (
        f"pipeline {strategy.schedule}: {stages} stages, {parts} microbatches, {table.kept} units "
        f"in flight; stages are busy {table.busy:.0%} of the time (config.microbatches raises it)"
    )


def assemble(
    model: Model,
    loss: Loss,
    tx: optax.GradientTransformation,
    microbatches: int = 1,
    frozen: tuple[str, ...] = (),
) -> tuple[Any, TrainState, Callable[[Params], TrainState]]:
    """A step of any model, loss and optimizer under the model's strategy.

    Args:
        model: on its mesh.
        loss: sums and weights.
        tx: over the trainable parameters, ``{path: array}``.
        microbatches: parts that a batch's gradient is summed over.
        frozen: path patterns of parameters that stay as they are.

    Returns:
        The jitted step ``(state, batch) -> (state, metrics)``; its state as ShapeDtypeStructs with
        shardings; and what makes the first state of all parameters, consuming them.
    """
    here, moments = model.mesh, model.layout("optimizer")
    runner, reduction = _runner(model, microbatches), _reduction(model, microbatches)
    own, still = _split(model, model.shapes, frozen)

    def first(params: Params, frozen: Params) -> TrainState:
        return init_state(params, frozen, tx, reduction.init(params) if reduction else {})

    shapes = jax.eval_shape(first, own, still)
    everywhere: Any = jax.tree.map(lambda _: replicated(here), shapes)
    between = {
        path: where.with_memory_kind(HOST) if "optimizer" in model.strategy(path).offload else where
        for path, where in moments.items()
    }
    shardings: TrainState = everywhere._replace(
        params={path: model.shardings[path] for path in own},
        frozen={path: model.shardings[path] for path in still},
        opt_state=follow(shapes.opt_state, between, here),
        comm={path: reduction.where(path) for path in shapes.comm} if reduction else {},
    )
    place = Placement(_gathering(model), constrain(moments))
    if between != moments:
        place = place._replace(moments=to_device)
    if reduction:
        runner = OnOwnRows(runner, here, reduction.axes)
        place = place._replace(reduce=reduction)
    step = make_step(runner, loss, tx, place)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )

    def init(params: Params) -> TrainState:
        make = jax.jit(first, out_shardings=shardings, donate_argnums=(0, 1))
        return make(*_split(model, params, frozen))

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(here)))
    return jitted, abstract, init


def _runner(model: Model, parts: int) -> Runner:
    plain = PlainRunner(model.apply)
    of_decoder = model.strategies.get("decoder")
    if model.mesh.shape["stage"] > 1 and of_decoder:
        how = (of_decoder.schedule, of_decoder.chunks, parts, skips(model.mesh))
        return Pipelined(plain, cut(model), model.mesh, *how)
    if parts > 1:
        return Microbatched(plain, parts, constrain(model.layout("gradients")))
    return plain


def _reduction(model: Model, parts: int) -> Reduction | None:
    """How gradients are added up behind the backward pass; ``None``: the compiler adds them.

    It does so once a microbatch. With several it is left to do it where their sum is split, or
    parameters are: XLA's partitioner aborts over weights split by fsdp and tensor where data is
    out of its hands (jaxlib 0.10.2).

    Raises:
        ConfigError: towers that do not agree, or few bits where each microbatch's sum is split, or
            where the partitioner would abort.
    """
    towers = list(model.strategies.values())
    if len({(s.reduce_bits, s.error_feedback) for s in towers}) > 1:
        raise ConfigError("strategy.reduce_bits and error_feedback are the same for all towers")
    bits, feedback = towers[0].reduce_bits, towers[0].error_feedback
    sizes = MeshConfig(**model.mesh.shape)
    axes = tuple(a for a in ORDER if all(a in reduced_axes(s, sizes) for s in towers))
    if bits < 32 and not axes:
        raise ConfigError(
            f"config.strategy.reduce_bits={bits}: no batch axis has gradients of all towers to add "
            "up behind the backward pass"
        )
    split = {axis for s in towers for axis in s.gradients} & set(axes)
    layered = [a for a in ORDER if getattr(sizes, a) > 1 and a not in axes]
    if bits == 32:
        axes = () if parts == 1 or layered or split else axes
    elif layered and (sizes.tensor > 1 or sizes.context > 1):
        raise ConfigError(
            f"config.strategy.reduce_bits={bits} with parameters gathered layer by layer over "
            f"{layered[0]} does not go with config.mesh.tensor={sizes.tensor}, "
            f"context={sizes.context}; 'zero1' and 'zero2' do"
        )
    elif parts > 1 and split:
        raise ConfigError(
            f"config.strategy.reduce_bits={bits} with config.microbatches={parts}: microbatches "
            f"would be added up whole, and gradients={towers[0].gradients} says they are split; "
            "'zero1' and 'ddp' keep them whole"
        )
    return Reduction(model.mesh, axes, model.layout("optimizer"), bits, feedback) if axes else None


def _gathering(model: Model) -> Callable[[Params], Params]:
    """What a step does with parameters before its first layer."""
    stored, whole = model.shardings, model.layout("gathered")
    moved = {
        path
        for path, x in model.shapes.items()
        if not stored[path].is_equivalent_to(whole[path], len(x.shape))
    }
    eight = {path for path in moved if model.strategy(path).gather_bits == 8}
    pin, as_bytes = constrain(whole), gather_in_bytes(stored, whole)

    def gather(params: Params) -> Params:
        plain = {path: x for path, x in params.items() if path in moved - eight}
        small = {path: x for path, x in params.items() if path in eight}
        return {**params, **pin(plain), **as_bytes(small)}

    return gather


def _split(model: Model, params: Params, patterns: tuple[str, ...]) -> tuple[Params, Params]:
    """``(trainable, frozen)``: with adapters, all but they are frozen."""
    trainable, frozen = split_frozen(params, patterns)
    if not model.adapted:
        return trainable, frozen
    frozen |= {path: x for path, x in trainable.items() if not is_adapter(path)}
    return {path: x for path, x in trainable.items() if is_adapter(path)}, frozen


def _used_layers(vision: VisionConfig) -> dict[str, int]:
    """What of the tower is run on the way to visual tokens, where that is not all."""
    used, run = {}, max(feature_blocks(vision))
    if run < vision.depth:
        used["vision/stack/*"] = run
    if vision.pool == "attention":
        used["vision/head/*"] = 0
    return used
