"""Memory that a train step needs on a device, by category, before anything is compiled.

What is stored between steps is exact: it follows from shapes and sharding rules. What a step needs
in addition is read from the step's own trace, for one device's batch and one device's heads (see
``liveness``): the traced program is the one that runs, so blocks and remat need no formula of their
own. The loss is next-token prediction. ``benchmarks/planner.py`` compares the result with the
compilers' figures.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.config import (
    ConfigError,
    DualConfig,
    EmbeddingConfig,
    MeshConfig,
    ModelConfig,
    OuterConfig,
    StrategyConfig,
)
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import BATCH_AXES, ISLAND
from jaxvlm.parallel.rules import quiet
from jaxvlm.planner.memory import liveness, tpu_padding
from jaxvlm.planner.memory.compilers import COMPILERS, Compiler
from jaxvlm.planner.memory.jaxpr_ops import Jaxpr, without_dead_code
from jaxvlm.planner.memory.jaxpr_sharding import NONE, ShardedValues, Share
from jaxvlm.planner.memory.shared_memory import shared
from jaxvlm.planner.request import abstract_devices, pairs, trainable_params
from jaxvlm.planner.request.held_dtypes import Held
from jaxvlm.planner.request.pairs import PairShapes
from jaxvlm.spmd.model import Model, build_model, on
from jaxvlm.spmd.train_step import grad_reduction, split
from jaxvlm.train.grad_accum import GradAccumulation, PlainRunner, scales
from jaxvlm.types import Batch, Loss, Pairs, Params, Sums

_UNKNOWN_AXES = ("pipeline", "context")
_UNITS = (10007, 2003, 401, 101)
"""Batch sizes that a step is traced with: primes, so that a dim which one divides is a batch dim.
The first one is used whose token copies for experts can be indexed in 32 bits, and that divides no
parameter's dim.
"""


class StepSetup(NamedTuple):
    """Everything that the memory and time of a train step depend on."""

    config: ModelConfig | DualConfig
    """The model, with ``dtype`` and both towers' ``remat`` set."""
    mesh: MeshConfig
    """The mesh, resolved."""
    strategy: StrategyConfig
    """The strategy, resolved."""
    platform: str
    """cpu | gpu | tpu."""
    rows: int
    """Packed sequences in the batch, over all devices; when training on pairs, examples."""
    length: int
    """Tokens of a packed sequence; of pairs, those of the longer side."""
    images: int
    """Images of a packed sequence, or of an example."""
    patches: int = 0
    """Patches of a packed sequence, for models with packed images."""
    frozen: tuple[str, ...] = ()
    """Path patterns of frozen parameters."""
    microbatches: int = 1
    """Number of microbatches; of pairs, mini-batches of the side that has more of them."""
    pairs: PairShapes | None = None
    """Shapes of an example and its GradCache mini-batches; ``None``: training is not on pairs."""
    held: Held = ()
    """Dtypes of frozen parameters that are not float32."""
    outer: OuterConfig | None = None
    """Outer updates of the mesh's islands; ``None``: there are none."""


class Estimate(NamedTuple):
    """Bytes on one device."""

    states: dict[str, int]
    """Between steps: ``parameters``, ``frozen``, ``moments``, ``shared``, ``batch``. Exact."""
    work: dict[str, float]
    """Needed in addition at a step's peak, by category; see
    :class:`jaxvlm.planner.memory.liveness.Peak`.
    """

    @property
    def peak(self) -> float:
        """Total bytes."""
        return sum(self.states.values()) + sum(self.work.values())


