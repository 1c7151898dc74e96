"""Build the train step of any model, loss and optimizer on the model's mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding

from jaxvlm.config import ConfigError, MeshConfig, OuterConfig, dropout_rates, grad_reduce_bits
from jaxvlm.models.lora import is_adapter
from jaxvlm.optim.optimizer import split_frozen
from jaxvlm.parallel.grad_reduce import ORDER, GradReduction
from jaxvlm.parallel.islands import each_island
from jaxvlm.parallel.quantized_gather import gather_in_bytes
from jaxvlm.parallel.sharding import HOST, constrain, follow, replicated, to_device, to_global
from jaxvlm.parallel.strategies import reduced_axes
from jaxvlm.spmd.dropout import check_cached, without_frozen_dropout
from jaxvlm.spmd.gradcache import MiniBatches, pair_runner
from jaxvlm.spmd.islands import IslandProgram, OuterPrograms, outer_of, state_of_islands
from jaxvlm.spmd.layered_reduction import LayeredGradients, LayeredReduction
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.runners import runner_of
from jaxvlm.spmd.submodels import without_vision_encoder
from jaxvlm.train.dropout_keys import seeded
from jaxvlm.train.grad_accum import LocalGradients, is_by_microbatch
from jaxvlm.train.islands import OuterUpdate, island_step
from jaxvlm.train.step import NO_CACHE, Placement, init_state, make_step
from jaxvlm.types import Cache, Loss, Params, Runner, TrainState, is_vision_path, trains_vision


class Assembled(NamedTuple):
    """A train step, and functions that make its inputs."""

    build: Callable[[TrainState, Any], Any]
    """Compiles ``(state, batch) -> (state, metrics)`` for a state and a batch, or their shapes."""
    abstract: TrainState
    """The state as ShapeDtypeStructs with shardings."""
    init: Callable[[Params], TrainState]
    """All parameters -> the first state; consumes them."""
    place: Callable[[Any, int], Any]
    """This process's part of a batch, the global batch size -> the batch on its devices."""
    params: Callable[[TrainState], Params]
    """The state -> all parameters on the model's mesh."""
    cache: Cache = NO_CACHE
    outer: Callable[[], OuterPrograms] | None = None
    """Compiles the outer updates of islands; ``None``: there are no islands."""


def assemble(
    model: Model,
    loss: Loss,
    tx: optax.GradientTransformation,
    microbatches: int = 1,
    frozen: tuple[str, ...] = (),
    cache: Cache | None = None,
    mini_batches: MiniBatches | None = None,
    seed: int = 0,
    outer: OuterUpdate | None = None,
) -> tuple[Any, TrainState, Callable[[Params], TrainState]]:
    """Build the step of any model, loss and optimizer under the model's strategy.

    Args:
        model: a model on its mesh.
        loss: the loss, as sums and weights.
        tx: the optimizer over the trainable parameters, ``{path: array}``.
        microbatches: number of microbatches for gradient accumulation or a pipeline.
        frozen: path patterns of frozen parameters.
        cache: cache of visual tokens; ``None``: the vision encoder runs in the step.
        mini_batches: sizes for queries and for documents, of an embedding model trained on
            ``Pairs``; ``None``: the model is trained on a ``Batch``.
        seed: seed of dropout.
        outer: the outer update of the mesh's islands, each of which then takes steps by itself.

    Returns:
        The jitted step ``(state, batch) -> (state, metrics)``; its state as ShapeDtypeStructs with
        shardings; and a function that makes the first state from all parameters, consuming them.
    """
    trainable, fixed = split(model, model.shapes, frozen)
    drops = False
    if model.has_dropout or dropout_rates(model.config):
        model, drops = without_frozen_dropout(model, trainable)
    if cache is not None:
        check_cached(model)
    trains_cached = cache is not None and trains_vision(trainable)
    parts = max(microbatches, 1 + any(any(mini_batch) for mini_batch in mini_batches or ()))
    local = not (trains_cached or is_by_microbatch(loss))
    reduction = grad_reduction(model, parts) if local else None
    run, cache = (without_vision_encoder(model), cache) if cache else (model, NO_CACHE)
    layered = layered_reduction(run, mini_batches is not None) if local else None
    abstract, init = state_of(model, tx, trainable, fixed, reduction, cache)
    place = placement(model)
    if reduction:
        place = place._replace(reduce=reduction)
    if mini_batches is not None:
        axes = reduction.axes if reduction else ()
        runner: Runner = pair_runner(run, trainable, mini_batches, axes)
    elif layered:
        runner = LayeredGradients(runner_of(run, microbatches), layered, microbatches)
    elif reduction:
        runner = LocalGradients(runner_of(run, microbatches), model.mesh, reduction.axes)
    else:
        runner = runner_of(run, microbatches)
    one = make_step(runner, loss, tx, place, cache, seeded(seed) if drops else None)
    # Metrics are scalars; tokens that a cache returns have the cache's shardings.
    of_metrics = None if cache.outputs_tokens else replicated(model.mesh)
    if outer:
        abstract, init = state_of_islands(model, outer, abstract, init)
        one, of_metrics = island_step(one, model.mesh), each_island(replicated(model.mesh))
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    step = jax.jit(one, donate_argnums=0, out_shardings=(shardings, of_metrics))
    return step, abstract, lambda params: init(*split(model, params, frozen))


