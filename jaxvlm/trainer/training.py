"""The parts of a training run: state, its shardings, and the compiled step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.cache import pair_batches, settings
from jaxvlm.cache.cached_step import make_cache
from jaxvlm.cache.state import CacheState, advance
from jaxvlm.config import (
    Config,
    ConfigError,
    DualConfig,
    ModelConfig,
    StrategyConfig,
    cache_halvings,
    feature_blocks,
)
from jaxvlm.data.page_allocation import NoPages, PageAllocation
from jaxvlm.losses.registry import make_loss, trains_embeddings
from jaxvlm.models import model_flops
from jaxvlm.optim.optimizer import make_optimizer, make_schedule
from jaxvlm.parallel import transfer
from jaxvlm.parallel.mesh import ISLAND, batch_shards, nearest_divisor
from jaxvlm.parallel.pipeline.schedule import timetable
from jaxvlm.parallel.sharding import batch_sharding, replicated
from jaxvlm.spmd.disaggregated_encoder import assemble_disaggregated, microbatches_in_flight
from jaxvlm.spmd.gradcache import grad_cache_mini_batches
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.train_step import Assembled, assemble_with_cache, split
from jaxvlm.train.cache_memory import CacheMemory
from jaxvlm.train.grad_accum import check_local_gradients, check_microbatches
from jaxvlm.train.gradcache import rows_of
from jaxvlm.train.step import NO_CACHE, CompiledSteps
from jaxvlm.trainer.checks import unprofiled
from jaxvlm.types import Batch, Cache, Pairs, Params, TrainState, trains_vision


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
    outer: Callable[[], Any] | None = None
    """Compiles the outer update of islands; see :class:`jaxvlm.spmd.train_step.Assembled`."""

    @property
    def learns(self) -> bool:
        """Whether the vision encoder is trained."""
        return trains_vision(self.leaves)

    def checkpointed(self, state: TrainState) -> TrainState:
        """What a checkpoint holds of a state: the cache where a run could not go on without."""
        return state if self.cache.in_checkpoint else state._replace(cache=())

    def cache_memory(self, max_halvings: int, log: Callable[[str], None]) -> CacheMemory:
        """What gives the cache's memory back, where the run could go on without what is in it.

        Args:
            max_halvings: how often the cache may be halved.
            log: takes lines for people.
        """
        if self.cache.in_checkpoint or not jax.tree.leaves(self.abstract.cache):
            return CacheMemory()
        shardings = self.cache.shardings

        def empty(times: int) -> Callable[[], Any]:
            # Compiled now: when memory is short is no time for it.
            return (
                jax.jit(lambda: self.cache.init(times), out_shardings=shardings).lower().compile()
            )

        return CacheMemory([empty(n) for n in range(max_halvings + 1)], log)

    def with_empty_cache(self, state: TrainState) -> TrainState:
        """A state of :meth:`checkpointed`, with an empty cache where it has none."""
        if self.cache.in_checkpoint:
            return state
        empty = jax.jit(self.cache.init, out_shardings=self.cache.shardings)
        return state._replace(cache=empty())

    def with_trained(
        self, state: TrainState, params: Mapping[str, Any], updates: int
    ) -> TrainState:
        """A state whose trained parameters were replaced by what others made of them.

        Args:
            state: on the devices.
            params: every trained parameter by path, in host memory.
            updates: by how many updates of the vision encoder that makes its cached tokens older.
        """
        like = self.abstract.params
        placed = {path: jax.device_put(params[path], like[path].sharding) for path in like}
        return state._replace(params=placed, cache=self.older(state.cache, updates))

    def older(self, cache: Any, updates: int) -> Any:
        """A cache's state after updates of the vision encoder that were made elsewhere."""
        if not (updates and self.learns and isinstance(cache, CacheState)):
            return cache
        raised = jax.jit(advance, out_shardings=self.cache.shardings, donate_argnums=0)
        return raised(cache, jnp.int32(updates))

    def skipped(self, state: TrainState) -> int:
        """Updates that were skipped in all, those of each island added up."""
        if not self.outer:
            return int(jax.device_get(state.guard.skipped))
        total = jax.jit(jnp.sum, out_shardings=replicated(self.model.mesh))
        return int(jax.device_get(total(state.islands.guard.skipped)))

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


def trained_paths(model: Model, config: Config) -> list[str]:
    """Paths of the parameters that a run trains, sorted."""
    return sorted(split(model, model.shapes, config.optim.frozen)[0])


def total_steps(config: Config, steps_per_epoch: Callable[[], int]) -> int:
    """Steps of the whole run.

    Raises:
        ConfigError: not exactly one of ``steps`` and ``epochs`` is set, or the profiler would trace
            none of the steps.
    """
    if (config.steps > 0) == (config.epochs > 0):
        raise ConfigError(
            f"set one of config.steps={config.steps} and config.epochs={config.epochs:g} "
            "above 0, the other to 0"
        )
    steps = config.steps or math.ceil(config.epochs * steps_per_epoch())
    if nothing := unprofiled(config, steps):
        raise ConfigError(f"{nothing}; leave it out, or name steps among these")
    return steps


