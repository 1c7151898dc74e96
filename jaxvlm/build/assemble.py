"""A step of any model, loss and optimizer, on the model's mesh and under its strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding

from jaxvlm.build.model import Model
from jaxvlm.build.noise import check_kept, learning
from jaxvlm.build.pairs import Chunks, pair_runner
from jaxvlm.build.parts import rest_of
from jaxvlm.build.runners import runner_of
from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.models.lora import is_adapter
from jaxvlm.optim.optimizer import split_frozen
from jaxvlm.parallel.quantized import gather_in_bytes
from jaxvlm.parallel.reduce import ORDER, Reduction
from jaxvlm.parallel.sharding import HOST, constrain, follow, replicated, to_device, to_global
from jaxvlm.parallel.strategies import reduced_axes
from jaxvlm.train import noise as noises
from jaxvlm.train.apart import is_tower
from jaxvlm.train.runner import OnOwnRows
from jaxvlm.train.step import NO_CACHE, Placement, init_state, make_step
from jaxvlm.types import Cache, Loss, Params, Runner, TrainState


class Assembled(NamedTuple):
    """A step, and what it is given."""

    build: Callable[[TrainState, Any], Any]
    """Compiles ``(state, batch) -> (state, metrics)`` for a state and a batch, or their shapes."""
    abstract: TrainState
    """ShapeDtypeStructs with shardings."""
    init: Callable[[Params], TrainState]
    """All parameters -> the first state; consumes them."""
    place: Callable[[Any, int], Any]
    """This process's rows, and how many a batch has -> the batch on its devices."""
    params: Callable[[TrainState], Params]
    """All parameters on the model's mesh."""
    cache: Cache = NO_CACHE


def assemble(
    model: Model,
    loss: Loss,
    tx: optax.GradientTransformation,
    microbatches: int = 1,
    frozen: tuple[str, ...] = (),
    cache: Cache | None = None,
    chunks: Chunks | None = None,
    seed: int = 0,
) -> tuple[Any, TrainState, Callable[[Params], TrainState]]:
    """A step of any model, loss and optimizer under the model's strategy.

    Args:
        model: on its mesh.
        loss: sums and weights.
        tx: over the trainable parameters, ``{path: array}``.
        microbatches: parts that a batch's gradient is summed over.
        frozen: path patterns of parameters that stay as they are.
        cache: of the model's visual tokens; ``None``: the model makes them as it runs.
        chunks: of queries and of documents, for a model of vectors that is trained on ``Pairs``;
            ``None``: it is trained on a ``Batch``.
        seed: of what is dropped.

    Returns:
        The jitted step ``(state, batch) -> (state, metrics)``; its state as ShapeDtypeStructs with
        shardings; and what makes the first state of all parameters, consuming them.
    """
    own, still = split(model, model.shapes, frozen)
    model, drops = learning(model, own)
    if cache is not None:
        check_kept(model)
    behind = cache is not None and any(is_tower(path) for path in own)
    parts = max(microbatches, 1 + any(any(chunk) for chunk in chunks or ()))
    reduction = None if behind else reduction_of(model, parts)
    run, cache = (rest_of(model), cache) if cache else (model, NO_CACHE)
    abstract, init = state_of(model, tx, own, still, reduction, cache)
    place = placement(model)
    if reduction:
        place = place._replace(reduce=reduction)
    if chunks is not None:
        runner: Runner = pair_runner(run, own, chunks, reduction.axes if reduction else ())
    elif reduction:
        runner = OnOwnRows(runner_of(run, microbatches), model.mesh, reduction.axes)
    else:
        runner = runner_of(run, microbatches)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    step = jax.jit(
        make_step(runner, loss, tx, place, cache, noises.seeded(seed) if drops else noises.none),
        donate_argnums=0,
        # Metrics are scalars; tokens that a cache gives lie as it says.
        out_shardings=(shardings, None if cache.gives else replicated(model.mesh)),
    )
    return step, abstract, lambda params: init(*split(model, params, frozen))