def estimate(setup: StepSetup) -> Estimate:
    """Estimate the memory of a train step with AdamW.

    Args:
        setup: model, mesh, strategy and batch.

    Raises:
        ConfigError: dims that the mesh does not divide, or a setting that the trace does not cover.
    """
    check(setup)
    compiler = COMPILERS[setup.platform]
    layouts = _layouts_of(setup)
    trained = tuple(sorted(split(layouts.model, layouts.model.shapes, setup.frozen)[0]))
    gathered, stored, moments = (layouts.bytes[f] for f in ("all_gathered", "params", "optimizer"))
    copied = []
    if compiler.runs_when_ready:
        copied = sorted(2 * [float(moments[path]) for path in trained])
    elif compiler.gathers_apart:  # each goes where one of its size was before
        copied = sorted({float(stored[path]) for path in _gathered_apart(layouts, trained)})
    work = dict(_peak(*_shares(setup, layouts, trained), compiler, tuple(copied)).parts)
    if copied:
        work["update"] = sum(copied)
    after = _after_backward(setup, layouts, trained)
    update = _tables_update(setup, layouts, trained) if compiler.updates_by_rows else {}
    work = max(work, after, update, key=lambda parts: sum(parts.values()))
    if moved := sum(gathered[p] for p in gathered if gathered[p] != stored[p]):
        work["gathered weights"] = float(moved)
    return Estimate(_states(setup, layouts.model, trained, stored, moments), work)


def _after_backward(
    setup: StepSetup, layouts: _Layouts, trained: tuple[str, ...]
) -> dict[str, float]:
    """Bytes by category, in addition to states, at the time when all gradients are complete."""
    compiler, sizes = COMPILERS[setup.platform], dict[str, float]()
    stored, moments = (layouts.bytes[f] for f in ("params", "optimizer"))
    updated = sum(moments[path] for path in trained)
    if compiler.reduces_at_end and _summed_over(setup) > 1 and setup.microbatches > 1:
        specs = layouts.model.layout("optimizer")
        unsharded = sum(moments[p] for p in trained if not _is_shared(specs[p].spec, setup.mesh))
        # Sums that two loops accumulate use the moments' old buffers; see xla_passes.
        copies = 1 if setup.pairs and isinstance(setup.config, ModelConfig) else 2
        sizes["gradients"] = float(copies * unsharded)
        sizes["update"] = 2.0 * updated * compiler.runs_when_ready
    if apart := _gathered_apart(layouts, trained) if compiler.gathers_apart else []:
        sizes["gradients"] = float(updated)
        sizes["new parameters"] = float(sum(stored[path] for path in apart))
    if compiler.gathered_gradients:
        new, old = layouts.model.layout("optimizer"), layouts.model.layout("params")
        unsharded = sum(stored[p] for p in trained if _is_transposed(new[p].spec, old[p].spec))
        sizes["gradients"] = compiler.gathered_gradients * updated
        sizes["new parameters"] = float(unsharded)
    return sizes


def _tables_update(
    setup: StepSetup, layouts: _Layouts, trained: tuple[str, ...]
) -> dict[str, float]:
    """Bytes by category, in addition to states, when tables are updated; see ``Compiler``."""
    model, moments, copied = layouts.model, layouts.bytes["optimizer"], 0.0
    sharded = model.layout("optimizer")
    for path in trained:
        x = model.shapes[path]
        shape = sharded[path].shard_shape(x.shape)
        if model.logical[path][0] != "vocab" or tpu_padding.minor_most(shape) == len(shape) - 1:
            continue
        by_rows = tpu_padding.size(shape, np.dtype(x.dtype).itemsize, as_written=True)
        # A gradient that is not sharded over all parts of the batch is all-reduced, out of place.
        is_reduced = math.prod(x.shape) / math.prod(shape) < _summed_over(setup)
        copied += (4 + is_reduced) * by_rows - moments[path]
    gradients = float(sum(moments[path] for path in trained))
    return {"gradients": gradients, "update": copied} if copied else {}


def check(setup: StepSetup) -> None:
    """Refuse settings that the estimate would count wrong."""
    config, mesh = setup.config, setup.mesh
    name = "dual" if isinstance(config, DualConfig) else "model"
    towers = {t: getattr(config, t) for t in ("vision", "decoder", "text") if hasattr(config, t)}
    unknown = {f"config.mesh.{axis}": getattr(mesh, axis) > 1 for axis in _UNKNOWN_AXES}
    unknown |= {f"config.{name}.{t}.dropout": x.dropout > 0 for t, x in towers.items()}
    unknown[f"config.{name}.lora.dropout"] = config.lora.dropout > 0
    unknown["remat='offload'"] = any(x.remat == "offload" for x in towers.values())
    if setup.pairs:
        unknown["config.mesh.expert with a loss of pairs"] = mesh.expert > 1
    for name, is_set in unknown.items():
        if is_set:
            raise ConfigError(
                f"{name} can't be planned yet: jaxvlm train --dry_run compiles the step and "
                "reports its memory"
            )


