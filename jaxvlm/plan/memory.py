"""What a train step needs of a device's memory, by part, before anything is compiled.

What lies there between steps is exact: shapes and sharding rules say it. What a step needs besides
is read from the step's own trace, for one device's rows and one device's heads (see ``live``): it
is the program that is run, so blocks and remat need no formula of their own. The loss is that of
next tokens. ``benchmarks/planner.py`` puts it beside the compilers' figures.
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

from jaxvlm.build.assemble import reduction_of, split
from jaxvlm.build.model import Model, build_model, on
from jaxvlm.config import (
    ConfigError,
    DualConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
    VectorConfig,
)
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.parallel.rules import quiet
from jaxvlm.plan import absent, learned, live, pairs, tiles
from jaxvlm.plan.compilers import COMPILERS, Compiler
from jaxvlm.plan.pairs import Pairing
from jaxvlm.plan.program import Body
from jaxvlm.plan.traced import NONE, Held, Share
from jaxvlm.train.objective import scales
from jaxvlm.train.runner import Microbatched, PlainRunner
from jaxvlm.types import Batch, Loss, Pairs, Params, Sums

_UNKNOWN_AXES = ("stage", "context")
_UNITS = (10007, 2003, 401, 101)
"""Rows that a step is traced for: a prime, so that dims that are rows are known by it. The first
whose tokens' copies for experts can be numbered in 32 bits, and that divides no parameter's dim."""


class Setup(NamedTuple):
    """A way to train a model: what :func:`estimate` is of."""

    config: ModelConfig | DualConfig
    """``dtype`` and both towers' ``remat`` set."""
    mesh: MeshConfig
    """Resolved."""
    strategy: StrategyConfig
    """Resolved."""
    platform: str
    """cpu | gpu | tpu."""
    rows: int
    """Of a batch, over all devices; of pairs, examples."""
    length: int
    """Tokens of a row; of pairs, those of the longer side's."""
    pictures: int
    """Of a row, or of an example."""
    patches: int = 0
    """Of a row, where pictures come packed."""
    frozen: tuple[str, ...] = ()
    """Path patterns."""
    microbatches: int = 1
    """Of pairs, chunks of that side which has more of them."""
    pairs: Pairing | None = None
    """What an example is, and the chunks that it is run in; ``None``: rows are trained on."""


class Estimate(NamedTuple):
    """Bytes of a device."""

    states: dict[str, int]
    """Between steps: ``parameters``, ``frozen``, ``moments``, ``batch``. Exact."""
    work: dict[str, float]
    """Besides these at a step's worst moment, by part; see :class:`jaxvlm.plan.live.Peak`."""

    @property
    def peak(self) -> float:
        """Their sum."""
        return sum(self.states.values()) + sum(self.work.values())


def estimate(setup: Setup) -> Estimate:
    """What a train step of AdamW needs.

    Args:
        setup: model, mesh, strategy and batch.

    Raises:
        ConfigError: dims that the mesh does not divide, or what is not known here.
    """
    check(setup)
    compiler = COMPILERS[setup.platform]
    lies = _lies(setup)
    own = tuple(sorted(split(lies.model, lies.model.shapes, setup.frozen)[0]))
    gathered, stored, moments = (lies.bytes[f] for f in ("gathered", "params", "optimizer"))
    copied = sorted(2 * [float(moments[path]) for path in own]) if compiler.copied else []
    work = dict(_peak(*_shares(setup, lies, own), compiler, tuple(copied)).parts)
    if copied:
        work["update"] = sum(copied)
    behind = _behind(setup, lies, own)
    work = max(work, behind, key=lambda parts: sum(parts.values()))
    if moved := sum(gathered[p] for p in gathered if gathered[p] != stored[p]):
        work["gathered weights"] = float(moved)
    return Estimate(_states(setup, lies.model, own, stored, moments), work)


