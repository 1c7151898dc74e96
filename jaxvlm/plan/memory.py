"""What a train step needs of a device's memory, by part, before anything is compiled.

What lies there between steps is exact: shapes and sharding rules say it. What a step needs besides
is read from the step's own trace, for one device's rows and one device's heads (see ``live``): it
is the program that is run, so blocks and remat need no formula of their own. The loss is that of
next tokens. ``benchmarks/planner.py`` puts it beside the compilers' figures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.build.assemble import split
from jaxvlm.build.model import Model, build_model
from jaxvlm.config import ConfigError, MeshConfig, ModelConfig, StrategyConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.plan import absent, live
from jaxvlm.plan.traced import Share
from jaxvlm.train.objective import scales
from jaxvlm.train.runner import Microbatched, PlainRunner
from jaxvlm.types import Batch, Params

_UNKNOWN_AXES = ("stage", "context", "expert")


class Setup(NamedTuple):
    """A way to train a model: what :func:`estimate` is of."""

    config: ModelConfig
    """``dtype`` and both towers' ``remat`` set."""
    mesh: MeshConfig
    """Resolved."""
    strategy: StrategyConfig
    """Resolved."""
    platform: str
    """cpu | gpu | tpu."""
    rows: int
    """Of a batch, over all devices."""
    length: int
    """Tokens of a row."""
    pictures: int
    """Of a row."""
    patches: int = 0
    """Of a row, where pictures come packed."""
    frozen: tuple[str, ...] = ()
    """Path patterns."""
    microbatches: int = 1


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


class Compiler(NamedTuple):
    """What a platform's compiler adds to a trace."""

    update: float = 0.0
    """Of the optimizer's share of all gradients, beside everything else: XLA for CPUs writes new
    moments and parameters behind the old ones."""
    whole: float = 0.0
    """Of parameters that are gathered again behind the update (ZeRO-1 and 2)."""
    early: bool = False
    """See :func:`jaxvlm.plan.live.peak`."""


COMPILERS = {
    "cpu": Compiler(update=2.0),
    "gpu": Compiler(whole=1.0, early=True),
    "tpu": Compiler(),
}
"""By platform: read from XLA's buffer assignments, JAX 0.10.2."""


def estimate(setup: Setup) -> Estimate:
    """What a train step of AdamW needs.

    Args:
        setup: model, mesh, strategy and batch.

    Raises:
        ConfigError: dims that the mesh does not divide, or what is not known here.
    """
    _check(setup)
    compiler = COMPILERS[setup.platform]
    model = model_of(setup)
    own, _ = split(model, model.shapes, setup.frozen)
    gathered, stored = (_bytes(model, model.layout(f)) for f in ("gathered", "params"))
    work = dict(live.peak(*_traced(setup, model, tuple(own), gathered), compiler.early).parts)
    moments = _bytes(model, model.layout("optimizer"))
    updated = sum(moments[path] for path in own)
    if compiler.update:
        work["update"] = compiler.update * updated
    # New parameters are whole beside the old ones, where they are made of shares.
    whole = compiler.whole * sum(stored[path] for path in own if stored[path] > moments[path])
    if whole + updated > sum(work.values()):
        work = {"gradients": float(updated), "new parameters": whole}
    if moved := sum(gathered[p] for p in gathered if gathered[p] != stored[p]):
        work["gathered weights"] = float(moved)
    return Estimate(states(setup, model), work)


def _check(setup: Setup) -> None:
    """Refuse what would be counted wrong."""
    config, mesh = setup.config, setup.mesh
    unknown = {f"config.mesh.{axis}": getattr(mesh, axis) > 1 for axis in _UNKNOWN_AXES} | {
        "config.model.decoder.num_experts": config.decoder.num_experts > 0,
        "config.model.decoder.dropout": config.decoder.dropout > 0,
        "config.model.vision.dropout": config.vision.dropout > 0,
        "config.model.lora.dropout": config.lora.dropout > 0,
        "remat='offload'": "offload" in (config.decoder.remat, config.vision.remat),
    }
    for name, is_set in unknown.items():
        if is_set:
            raise ConfigError(
                f"{name} can't be planned yet: jaxvlm train --dry_run compiles the step and says "
                "what it needs"
            )


def model_of(setup: Setup) -> Model:
    """The model on its mesh of absent devices.

    Raises:
        ConfigError: dims that the mesh does not divide.
    """
    return build_model(setup.config, absent.mesh(setup.mesh, setup.platform), setup.strategy)