def model_of(setup: StepSetup) -> Model:
    """The model on its mesh of abstract devices: it has shapes and shardings, but can't run.

    Raises:
        ConfigError: dims that the mesh does not divide.
    """
    return _layouts_of(setup).model


def states(setup: StepSetup, model: Model) -> dict[str, int]:
    """Bytes stored on a device between steps, exact; moments in host memory are not counted.

    Args:
        setup: the train step.
        model: from :func:`model_of`.
    """
    trained, _ = split(model, model.shapes, setup.frozen)
    stored, moments = (_bytes(model, f, setup.platform) for f in ("params", "optimizer"))
    return _states(setup, model, tuple(trained), stored, moments)


def _states(
    setup: StepSetup,
    model: Model,
    own: tuple[str, ...],
    stored: Mapping[str, int],
    moments: Mapping[str, int],
) -> dict[str, int]:
    trained = frozenset(own)
    moments_of = {path: 2 * moments[path] for path in own}
    on_devices = (n for p, n in moments_of.items() if "optimizer" not in model.strategy(p).offload)
    batch = jax.tree.leaves(_shapes(setup, _local_rows(setup)))
    return {
        "parameters": sum(stored[path] for path in own),
        "frozen": sum(size for path, size in stored.items() if path not in trained),
        "moments": sum(on_devices),
        **shared(setup.outer, stored, own),
        "batch": sum(_array_bytes(x.shape, x, setup.platform) for x in batch),
    }


class _Layouts(NamedTuple):
    """Sharded sizes of a model's parameters."""

    model: Model
    bytes: dict[str, dict[str, int]]
    """Field of StrategyConfig -> parameter path -> bytes on a device."""


def _layouts_of(setup: StepSetup) -> _Layouts:
    embeddings = setup.pairs.embeddings if setup.pairs else None
    where = (setup.mesh, setup.strategy, setup.platform)
    return _layouts(setup.config, *where, embeddings, setup.held)


@functools.lru_cache(maxsize=1024)
def _layouts(
    config: ModelConfig | DualConfig,
    mesh: MeshConfig,
    strategy: StrategyConfig,
    platform: str,
    embeddings: EmbeddingConfig | None,
    held: Held,
) -> _Layouts:
    alone = trainable_params.alone(trainable_params.plain(config), embeddings)
    alone = dataclasses.replace(alone.holding(dict(held)), config=config)
    model = on(alone, abstract_devices.mesh(mesh, platform), strategy)
    fields = ("params", "all_gathered", "gradients", "optimizer")
    return _Layouts(model, {field: _bytes(model, field, platform) for field in fields})


def _bytes(model: Model, field: str, platform: str) -> dict[str, int]:
    """Parameter path -> bytes on a device."""
    layout = model.layout(field)
    return {
        path: _array_bytes(layout[path].shard_shape(x.shape), x, platform)
        for path, x in model.shapes.items()
    }


def _array_bytes(shape: Sequence[int], x: jax.ShapeDtypeStruct, platform: str) -> int:
    """Bytes of an array of this shape, with padding."""
    number = np.dtype(x.dtype).itemsize
    if COMPILERS[platform].tiled:
        return round(tpu_padding.size(tuple(shape), number))
    return math.prod(shape) * number