def assemble_with_cache(
    model: Model,
    loss: Loss,
    tx: optax.GradientTransformation,
    microbatches: int,
    frozen: tuple[str, ...],
    cache: Cache | None = None,
    mini_batches: MiniBatches | None = None,
    seed: int = 0,
    islands: OuterConfig | None = None,
) -> Assembled:
    """Build the step on one mesh; see :func:`assemble`.

    Args:
        islands: settings of outer updates, where the mesh has islands.
    """
    outer = None
    if islands:
        outer = outer_of(model, islands, split(model, model.shapes, frozen)[0])
    step, abstract, init = assemble(
        model, loss, tx, microbatches, frozen, cache, mini_batches, seed, outer
    )

    def build(state: TrainState, batch: Any) -> Any:
        program = step.lower(state, batch).compile()
        return IslandProgram(program, model.mesh) if outer else program

    return Assembled(
        build,
        abstract,
        init,
        lambda local, rows: to_global(model.mesh, local, rows),
        lambda state: {**state.params, **state.frozen},
        cache or NO_CACHE,
        (lambda: OuterPrograms(outer, abstract)) if outer else None,
    )


def state_of(
    model: Model,
    tx: optax.GradientTransformation,
    trainable: Params,
    frozen: Params,
    reduction: GradReduction | None = None,
    cache: Cache = NO_CACHE,
) -> tuple[TrainState, Callable[[Params, Params], TrainState]]:
    """Return the state as ShapeDtypeStructs with shardings, and a function that makes the first.

    Args:
        model: a model on its mesh.
        tx: the optimizer over ``trainable``.
        trainable: shapes of these parameters.
        frozen: shapes of the frozen parameters.
        reduction: gradient reduction, whose rounding errors are part of the state.
        cache: cache of visual tokens, which is part of the state.

    Returns:
        The state, and a function of trainable and frozen parameters that consumes them.
    """
    mesh = model.mesh

    def first(params: Params, frozen: Params) -> TrainState:
        comm = reduction.init(params) if reduction else {}
        return init_state(params, frozen, tx, comm, cache.init())

    shapes = jax.eval_shape(first, trainable, frozen)
    everywhere: Any = jax.tree.map(lambda _: replicated(mesh), shapes)
    shardings: TrainState = everywhere._replace(
        params={path: model.shardings[path] for path in trainable},
        frozen={path: model.shardings[path] for path in frozen},
        opt_state=follow(shapes.opt_state, _moments_between_steps(model), mesh),
        comm={path: reduction.where(path) for path in shapes.comm} if reduction else {},
        cache=cache.shardings,
    )
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    return abstract, jax.jit(first, out_shardings=shardings, donate_argnums=(0, 1))


def _moments_between_steps(model: Model) -> dict[str, NamedSharding]:
    """Return the shardings of moments between steps, in host memory where they are offloaded."""
    return {
        path: where.with_memory_kind(HOST) if "optimizer" in model.strategy(path).offload else where
        for path, where in model.layout("optimizer").items()
    }


def placement(model: Model) -> Placement:
    """Return the sharding and communication of a model's step."""
    moments = model.layout("optimizer")
    place = Placement(_gathering(model), constrain(moments))
    return (
        place._replace(load_moments=to_device)
        if _moments_between_steps(model) != moments
        else place
    )