def together(
    model: Model,
    loss: Loss,
    tx: optax.GradientTransformation,
    microbatches: int,
    frozen: tuple[str, ...],
    cache: Cache | None = None,
    chunks: Chunks | None = None,
    seed: int = 0,
) -> Assembled:
    """The step on one mesh; see :func:`assemble`."""
    step, abstract, init = assemble(model, loss, tx, microbatches, frozen, cache, chunks, seed)
    return Assembled(
        lambda state, batch: step.lower(state, batch).compile(),
        abstract,
        init,
        lambda local, rows: to_global(model.mesh, local, rows),
        lambda state: {**state.params, **state.frozen},
        cache or NO_CACHE,
    )


def state_of(
    model: Model,
    tx: optax.GradientTransformation,
    own: Params,
    still: Params,
    reduction: Reduction | None = None,
    cache: Cache = NO_CACHE,
) -> tuple[TrainState, Callable[[Params, Params], TrainState]]:
    """The state as ShapeDtypeStructs with shardings, and what makes the first one.

    Args:
        model: on its mesh.
        tx: over ``own``.
        own: shapes of the trainable parameters.
        still: of the frozen ones.
        reduction: what keeps a state of its own.
        cache: likewise.

    Returns:
        The state, and a function of trainable and frozen parameters that consumes them.
    """
    here = model.mesh

    def first(params: Params, frozen: Params) -> TrainState:
        comm = reduction.init(params) if reduction else {}
        return init_state(params, frozen, tx, comm, cache.init())

    shapes = jax.eval_shape(first, own, still)
    everywhere: Any = jax.tree.map(lambda _: replicated(here), shapes)
    shardings: TrainState = everywhere._replace(
        params={path: model.shardings[path] for path in own},
        frozen={path: model.shardings[path] for path in still},
        opt_state=follow(shapes.opt_state, _between(model), here),
        comm={path: reduction.where(path) for path in shapes.comm} if reduction else {},
        cache=cache.shardings,
    )
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    return abstract, jax.jit(first, out_shardings=shardings, donate_argnums=(0, 1))


def _between(model: Model) -> dict[str, NamedSharding]:
    """Where moments lie between steps."""
    return {
        path: where.with_memory_kind(HOST) if "optimizer" in model.strategy(path).offload else where
        for path, where in model.layout("optimizer").items()
    }


def placement(model: Model) -> Placement:
    """Where a step pins what it computes."""
    moments = model.layout("optimizer")
    place = Placement(_gathering(model), constrain(moments))
    return place._replace(moments=to_device) if _between(model) != moments else place


def reduction_of(model: Model, parts: int) -> Reduction | None:
    """How gradients are added up behind the backward pass; ``None``: the compiler adds them.

    It does so once a microbatch. With several it is left to do it where their sum is split, or
    parameters are: XLA's partitioner aborts over weights split by fsdp and tensor where data is
    out of its hands (jaxlib 0.10.2).

    Args:
        model: on its mesh.
        parts: microbatches, or chunks of pairs.

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
    sums = {axis for s in towers for axis in s.gradients} & set(axes)
    layered = [a for a in ORDER if getattr(sizes, a) > 1 and a not in axes]
    if bits == 32:
        axes = () if parts == 1 or layered or sums else axes
    elif layered and (sizes.tensor > 1 or sizes.context > 1):
        raise ConfigError(
            f"config.strategy.reduce_bits={bits} with parameters gathered layer by layer over "
            f"{layered[0]} does not go with config.mesh.tensor={sizes.tensor}, "
            f"context={sizes.context}; 'zero1' and 'zero2' do"
        )
    elif parts > 1 and sums:
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


def split(model: Model, params: Params, patterns: tuple[str, ...]) -> tuple[Params, Params]:
    """``(trainable, frozen)``: a trunk is frozen; with adapters, all but they are."""
    trainable, frozen = split_frozen(params, patterns)
    if model.has_trunk:
        frozen |= {path: x for path, x in trainable.items() if is_tower(path)}
        trainable = {path: x for path, x in trainable.items() if path not in frozen}
    if not model.adapter.rank:  # a model that has adapters may have a tower without
        return trainable, frozen
    frozen |= {path: x for path, x in trainable.items() if not is_adapter(path)}
    return {path: x for path, x in trainable.items() if is_adapter(path)}, frozen
