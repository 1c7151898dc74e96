"""From settings to a model: its graph, the shapes and shardings of its parameters, its draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxvlm.config import ModelConfig
from jaxvlm.models import lora
from jaxvlm.models.vlm import VLM
from jaxvlm.nn.param import Init, linear_maps, logical_axes, merge, split
from jaxvlm.parallel.rules import Axes
from jaxvlm.types import Batch, Logical, Out, Params

TOWERS = ("vision", "connector", "decoder")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model without its parameters."""

    config: ModelConfig
    mesh: Mesh
    graph: Any
    """Static; :func:`jaxvlm.nn.param.merge` makes a module of it and parameters."""
    shapes: dict[str, jax.ShapeDtypeStruct]
    logical: dict[str, Logical]
    shardings: dict[str, NamedSharding]
    adapted: dict[str, lora.Target]
    """The linear maps that have an adapter."""

    def init(self, seed: int) -> Params:
        """Random parameters, born sharded; the same on every mesh."""

        def draw(key: jax.Array) -> Params:
            return split(_module(self.config, self.mesh, key))[1]

        key = jax.random.key(seed)
        return self.with_adapters(self._jit(draw, self.base())(key), seed)

    def with_adapters(self, base: Params, seed: int) -> Params:
        """``base``, the parameters of :meth:`base`, and new adapters that change no output."""
        if not self.adapted:
            return base

        def draw(key: jax.Array, weights: Params) -> Params:
            return lora.draw(self.config.lora, self.adapted, key, weights)

        made = [path for path in self.shapes if lora.is_adapter(path)]
        weights = {path: base[path] for path in self.adapted}
        # Another stream than the base's: its draw must not depend on adapters, nor they on it.
        key = jax.random.fold_in(jax.random.key(seed), 1)
        return {**base, **self._jit(draw, made)(key, weights)}

    def _jit(self, draw: Callable[..., Params], paths: Iterable[str]) -> Callable[..., Params]:
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        # It runs once: LLVM's full effort on every random draw takes five times as long.
        options = {"xla_backend_optimization_level": 0} if cpu else None
        where = {path: self.shardings[path] for path in paths}
        return jax.jit(draw, out_shardings=where, compiler_options=options)

    def module(self, params: Params) -> VLM:
        """The module with ``params`` in it."""
        if self.adapted:
            params = lora.attach(params, lora.scale(self.config.lora))
        return merge(self.graph, params)

    def apply(self, params: Params, batch: Batch) -> Out:
        """The forward pass as a function of parameters."""
        return self.module(params)(batch)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes with their shardings."""
        return {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.shardings[path])
            for path, x in self.shapes.items()
        }

    def base(self) -> dict[str, jax.ShapeDtypeStruct]:
        """:meth:`abstract` without adapters."""
        return {path: x for path, x in self.abstract().items() if not lora.is_adapter(path)}

    def merged(self, params: Params) -> Params:
        """Parameters of the same model without adapters: they are added to the weights."""
        if not self.adapted:
            return params
        return lora.merge(params, self.adapted, lora.scale(self.config.lora))


def build_model(config: ModelConfig, mesh: Mesh) -> Model:
    """The model of ``config`` on ``mesh``; allocates nothing.

    Args:
        config: dims and variants, ``decoder.vocab_size`` set.
        mesh: where it will run.

    Raises:
        ConfigError: dims that do not fit each other or the mesh.
    """
    seen: dict[str, Any] = {}

    def draw(key: jax.Array) -> Params:
        module = _module(config, mesh, key)
        seen["graph"], params = split(module)
        seen["logical"], seen["linear"] = logical_axes(module), linear_maps(module)
        return params

    shapes, axes = jax.eval_shape(draw, jax.random.key(0)), _axes(mesh)
    logical = seen["logical"]
    adapted = lora.find(config.lora, seen["linear"], logical)
    more, words = lora.parameters(config.lora, adapted, shapes, logical)
    shapes, logical = {**shapes, **more}, {**logical, **words}
    shardings = {
        path: axes[path.split("/")[0]].parameter(path, logical[path], x.shape)
        for path, x in shapes.items()
    }
    return Model(config, mesh, seen["graph"], shapes, logical, shardings, adapted)


def _axes(mesh: Mesh) -> dict[str, Axes]:
    return dict.fromkeys(TOWERS, Axes(mesh))


def _module(config: ModelConfig, mesh: Mesh, key: jax.Array) -> VLM:
    return VLM(Init(nnx.Rngs(params=key)), _axes(mesh), config)