def grad_reduction(model: Model, parts: int) -> GradReduction | None:
    """Return the explicit gradient reduction after the backward pass; ``None``: the compiler's.

    The compiler reduces gradients once a microbatch. With several microbatches it still does where
    gradients or parameters are sharded: XLA's partitioner aborts over weights split by fsdp and
    tensor where data is a manual axis (jaxlib 0.10.2).

    Args:
        model: a model on its mesh.
        parts: the number of microbatches, or of mini-batches of pairs.

    Raises:
        ConfigError: submodels with different settings, or quantized reduction where each
            microbatch's gradients are sharded or where the partitioner would abort.
    """
    towers = list(model.strategies.values())
    if len({(s.grad_reduce_dtype, s.error_feedback) for s in towers}) > 1:
        raise ConfigError(
            "config.strategy.grad_reduce_dtype and error_feedback differ between submodels; set "
            "each to one value for all"
        )
    bits, feedback = grad_reduce_bits(towers[0]), towers[0].error_feedback
    setting = f"config.strategy.grad_reduce_dtype={towers[0].grad_reduce_dtype!r}"
    sizes = MeshConfig(**model.mesh.shape)
    axes = tuple(a for a in ORDER if all(a in reduced_axes(s, sizes) for s in towers))
    if not axes:  # all are reduced layer by layer
        return None
    sums = {axis for s in towers for axis in s.gradients} & set(axes)
    layered = [a for a in ORDER if getattr(sizes, a) > 1 and a not in axes]
    if bits == 32:
        axes = () if parts == 1 or layered or sums else axes
    elif layered and (sizes.tensor > 1 or sizes.context > 1):
        raise ConfigError(
            f"{setting} with parameters all-gathered layer by layer over "
            f"{layered[0]} cannot be combined with config.mesh.tensor={sizes.tensor}, "
            f"context={sizes.context}; use 'zero1' or 'zero2'"
        )
    elif parts > 1 and sums:
        raise ConfigError(
            f"{setting} with config.microbatches={parts}: accumulated "
            f"gradients would be replicated, and gradients={towers[0].gradients} says they are "
            "sharded; 'zero1' and 'ddp' replicate them"
        )
    if not axes:
        return None
    return GradReduction(model.mesh, axes, model.layout("optimizer"), bits, feedback)


def layered_reduction(model: Model, of_pairs: bool = False) -> LayeredReduction | None:
    """Return the quantized reduction in the backward pass; ``None``: gradients are not quantized,
    or :func:`grad_reduction` reduces them after it.

    Args:
        model: a model on its mesh.
        of_pairs: whether it is trained on ``Pairs``.

    Raises:
        ConfigError: a model or a mesh whose layers cannot all-gather their own parameters.
    """
    of = next(iter(model.strategies.values()))
    axes = tuple(a for a in ORDER if model.mesh.shape[a] > 1)
    sizes = MeshConfig(**model.mesh.shape)
    after = [a for a in axes if all(a in reduced_axes(s, sizes) for s in model.strategies.values())]
    if grad_reduce_bits(of) == 32 or after or not axes:
        return None
    setting = f"config.strategy.grad_reduce_dtype={of.grad_reduce_dtype!r} with parameters "
    setting += "all-gathered layer by layer"
    if of_pairs:
        raise ConfigError(f"{setting} cannot be combined with pairs; use 'ddp' or 'zero1'")
    if model.adapter.rank:
        raise ConfigError(f"{setting}: adapters are too small to be worth it; use 'float32'")
    if model.mesh.shape["pipeline"] > 1:
        raise ConfigError(
            f"{setting} cannot be combined with config.mesh.pipeline={sizes.pipeline}; use 'ddp' "
            "or 'zero1'"
        )
    return LayeredReduction(model, axes, grad_reduce_bits(of))


def _gathering(model: Model) -> Callable[[Params], Params]:
    """Return the all-gather of parameters at the beginning of a step."""
    stored, gathered = model.shardings, model.layout("all_gathered")
    moved = {
        path
        for path, x in model.shapes.items()
        if not stored[path].is_equivalent_to(gathered[path], len(x.shape))
    }
    eight = {path for path in moved if model.strategy(path).param_gather_dtype == "int8"}
    pin = constrain(gathered)
    as_bytes = gather_in_bytes(stored, gathered) if eight else None

    def gather(params: Params) -> Params:
        result = {**params, **pin({path: x for path, x in params.items() if path in moved - eight})}
        if as_bytes is not None:
            result |= as_bytes({path: x for path, x in params.items() if path in eight})
        return result

    return gather


def split(model: Model, params: Params, patterns: tuple[str, ...]) -> tuple[Params, Params]:
    """Split into ``(trainable, frozen)``; with adapters, all other parameters are frozen too.

    Where the vision encoder has frozen blocks, ``vision/*`` is frozen.
    """
    trainable, frozen = split_frozen(params, patterns)
    if model.has_frozen_blocks:
        frozen |= {path: x for path, x in trainable.items() if is_vision_path(path)}
        trainable = {path: x for path, x in trainable.items() if path not in frozen}
    if not model.adapter.rank:  # with adapters, a submodel without any is frozen too
        return trainable, frozen
    frozen |= {path: x for path, x in trainable.items() if not is_adapter(path)}
    return {path: x for path, x in trainable.items() if is_adapter(path)}, frozen
