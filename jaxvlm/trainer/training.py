"""The parts of a training run: state, its shardings, and the compiled step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.cache import pair_batches, settings
from jaxvlm.cache.cached_step import make_cache
from jaxvlm.config import (
    Config,
    ConfigError,
    DualConfig,
    ModelConfig,
    StrategyConfig,
    VisionConfig,
    cache_halvings,
    feature_blocks,
)
from jaxvlm.data.page_allocation import NoPages, PageAllocation
from jaxvlm.losses.registry import make_loss, trains_embeddings
from jaxvlm.models import model_flops
from jaxvlm.optim.optimizer import make_optimizer, make_schedule
from jaxvlm.parallel.mesh import batch_shards, nearest_divisor
from jaxvlm.parallel.pipeline.schedule import timetable
from jaxvlm.spmd.disaggregated_encoder import assemble_disaggregated, microbatches_in_flight
from jaxvlm.spmd.gradcache import grad_cache_chunks
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.train_step import Assembled, assemble_with_cache, split
from jaxvlm.train.cache_memory import CacheMemory
from jaxvlm.train.compiled_steps import CompiledSteps
from jaxvlm.train.grad_accum import check_local_gradients, check_microbatches
from jaxvlm.train.gradcache import rows_of
from jaxvlm.train.step import NO_CACHE
from jaxvlm.trainer.checks import check_dropout
from jaxvlm.types import Batch, Cache, Pairs, Params, TrainState, is_vision_path


@dataclasses.dataclass(frozen=True)
class Training:
    """A model with its optimizer and step."""

    model: Model
    step: CompiledSteps
    abstract: TrainState
    """ShapeDtypeStructs with shardings: what a checkpoint is restored onto."""
    learning_rate: Callable[[int], float]
    leaves: list[str]
    """Trainable parameters, sorted: the order of the step's ``bad_leaf``."""
    init: Callable[[Params], TrainState]
    """All parameters -> the first state; consumes them."""
    place: Callable[[Any], Any]
    """This process's rows of a batch -> the batch, on the devices that the step takes it on."""
    params: Callable[[TrainState], Params]
    """All parameters on the model's mesh."""
    cache: Cache = NO_CACHE

    @property
    def learns(self) -> bool:
        """Whether the vision tower does."""
        return any(is_vision_path(path) for path in self.leaves)

    def kept(self, state: TrainState) -> TrainState:
        """What a checkpoint holds of a state: the cache where a run could not go on without."""
        return state if self.cache.in_checkpoint else state._replace(cache=())

    def cache_memory(self, max_halvings: int, say: Callable[[str], None]) -> CacheMemory:
        """What gives the cache's memory back, where the run could go on without what is in it.

        Args:
            max_halvings: how often the cache may be halved.
            say: takes lines for people.
        """
        if self.cache.in_checkpoint or not jax.tree.leaves(self.abstract.cache):
            return CacheMemory()
        lie = self.cache.shardings

        def empty(times: int) -> Callable[[], Any]:
            # Compiled now: when memory is short is no time for it.
            return jax.jit(lambda: self.cache.init(times), out_shardings=lie).lower().compile()

        return CacheMemory([empty(n) for n in range(max_halvings + 1)], say)

    def whole(self, state: TrainState) -> TrainState:
        """A state that :meth:`kept` made, with an empty cache where it has none."""
        if self.cache.in_checkpoint:
            return state
        empty = jax.jit(self.cache.init, out_shardings=self.cache.shardings)
        return state._replace(cache=empty())

    def flops_per_step(self, batch: Batch | Pairs, scale: float) -> model_flops.Flops:
        """Model FLOPs of a step that encodes all its images (see ``jaxvlm.models.model_flops``).

        Args:
            batch: rows that stand for all, numpy.
            scale: rows of a step to these.
        """
        config, count = self.model.config, model_flops.of_batch
        if isinstance(batch, Batch):
            assert isinstance(config, ModelConfig)
            return count(config, self.leaves, batch, scale)[1]
        rows = batch.query, rows_of(batch.document)
        if isinstance(config, DualConfig):
            each = [model_flops.encoders(config, x, self.leaves) for x in rows]
        else:
            each = [count(config, self.leaves, x)[1]._replace(head=0.0) for x in rows]
        return model_flops.Flops(*(scale * sum(parts) for parts in zip(*each)))


def trains_vision(model: Model, frozen: tuple[str, ...]) -> bool:
    """Whether a step changes parameters of the vision encoder.

    Args:
        model: on its mesh.
        frozen: path patterns that are not trained.
    """
    trained, _ = split(model, model.shapes, frozen)
    return any(is_vision_path(path) for path in trained)