def _behind(setup: Setup, lies: _Layouts, own: tuple[str, ...]) -> dict[str, float]:
    """What there is besides states when all gradients are there, by part."""
    compiler, found = COMPILERS[setup.platform], dict[str, float]()
    stored, moments = (lies.bytes[f] for f in ("params", "optimizer"))
    updated = sum(moments[path] for path in own)
    if compiler.sums_behind and _shards(setup) > 1 and setup.microbatches > 1:
        specs = lies.model.layout("optimizer")
        whole = sum(moments[p] for p in own if not _is_shared(specs[p].spec, setup.mesh))
        # What two loops add up lies where moments lay; see passes.
        beside = 1 if setup.pairs and isinstance(setup.config, ModelConfig) else 2
        found["gradients"], found["update"] = float(beside * whole), 2.0 * updated * compiler.copied
    if compiler.gathers:
        new, old = lies.model.layout("optimizer"), lies.model.layout("params")
        whole = sum(stored[p] for p in own if _gathered_behind(new[p].spec, old[p].spec))
        found["gradients"], found["new parameters"] = compiler.gathers * updated, float(whole)
    return found


def check(setup: Setup) -> None:
    """Refuse what would be counted wrong."""
    config, mesh = setup.config, setup.mesh
    name = "dual" if isinstance(config, DualConfig) else "model"
    towers = {t: getattr(config, t) for t in ("vision", "decoder", "text") if hasattr(config, t)}
    unknown = {f"config.mesh.{axis}": getattr(mesh, axis) > 1 for axis in _UNKNOWN_AXES}
    unknown |= {f"config.{name}.{t}.dropout": x.dropout > 0 for t, x in towers.items()}
    unknown[f"config.{name}.lora.dropout"] = config.lora.dropout > 0
    unknown["remat='offload'"] = any(x.remat == "offload" for x in towers.values())
    if isinstance(config, ModelConfig):
        unknown["config.model.connector.newline"] = config.connector.newline
    if setup.pairs:
        unknown["config.mesh.expert with a loss of pairs"] = mesh.expert > 1
    for name, is_set in unknown.items():
        if is_set:
            raise ConfigError(
                f"{name} can't be planned yet: jaxvlm train --dry_run compiles the step and says "
                "what it needs"
            )


def model_of(setup: Setup) -> Model:
    """The model on its mesh of absent devices: for its shapes and layouts, it can't be run.

    Raises:
        ConfigError: dims that the mesh does not divide.
    """
    return _lies(setup).model


def states(setup: Setup, model: Model) -> dict[str, int]:
    """Bytes of a device between steps, exact; moments in host memory are not counted.

    Args:
        setup: what is planned.
        model: its model.
    """
    own, _ = split(model, model.shapes, setup.frozen)
    stored, moments = (_bytes(model, f, setup.platform) for f in ("params", "optimizer"))
    return _states(setup, model, tuple(own), stored, moments)


def _states(
    setup: Setup,
    model: Model,
    own: tuple[str, ...],
    stored: Mapping[str, int],
    moments: Mapping[str, int],
) -> dict[str, int]:
    trained = frozenset(own)
    here = {path: 2 * moments[path] for path in own}
    batch = sum(
        _takes(x.shape, x, setup.platform)
        for x in jax.tree.leaves(_shapes(setup, _local_rows(setup)))
    )
    return {
        "parameters": sum(stored[path] for path in own),
        "frozen": sum(size for path, size in stored.items() if path not in trained),
        "moments": sum(n for p, n in here.items() if "optimizer" not in model.strategy(p).offload),
        "batch": batch,
    }


class _Layouts(NamedTuple):
    """Where a model's parameters lie."""

    model: Model
    bytes: dict[str, dict[str, int]]
    """By field of StrategyConfig: of each parameter on a device."""


def _lies(setup: Setup) -> _Layouts:
    vectors = setup.pairs.vectors if setup.pairs else None
    return _layouts(setup.config, setup.mesh, setup.strategy, setup.platform, vectors)


@functools.lru_cache(maxsize=1024)
def _layouts(
    config: ModelConfig | DualConfig,
    mesh: MeshConfig,
    strategy: StrategyConfig,
    platform: str,
    vectors: VectorConfig | None,
) -> _Layouts:
    alone = dataclasses.replace(learned.alone(learned.plain(config), vectors), config=config)
    model = on(alone, absent.mesh(mesh, platform), strategy)
    fields = ("params", "gathered", "gradients", "optimizer")
    return _Layouts(model, {field: _bytes(model, field, platform) for field in fields})


