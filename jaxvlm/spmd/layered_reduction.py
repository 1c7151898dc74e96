"""Quantized gradient reduction where parameters are all-gathered layer by layer (ZeRO-3, FSDP).

The compiler reduces a layer's gradient as soon as it is known, in the compute dtype. To send fewer
bits, the batch axes are manual here: a layer reads its all-gathered weights, and the gradient of
that all-gather is a quantized reduce-scatter. Parameters without layers (embedding, output matrix)
are all-gathered once a step, and their gradients, summed on each device first, are reduced once.

Sources: FSDP, arXiv 2304.11277; the reduction is that of :mod:`jaxvlm.parallel.grad_reduce`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxvlm.nn.param import Weight, contract
from jaxvlm.parallel.grad_reduce import GradReduction, on_local_shards
from jaxvlm.parallel.sharding import mesh_axes
from jaxvlm.spmd.model import Model
from jaxvlm.train.grad_accum import GradAccumulation, PlainRunner
from jaxvlm.types import Batch, Loss, Out, Params, Runner, Sums


@dataclasses.dataclass(frozen=True)
class LayeredReduction:
    """All-gathers of a model's parameters over batch axes, and reductions of their gradients.

    Args:
        model: a model on its mesh.
        axes: batch axes with several devices, in :data:`jaxvlm.parallel.grad_reduce.ORDER`.
        bits: bits of a value on the wire, see :class:`jaxvlm.parallel.grad_reduce.GradReduction`.
    """

    model: Model[Any]
    axes: tuple[str, ...]
    bits: int

    @functools.cached_property
    def layout(self) -> dict[str, NamedSharding]:
        """Shardings of parameters in a step, and of their gradients."""
        return self.model.layout("all_gathered")

    def specs(self, paths: Any) -> dict[str, P]:
        """Return the part of :attr:`layout` that is over the batch axes."""
        return {path: P(*map(self._own, self.layout[path].spec)) for path in paths}

    def _own(self, place: Any) -> tuple[str, ...] | None:
        return tuple(a for a in mesh_axes(place) if a in self.axes) or None

    def gather(self, path: str) -> Gather | None:
        """Return a parameter's all-gather, of one layer; ``None`` if it is not sharded."""
        logical, spec = self.model.logical[path], self.layout[path].spec
        stacked = logical[0] == "layers"
        split = [(i, own) for i, place in enumerate(spec) if (own := self._own(place))]
        if not split:
            return None
        ((dim, own),) = split
        return Gather(path, dim - stacked, own, self.model.config.dtype, self._reduction(path))

    def _reduction(self, path: str) -> GradReduction:
        """Return the reduction of the gradient of one layer's parameter."""
        stacked = self.model.logical[path][0] == "layers"
        where = self.layout[path].update(spec=P(*self.layout[path].spec[stacked:]))
        return GradReduction(self.model.mesh, self.axes, {path: where}, self.bits)

    def on_use(self, params: Params) -> Params:
        """All-gather parameters without layers, and let layers all-gather theirs."""
        held = dict(params)
        for path in params.keys() & self.layout.keys():
            if (how := self.gather(path)) is not None:
                stacked = self.model.logical[path][0] == "layers"
                kept = GatheredOnUse(params[path], how)
                held[path] = kept if stacked else kept[...]
        return held

    def rest(self, grads: Params) -> Params:
        """Reduce the gradients of parameters that are not all-gathered."""
        add = GradReduction(self.model.mesh, self.axes, self.layout, self.bits)
        whole = [path for path in grads if self.gather(path) is None]
        return {**grads, **{path: add.local(path, grads[path]) for path in whole}}


@dataclasses.dataclass(frozen=True, eq=False)
class Gather:
    """An all-gather whose gradient is a quantized reduce-scatter."""

    path: str
    dim: int
    axes: tuple[str, ...]
    dtype: str
    """Dtype on the wire, and of the result: the compute dtype."""
    reduction: GradReduction

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., n / devices, ...] -> [..., n, ...]."""
        dtype = x.dtype

        @jax.custom_vjp
        def gathered(x: jax.Array) -> jax.Array:
            return jax.lax.all_gather(x.astype(self.dtype), self.axes, axis=self.dim, tiled=True)

        def back(_: None, g: jax.Array) -> tuple[jax.Array]:
            return (self.reduction.local(self.path, g).astype(dtype),)

        gathered.defvjp(lambda x: (gathered(x), None), back)
        return gathered(x)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["shard"], meta_fields=["how"])
@dataclasses.dataclass(frozen=True)
class GatheredOnUse(Weight):
    """A parameter's shard on a device, all-gathered each time that it is read."""

    shard: Any
    how: Gather

    def __getitem__(self, index: Any) -> Any:
        """Return the all-gathered parameter for ``[...]``."""
        super().__getitem__(index)
        return self.how(self.shard)

    def contract(self, x: jax.Array, num_in: int, split: bool) -> jax.Array:
        """Multiply by the all-gathered parameter."""
        return contract(x, self[...], num_in, split)

    def dense(self) -> jax.Array:
        """Return the all-gathered parameter."""
        return self[...]


@dataclasses.dataclass(frozen=True)
class LayeredGradients:
    """A runner whose gradients are reduced in few bits, layer by layer, in the backward pass."""

    runner: Runner
    """The same model, whose collectives are the compiler's."""
    reduction: LayeredReduction
    parts: int
    """Microbatches."""

    def fwd(self, params: Params, frozen: Params, batch: Batch) -> Out:
        """Run the forward pass."""
        return self.runner.fwd(params, frozen, batch)

    def vjp(self, params: Params, frozen: Params, batch: Batch, d_out: Out) -> Params:
        """Return gradients of ``params`` for the cotangent ``d_out``, reduced by the compiler."""
        return self.runner.vjp(params, frozen, batch, d_out)

    def loss_grad(
        self, params: Params, frozen: Params, batch: Batch, loss: Loss, scale: Mapping[str, Any]
    ) -> tuple[Sums, Params]:
        """Return sums over all examples, and the reduced gradients."""
        how, model = self.reduction, self.reduction.model

        def apply(params: Params, batch: Batch) -> Out:
            return model.apply(how.on_use(params), batch)

        local: Runner = PlainRunner(apply)
        if self.parts > 1:
            local = GradAccumulation(local, self.parts, model.mesh)

        def part(
            params: Params, frozen: Params, batch: Batch, scale: Mapping[str, Any]
        ) -> tuple[Sums, Params]:
            sums, grads = local.loss_grad(params, frozen, batch, loss, scale)
            return sums, how.rest(grads)

        specs = how.specs(params), how.specs(frozen)
        run = on_local_shards(part, model.mesh, how.axes, *specs)
        return run(params, frozen, batch, scale)