def total_steps(config: Config, steps_per_epoch: Callable[[], int]) -> int:
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
    config: Config,
    model: Model,
    steps: int,
    say: Callable[[str], None],
    tower: Model | None = None,
    slots: PageAllocation | NoPages | None = None,
) -> Training:
    """The optimizer, the step and the shardings of its state; allocates nothing.

    Args:
        config: of the run.
        model: on its mesh.
        steps: of the whole run.
        say: takes lines for people.
        tower: the model's vision tower, where it is on a mesh of its own.
        slots: where visual tokens are kept, if they are.

    Raises:
        ConfigError: an unknown loss, patterns that match nothing, or a schedule that does not
            fit ``steps``.
    """
    check_dropout(config)
    trainable, _ = split(model, model.shapes, config.optim.frozen)
    if not trainable:
        raise ConfigError("config.optim.frozen freezes every parameter; nothing would be trained")
    schedule = make_schedule(config.optim, steps)
    loss = make_loss(config, model.mesh)
    tx = make_optimizer(
        config.optim,
        schedule,
        {p: model.logical[p] for p in trainable},
        {} if trains_embeddings(config) else _used_layers(config.model.vision),
        getattr(loss, "bounds", {}),
    )
    check_microbatches(config.microbatches, loss, config.data.batch_size)
    check_local_gradients(config.strategy.grad_reduce_dtype, loss)
    if (stages := model.mesh.shape["pipeline"]) > 1 and not trains_embeddings(config):
        how, parts = model.strategies["decoder"], config.microbatches
        if tower and any(is_vision_path(path) for path in trainable):
            parts = microbatches_in_flight(model, parts, config.encoder.microbatches_in_flight)
        say(f"{pipeline_line(how, stages, parts)} (config.microbatches raises it)")
    asked = (loss, tx, config.microbatches, config.optim.frozen)
    cache = None
    if slots:
        asks = settings.with_encode_batch(config, model.mesh)
        cache = (
            pair_batches.make_pair_cache(asks, model, trainable, slots.windows)
            if isinstance(slots, NoPages)
            else make_cache(
                asks, model, trainable, slots.count, slots.windows, schedule, config.seed
            )
        )
    if trains_embeddings(config):
        made = assemble_with_cache(
            model, *asked, cache, grad_cache_chunks(config.grad_cache), config.seed
        )
    elif tower:
        made = assemble_disaggregated(
            model, tower, *asked, in_flight=config.encoder.microbatches_in_flight, seed=config.seed
        )
    else:
        made = assemble_with_cache(model, *asked, cache, seed=config.seed)
    if slots:
        say(settings.cache_line(asks, slots, made.abstract))
    return Training(
        model,
        CompiledSteps(made.build, say, _sizes(made, cache_halvings(config.cache))),
        made.abstract,
        lambda step: float(schedule(jnp.asarray(step))),
        sorted(trainable),
        made.init,
        lambda local: made.place(local, config.data.batch_size),
        made.params,
        made.cache,
    )


def _sizes(made: Assembled, max_halvings: int) -> list[TrainState]:
    """The state as ShapeDtypeStructs, its cache whole, halved once, twice, and so on; or none."""

    def laid(times: int) -> Any:
        shapes = jax.eval_shape(lambda: made.cache.init(times))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            made.cache.shardings,
        )

    sizes = range(max_halvings + 1) if max_halvings else ()
    return [made.abstract._replace(cache=laid(n)) for n in sizes]


def check_shards(config: Config, model: Model, tower: Model | None) -> None:
    """Refuse batches that do not have a row for each shard in each part.

    Raises:
        ConfigError: which mesh's shards, and how many there are.
    """
    for name, side in (("config.mesh", model), ("config.encoder.mesh", tower)):
        shards = batch_shards(side.mesh) if side else 1
        if config.data.batch_size % (config.microbatches * shards):
            raise ConfigError(
                f"config.microbatches={config.microbatches} on {shards} data shards of {name} does "
                f"not divide data.batch_size={config.data.batch_size}: each part needs a row for "
                f"every shard; {_fitting(config.data.batch_size, config.microbatches, shards)}"
            )


def _fitting(rows: int, parts: int, shards: int) -> str:
    """The nearest microbatches, or the nearest batch size."""
    if rows % shards == 0:
        return f"config.microbatches={nearest_divisor(rows // shards, parts)} would do"
    return f"config.data.batch_size={-(-rows // (parts * shards)) * parts * shards} would do"


def pipeline_line(strategy: StrategyConfig, stages: int, parts: int) -> str:
    """How well a schedule uses its stages, for people."""
    table = timetable(strategy.schedule, stages, parts, strategy.virtual_stages)
    return (
        f"pipeline {strategy.schedule}: {stages} stages, {parts} microbatches at once, "
        f"{table.kept} units in flight; stages are busy {table.busy:.0%} of the time"
    )


def _used_layers(vision: VisionConfig) -> dict[str, int]:
    """What of the tower is run on the way to visual tokens, where that is not all."""
    used, run = {}, max(feature_blocks(vision))
    tower = "vision_top" if vision.frozen_blocks else "vision"
    if run < vision.depth:
        used[f"{tower}/stack/*"] = run - vision.frozen_blocks
    if vision.pool == "attention":
        used[f"{tower}/head/*"] = 0
    return used