def build_training(
    config: Config,
    model: Model,
    steps: int,
    log: Callable[[str], None],
    encoder: Model | None = None,
    pages: PageAllocation | NoPages | None = None,
) -> Training:
    """The optimizer, the step and the shardings of its state; allocates nothing.

    Args:
        config: of the run.
        model: on its mesh.
        steps: of the whole run.
        log: takes lines for people.
        encoder: the vision encoder, where it is on a mesh of its own.
        pages: where visual tokens are cached, if they are.

    Raises:
        ConfigError: an unknown loss, patterns that match nothing, or a schedule that does not
            fit ``steps``.
    """
    trainable = trained_paths(model, config)
    if not trainable:
        raise ConfigError("config.optim.frozen freezes every parameter; nothing would be trained")
    schedule = make_schedule(config.optim, steps)
    loss = make_loss(config, model.mesh)
    tx = make_optimizer(
        config.optim,
        schedule,
        {p: model.logical[p] for p in trainable},
        _used_layers(config),
        getattr(loss, "bounds", {}),
    )
    check_microbatches(config.microbatches, loss, config.data.batch_size)
    check_local_gradients(config.strategy.grad_reduce_dtype, loss)
    if (stages := model.mesh.shape["pipeline"]) > 1 and not trains_embeddings(config):
        parts = config.microbatches
        if encoder and trains_vision(trainable):
            parts = microbatches_in_flight(model, parts, config.encoder.microbatches_in_flight)
        line = pipeline_line(model.strategies["decoder"], stages, parts)
        log(f"{line} (config.microbatches raises it)")
    options = (loss, tx, config.microbatches, config.optim.frozen)
    cache, cache_config = None, config.cache
    if pages:
        cache_config = settings.with_encode_batch(config, model.mesh)
    if isinstance(pages, NoPages):
        cache = pair_batches.make_pair_cache(cache_config, model, trainable, pages.windows)
    elif pages:
        cache = make_cache(
            cache_config, model, trainable, pages.count, pages.windows, schedule, config.seed
        )
    if encoder:
        in_flight = config.encoder.microbatches_in_flight
        assembled = assemble_disaggregated(
            model, encoder, *options, in_flight=in_flight, seed=config.seed
        )
    else:
        mini_batches = None
        if trains_embeddings(config):
            mini_batches = grad_cache_mini_batches(config.grad_cache)
        islands = config.outer if model.mesh.shape[ISLAND] > 1 else None
        assembled = assemble_with_cache(model, *options, cache, mini_batches, config.seed, islands)
    if pages:
        log(settings.cache_line(cache_config, pages, assembled.abstract))
    return Training(
        model=model,
        step=CompiledSteps(assembled.build, log, _sizes(assembled, cache_halvings(config.cache))),
        abstract=assembled.abstract,
        learning_rate=lambda step: float(schedule(jnp.asarray(step))),
        leaves=trainable,
        init=assembled.init,
        place=lambda local: assembled.place(local, config.data.batch_size),
        params=assembled.params,
        cache=assembled.cache,
        outer=assembled.outer,
    )


def _sizes(assembled: Assembled, max_halvings: int) -> list[TrainState]:
    """The state as ShapeDtypeStructs, its cache whole, halved once, twice, and so on; or none."""

    def cache_of(times: int) -> Any:
        shapes = jax.eval_shape(lambda: assembled.cache.init(times))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            assembled.cache.shardings,
        )

    sizes = range(max_halvings + 1) if max_halvings else ()
    return [assembled.abstract._replace(cache=cache_of(n)) for n in sizes]


def check_shards(config: Config, model: Model, encoder: Model | None) -> None:
    """Refuse batches that do not have a row for each shard in each part, and meshes on which a
    process has not the same rows.

    Raises:
        ConfigError: which mesh's shards, and how many there are; or which rows.
    """
    for name, part in (("config.mesh", model), ("config.encoder.mesh", encoder)):
        shards = batch_shards(part.mesh) if part else 1
        if config.data.batch_size % (config.microbatches * shards):
            raise ConfigError(
                f"config.microbatches={config.microbatches} on {shards} data shards of {name} does "
                f"not divide data.batch_size={config.data.batch_size}: each part needs a row for "
                f"every shard; {_fitting(config.data.batch_size, config.microbatches, shards)}"
            )
    if encoder:
        rows = batch_sharding(model.mesh), batch_sharding(encoder.mesh)
        transfer.check_same_rows(*rows, config.data.batch_size, "config.encoder.mesh")


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


def _used_layers(config: Config) -> dict[str, int]:
    """Pattern of parameters that no loss of the run reads -> their first layers, which one does."""
    if config.embedder == "dual":
        text = config.dual.text
        return {"text/[wb]_pool": 0} if text.pooler and text.pool != "pooler" else {}
    vision, used = config.model.vision, dict[str, int]()
    run, name = max(feature_blocks(vision)), "vision_top" if vision.frozen_blocks else "vision"
    if run < vision.depth:
        used[f"{name}/stack/*"] = run - vision.frozen_blocks
    if vision.pool == "attention":
        used[f"{name}/head/*"] = 0
    if trains_embeddings(config):
        used["decoder/embed/out*"] = 0
    return used