def _bytes(model: Model, field: str, platform: str) -> dict[str, int]:
    """Of each parameter on a device."""
    layout = model.layout(field)
    return {
        path: _takes(layout[path].shard_shape(x.shape), x, platform)
        for path, x in model.shapes.items()
    }


def _takes(shape: Sequence[int], x: jax.ShapeDtypeStruct, platform: str) -> int:
    """Bytes of an array of this shape."""
    number = np.dtype(x.dtype).itemsize
    if COMPILERS[platform].tiled:
        return round(tiles.size(tuple(shape), number))
    return math.prod(shape) * number


def _size(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize


def _is_shared(spec: Iterable[Any], mesh: MeshConfig) -> bool:
    """Whether devices with other rows have other parts."""
    return any(_gathered(place, "", mesh) for place in spec)


def _shards(setup: Setup) -> int:
    return math.prod(getattr(setup.mesh, axis) for axis in BATCH_AXES)


def _local_rows(setup: Setup) -> int:
    shards = _shards(setup)
    if setup.rows % shards:
        raise ConfigError(f"{setup.rows} rows are not divisible by {shards} batch shards")
    return setup.rows // shards


def _shares(
    setup: Setup, lies: _Layouts, own: tuple[str, ...]
) -> tuple[Body, tuple[Share, ...], tuple[Share, ...], float]:
    """The gradient of a batch, what of its inputs and outputs a device holds, and its rows."""
    step, rows = _step(setup, lies.model)
    model, layout = lies.model, lies.model.layout("gathered")
    # The sum of a step's gradients is asked for where moments lie, and compilers make it there; of
    # microbatches or chunks, where the strategy's gradients do.
    summed = lies.bytes["gradients" if setup.microbatches > 1 else "optimizer"]

    compiler = COMPILERS[setup.platform]

    def share(path: str, held: dict[str, int]) -> Share:
        x, words = model.shapes[path], model.logical[path]
        spec = (*layout[path].spec, *(None for _ in x.shape))[: len(x.shape)]
        dims = tuple(_over(place, word, setup.mesh) for place, word in zip(spec, words))
        parts = _size(x) / held[path] / math.prod(dims)
        # Below one: a whole parameter that is padded.
        least = 0.0 if compiler.tiled else 1.0
        behind = list(zip(spec, words))[2:] if words[:1] == ("layers",) else []
        turned = compiler.turns and any(_gathered(*b, setup.mesh) for b in behind)
        return Share(max(least, parts), dims if math.prod(dims) > 1 else (), turned)

    still = sorted(model.shapes.keys() - set(own))
    ins = [share(path, lies.bytes["gathered"]) for path in (*own, *still)]
    ins += [NONE] * (len(step.body.ins) - len(ins))
    outs = [NONE] * step.sums + [share(path, summed) for path in own]
    return step.body, tuple(ins), tuple(outs), rows


@functools.lru_cache(maxsize=4096)
def _peak(
    body: Body,
    ins: tuple[Share, ...],
    outs: tuple[Share, ...],
    rows: float,
    compiler: Compiler,
    room: tuple[float, ...],
) -> live.Peak:
    held = Held(body, ins, outs, rows, compiler.tiled)
    return live.peak(held, compiler, room=room)


def _gathered_behind(new: Any, old: Any) -> bool:
    """Whether devices split a dim of what is updated that they don't of a parameter, not the first:
    what they gather is then put in order.
    """
    places = itertools.zip_longest(new, old)
    return any(i > 0 and a != b for i, (a, b) in enumerate(places))


def _gathered(place: Any, word: str, mesh: MeshConfig) -> bool:
    """Whether devices split a dim that is whole in matmuls."""
    names = (place,) if isinstance(place, str) else place or ()
    return word != "experts" and any(getattr(mesh, n) > 1 for n in names if n in BATCH_AXES)


def _over(place: Any, word: str, mesh: MeshConfig) -> int:
    """Devices that split a dim in matmuls too."""
    names = (place,) if isinstance(place, str) else place or ()
    return math.prod(getattr(mesh, n) for n in names if n not in BATCH_AXES or word == "experts")


class _Step(NamedTuple):
    """A step's gradient, traced."""

    body: Body
    sums: int
    """How many of its outputs are no gradients."""


def _step(setup: Setup, model: Model) -> tuple[_Step, float]:
    """The step's trace, and how many rows its unit stands for."""
    rows, config = _local_rows(setup), _plain(setup)
    if setup.pairs:
        again = reduction_of(model, setup.microbatches) is not None
        return _of_pairs(config, setup.platform, setup.pairs, setup.frozen, rows, again), 1.0
    if rows % setup.microbatches:
        raise ConfigError(f"{rows} rows a device are not divisible by {setup.microbatches} parts")
    assert isinstance(config, ModelConfig), "a dual encoder is trained on pairs"
    step = _trace(
        config, setup.platform, setup.length, setup.pictures, setup.patches, setup.frozen,
        setup.microbatches, setup.mesh.expert,
    )  # fmt: skip
    # Where experts are split, the trace has the rows of all devices that share them.
    return step, rows / setup.microbatches / setup.mesh.expert


@functools.lru_cache(maxsize=64)
def _of_pairs(
    config: ModelConfig | DualConfig,
    platform: str,
    pairing: Pairing,
    frozen: tuple[str, ...],
    rows: int,
    again: bool,
) -> _Step:
    jaxpr, sums = pairs.traced(config, platform, pairing, frozen, rows, again)
    return _Step(_ordered(Body(jaxpr), platform), sums)


def _ordered(body: Body, platform: str) -> Body:
    """As the platform's compiler goes through it."""
    body = body.lean()
    return {"gpu": body.late, "cpu": body.broad, "tpu": body.hoisted}.get(platform, lambda: body)()


@functools.lru_cache(maxsize=64)
def _trace(
    config: ModelConfig,
    platform: str,
    length: int,
    pictures: int,
    patches: int,
    frozen: tuple[str, ...],
    microbatches: int,
    expert: int,
) -> _Step:
    mesh = MeshConfig(data=1, expert=expert)
    model, plain = _runner(config, mesh, platform)
    loss, runner = NextToken(), Microbatched(plain, microbatches) if microbatches > 1 else plain
    own, still = split(model, model.shapes, frozen)

    def grads(params: Params, frozen: Params, batch: Batch) -> Any:
        return runner.loss_grad(params, frozen, batch, loss, scales(loss, batch))

    unit = _unit(model, length, config.decoder.experts_per_token * expert)
    rows = unit * microbatches * expert
    setup = Setup(config, mesh, StrategyConfig(), platform, rows, length, pictures, patches)
    with quiet():
        jaxpr, out = jax.make_jaxpr(grads, return_shape=True)(own, still, _shapes(setup, rows))
    return _Step(_ordered(Body(jaxpr.jaxpr, unit), platform), len(jax.tree.leaves(out[0])))


class _Once(PlainRunner):
    """A plain runner whose gradient of rows is traced once, whatever number of microbatches they
    are of."""

    @functools.cached_property
    def _kept(self) -> Any:
        return jax.jit(super().loss_grad, static_argnames="loss")

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """As a plain runner's."""
        found: tuple[Sums, Params] = self._kept(params, frozen, batch, loss=loss, scale=scale)
        return found


@functools.lru_cache(maxsize=64)
def _runner(config: ModelConfig, mesh: MeshConfig, platform: str) -> tuple[Model, PlainRunner]:
    model = build_model(config, absent.mesh(mesh, platform))
    return model, _Once(model.apply)


def _unit(model: Model, length: int, copies: int) -> int:
    dims = {n for x in model.shapes.values() for n in x.shape} | {length}
    for unit in _UNITS:
        if unit * length * max(1, copies) < 2**31 and all(n % unit for n in dims):
            return unit
    raise ConfigError(
        f"{length} tokens a row, {copies} copies each for experts, can't be planned yet: a trace "
        "can't number them"
    )


def _plain(setup: Setup) -> ModelConfig | DualConfig:
    """The model as it is traced: cuDNN's attention can't be without cuDNN."""
    if setup.platform != "gpu":
        return setup.config
    return dataclasses.replace(setup.config, attention="xla")


def _shapes(setup: Setup, rows: int) -> Batch | Pairs:
    """Of so many rows, or examples."""
    if setup.pairs:
        return pairs.shapes(setup.config, setup.pairs, rows)
    return absent.batch(setup.config, rows, setup.length, setup.pictures, setup.patches)