def _size(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize


def _is_shared(spec: Iterable[Any], mesh: MeshConfig) -> bool:
    """Whether devices with different parts of the batch hold different shards."""
    return any(_gathered(place, "", mesh) for place in spec)


def _summed_over(setup: StepSetup) -> int:
    """Batch shards whose gradients a step adds up: those of an island."""
    return math.prod(getattr(setup.mesh, axis) for axis in BATCH_AXES if axis != ISLAND)


def _local_rows(setup: StepSetup) -> int:
    shards = setup.mesh.island * _summed_over(setup)
    if setup.rows % shards:
        raise ConfigError(f"a batch of {setup.rows} is not divisible by {shards} batch shards")
    return setup.rows // shards


def _shares(
    setup: StepSetup, layouts: _Layouts, trained: tuple[str, ...]
) -> tuple[Jaxpr, tuple[Share, ...], tuple[Share, ...], float]:
    """The step's gradient program, the sharding of its inputs and outputs, and its batch size."""
    step, rows = _step(setup, layouts.model)
    model, layout = layouts.model, layouts.model.layout("all_gathered")
    # A step's gradients are constrained to the moments' sharding, and compilers compute them in it;
    # those of microbatches or GradCache mini-batches to the sharding of the strategy's gradients.
    summed = layouts.bytes["gradients" if setup.microbatches > 1 else "optimizer"]

    compiler = COMPILERS[setup.platform]

    def share(path: str, sizes: dict[str, int]) -> Share:
        x, words = model.shapes[path], model.logical[path]
        spec = (*layout[path].spec, *(None for _ in x.shape))[: len(x.shape)]
        dims = tuple(_over(place, word, setup.mesh) for place, word in zip(spec, words))
        parts = _size(x) / sizes[path] / math.prod(dims)
        # Below one: an unsharded parameter with padding.
        least = 0.0 if compiler.tiled else 1.0
        later_dims = list(zip(spec, words))[2:] if words[:1] == ("layers",) else []
        turned = any(_gathered(*b, setup.mesh) for b in later_dims)
        transposed = compiler.transposes_gathered and turned
        return Share(max(least, parts), dims if math.prod(dims) > 1 else (), transposed)

    frozen = sorted(model.shapes.keys() - set(trained))
    ins = [share(path, layouts.bytes["all_gathered"]) for path in (*trained, *frozen)]
    ins += [NONE] * (len(step.body.ins) - len(ins))
    outs = [NONE] * step.sums + [share(path, summed) for path in trained]
    return step.body, tuple(ins), tuple(outs), rows


@functools.lru_cache(maxsize=4096)
def _peak(
    body: Jaxpr,
    ins: tuple[Share, ...],
    outs: tuple[Share, ...],
    rows: float,
    compiler: Compiler,
    idle_buffers: tuple[float, ...],
) -> liveness.Peak:
    held = ShardedValues(body, ins, outs, rows, compiler.tiled)
    return liveness.peak(held, compiler, idle_buffers=idle_buffers)


def _gathered_apart(layouts: _Layouts, trained: tuple[str, ...]) -> list[str]:
    """Updated parameters that are all-gathered into buffers of their own; see ``Compiler``."""
    model, found = layouts.model, []
    new, old = model.layout("optimizer"), model.layout("params")
    for path in trained:
        shape = model.shapes[path].shape
        sizes = new[path].shard_shape(shape), old[path].shard_shape(shape)
        dims = [i for i, (part, whole) in enumerate(zip(*sizes)) if part != whole]
        if dims and all(
            tpu_padding.keeps_layout(sizes[1], i, sizes[1][i] // sizes[0][i]) for i in dims
        ):
            found.append(path)
    return found


def _is_transposed(new: Any, old: Any) -> bool:
    """Whether an updated parameter is gathered along another dim than its first: transposed."""
    places = itertools.zip_longest(new, old)
    return any(i > 0 and a != b for i, (a, b) in enumerate(places))


def _gathered(place: Any, word: str, mesh: MeshConfig) -> bool:
    """Whether a dim is sharded between matmuls and all-gathered for them."""
    names = (place,) if isinstance(place, str) else place or ()
    return word != "experts" and any(getattr(mesh, n) > 1 for n in names if n in BATCH_AXES)


def _over(place: Any, word: str, mesh: MeshConfig) -> int:
    """Number of shards of a dim that stays sharded in matmuls."""
    names = (place,) if isinstance(place, str) else place or ()
    return math.prod(getattr(mesh, n) for n in names if n not in BATCH_AXES or word == "experts")


class _Step(NamedTuple):
    """The traced gradient of a step."""

    body: Jaxpr
    sums: int
    """Number of its outputs that are no gradients."""


def _step(setup: StepSetup, model: Model) -> tuple[_Step, float]:
    """The step's trace, and the batch size that its unit stands for."""
    rows, config = _local_rows(setup), setup.config
    if setup.pairs:
        again = grad_reduction(model, setup.microbatches) is not None
        frozen = (setup.frozen, setup.held)
        return _of_pairs(config, setup.platform, setup.pairs, *frozen, rows, again), 1.0
    if rows % setup.microbatches:
        raise ConfigError(
            f"{rows} sequences a device are not divisible by {setup.microbatches} microbatches"
        )
    assert isinstance(config, ModelConfig), "a dual encoder is trained on pairs"
    step = _trace(
        config, setup.platform, setup.length, setup.images, setup.patches, setup.frozen,
        setup.held, setup.microbatches, setup.mesh.expert,
    )  # fmt: skip
    # With expert parallelism, the trace has the batch of all devices that share the experts.
    return step, rows / setup.microbatches / setup.mesh.expert


@functools.lru_cache(maxsize=64)
def _of_pairs(
    config: ModelConfig | DualConfig,
    platform: str,
    pairing: PairShapes,
    frozen: tuple[str, ...],
    held: Held,
    rows: int,
    again: bool,
) -> _Step:
    jaxpr, sums = pairs.traced(config, platform, pairing, frozen, held, rows, again)
    return _Step(_ordered(Jaxpr(without_dead_code(jaxpr)), platform), sums)


def _ordered(body: Jaxpr, platform: str) -> Jaxpr:
    """The program in the platform compiler's order."""
    return {
        "gpu": body.scheduled_late,
        "cpu": body.breadth_first,
        "tpu": body.with_hoisted_casts,
    }.get(platform, lambda: body)()


@functools.lru_cache(maxsize=64)
def _trace(
    config: ModelConfig,
    platform: str,
    length: int,
    images: int,
    patches: int,
    frozen: tuple[str, ...],
    held: Held,
    microbatches: int,
    expert: int,
) -> _Step:
    mesh = MeshConfig(data=1, expert=expert)
    model, plain = _runner(config, mesh, platform)
    loss, runner = NextToken(), GradAccumulation(plain, microbatches) if microbatches > 1 else plain
    trained, fixed = split(model, model.holding(dict(held)).shapes, frozen)

    def grads(params: Params, frozen: Params, batch: Batch) -> Any:
        return runner.loss_grad(params, frozen, batch, loss, scales(loss, batch))

    unit = _unit(model, length, config.decoder.experts_per_token * expert)
    rows = unit * microbatches * expert
    setup = StepSetup(config, mesh, StrategyConfig(), platform, rows, length, images, patches)
    with quiet():
        jaxpr, out = jax.make_jaxpr(grads, return_shape=True)(trained, fixed, _shapes(setup, rows))
    body = Jaxpr(without_dead_code(jaxpr.jaxpr), unit)
    return _Step(_ordered(body, platform), len(jax.tree.leaves(out[0])))


class _Once(PlainRunner):
    """A plain runner whose gradient of a microbatch is traced once for any number of
    microbatches.
    """

    @functools.cached_property
    def _kept(self) -> Any:
        return jax.jit(super().loss_grad, static_argnames="loss")

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """The plain runner's sums and gradients."""
        result: tuple[Sums, Params] = self._kept(params, frozen, batch, loss=loss, scale=scale)
        return result


@functools.lru_cache(maxsize=64)
def _runner(config: ModelConfig, mesh: MeshConfig, platform: str) -> tuple[Model, PlainRunner]:
    model = build_model(config, abstract_devices.mesh(mesh, platform))
    return model, _Once(model.apply)


def _unit(model: Model, length: int, copies: int) -> int:
    dims = {n for x in model.shapes.values() for n in x.shape} | {length}
    for unit in _UNITS:
        if unit * length * max(1, copies) < 2**31 and all(n % unit for n in dims):
            return unit
    raise ConfigError(
        f"sequences of {length} tokens with {copies} copies each for experts can't be planned yet: "
        "a trace can't index them in 32 bits"
    )


def _shapes(setup: StepSetup, rows: int) -> Batch | Pairs:
    """Abstract batch of so many sequences, or examples."""
    if setup.pairs:
        return pairs.shapes(setup.config, setup.pairs, rows)
    return abstract_devices.batch(setup.config, rows, setup.length, setup.images, setup.patches)