def states(setup: Setup, model: Model) -> dict[str, int]:
    """Bytes of a device between steps, exact; moments in host memory are not counted.

    Args:
        setup: what is planned.
        model: its model.
    """
    own, _ = split(model, model.shapes, setup.frozen)
    stored, moments = (_bytes(model, model.layout(f)) for f in ("params", "optimizer"))
    here = {path: 2 * moments[path] for path in own}
    batch = sum(_size(x) for x in jax.tree.leaves(_batch(setup, _local_rows(setup))))
    return {
        "parameters": sum(stored[path] for path in own),
        "frozen": sum(size for path, size in stored.items() if path not in own),
        "moments": sum(n for p, n in here.items() if "optimizer" not in model.strategy(p).offload),
        "batch": batch,
    }


def _bytes(model: Model, layout: dict[str, Any]) -> dict[str, int]:
    """Of each parameter on a device."""
    return {
        path: math.prod(layout[path].shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
        for path, x in model.shapes.items()
    }


def _size(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize


def _local_rows(setup: Setup) -> int:
    shards = math.prod(getattr(setup.mesh, axis) for axis in BATCH_AXES)
    if setup.rows % shards:
        raise ConfigError(f"{setup.rows} rows are not divisible by {shards} batch shards")
    return setup.rows // shards


def _traced(
    setup: Setup, model: Model, own: tuple[str, ...], gathered: dict[str, int]
) -> tuple[Any, list[Share], list[Share]]:
    """The gradient of one device's rows, and what of its inputs and outputs a device holds."""
    config = setup.config
    if setup.platform == "gpu":  # cuDNN's attention can't be traced without cuDNN
        config = dataclasses.replace(config, attention="xla")
    shape = (_local_rows(setup), setup.length, setup.pictures, setup.patches)
    jaxpr, sizes, sums = _trace(config, setup.platform, *shape, setup.frozen, setup.microbatches)
    layout = model.layout("gathered")
    # The sum of a step's gradients is asked for where moments lie, and compilers make it there.
    summed = _bytes(model, model.layout("gradients" if setup.microbatches > 1 else "optimizer"))

    def share(path: str, held: dict[str, int]) -> Share:
        x = model.shapes[path]
        spec = (*layout[path].spec, *(None for _ in x.shape))[: len(x.shape)]
        dims = tuple(_over(place, setup.mesh) for place in spec)
        parts = sizes[path] / held[path] / math.prod(dims)
        return Share(max(1.0, parts), dims if math.prod(dims) > 1 else ())

    still = [path for path in sizes if path not in own]
    ins = [share(path, gathered) for path in (*sorted(own), *sorted(still))]
    ins += [Share()] * (len(jaxpr.in_avals) - len(ins))
    return jaxpr, ins, [Share()] * sums + [share(path, summed) for path in sorted(own)]


def _over(place: Any, mesh: MeshConfig) -> int:
    """Devices that split a dim in matmuls too."""
    names = (place,) if isinstance(place, str) else place or ()
    return math.prod(getattr(mesh, name) for name in names if name not in BATCH_AXES)


@functools.lru_cache(maxsize=64)
def _trace(
    config: ModelConfig,
    platform: str,
    rows: int,
    length: int,
    pictures: int,
    patches: int,
    frozen: tuple[str, ...],
    microbatches: int,
) -> tuple[Any, dict[str, int], int]:
    """(the gradient's jaxpr, bytes of each parameter, how many outputs are no gradients)."""
    alone = absent.mesh(MeshConfig(data=1), platform)
    model = build_model(config, alone)
    loss, plain = NextToken(), PlainRunner(model.apply)
    runner = Microbatched(plain, microbatches) if microbatches > 1 else plain
    own, still = split(model, model.shapes, frozen)

    def grads(params: Params, frozen: Params, batch: Batch) -> Any:
        return runner.loss_grad(params, frozen, batch, loss, scales(loss, batch))

    setup = Setup(
        config, MeshConfig(data=1), StrategyConfig(), platform, rows, length, pictures, patches
    )
    jaxpr, out = jax.make_jaxpr(grads, return_shape=True)(own, still, _batch(setup, rows))
    return jaxpr, {p: _size(x) for p, x in model.shapes.items()}, len(jax.tree.leaves(out[0]))


def _batch(setup: Setup, rows: int) -> Batch:
    """Shapes of so many rows."""
    vision = setup.config.vision

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    batch = Batch(
        tokens=of(np.int32, setup.length),
        loss_weight=of(np.float32, setup.length),
        positions=of(np.int32, max(1, len(setup.config.decoder.rope_sections)), setup.length),
        segment=of(np.int32, setup.length),
    )
    if not setup.pictures:
        return batch
    batch = batch._replace(image_start=of(np.int32, setup.pictures))
    if vision.packed:
        width = 3 * vision.frames * vision.patch_size**2
        packed = of(np.uint8, setup.patches, width)
        return batch._replace(patches=packed, grid=of(np.int32, setup.pictures, 3))
    side = vision.image_size
    return batch._replace(pixels=of(np.uint8, setup.pictures, side, side, 3))
