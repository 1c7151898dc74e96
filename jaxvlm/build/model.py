"""From settings to a model: its graph, the shapes and shardings of its parameters, its draw."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxvlm.config import DualConfig, ModelConfig
from jaxvlm.models.dual import DualEncoder
from jaxvlm.models.vlm import VLM
from jaxvlm.nn.param import Init, logical_axes, merge, split
from jaxvlm.parallel.rules import Axes
from jaxvlm.types import Batch, Logical, Out, Params

Config = TypeVar("Config", ModelConfig, DualConfig)
_TOWERS = ("vision", "connector", "decoder", "text", "head")


@dataclasses.dataclass(frozen=True)
class Model(Generic[Config]):
    """A model without its parameters."""

    config: Config
    mesh: Mesh
    graph: Any
    """Static; :func:`jaxvlm.nn.param.merge` makes a module of it and parameters."""
    shapes: dict[str, jax.ShapeDtypeStruct]
    logical: dict[str, Logical]
    shardings: dict[str, NamedSharding]

    def init(self, seed: int) -> Params:
        """Random parameters, born sharded; the same on every mesh."""
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        # It runs once: LLVM's full effort on every random draw takes five times as long.
        options = {"xla_backend_optimization_level": 0} if cpu else None
        draw = jax.jit(self._draw, out_shardings=self.shardings, compiler_options=options)
        return draw(jax.random.key(seed))

    def _draw(self, key: jax.Array) -> Params:
        return split(_module(self.config, self.mesh, key))[1]

    def module(self, params: Params) -> Any:
        """The module with ``params`` in it: a ``VLM``, or a ``DualEncoder``."""
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


def build_model(config: Config, mesh: Mesh) -> Model[Config]:
    """The model of ``config`` on ``mesh``; allocates nothing.

    Args:
        config: dims and variants, the vocabulary's size set.
        mesh: where it will run.

    Raises:
        ConfigError: dims that do not fit each other or the mesh.
    """
    seen: dict[str, Any] = {}

    def draw(key: jax.Array) -> Params:
        module = _module(config, mesh, key)
        seen["graph"], params = split(module)
        seen["logical"] = logical_axes(module)
        return params

    shapes = jax.eval_shape(draw, jax.random.key(0))
    axes = _axes(mesh)
    shardings = {
        path: axes[path.split("/")[0]].parameter(path, seen["logical"][path], x.shape)
        for path, x in shapes.items()
    }
    return Model(config, mesh, seen["graph"], shapes, seen["logical"], shardings)


def _axes(mesh: Mesh) -> dict[str, Axes]:
    return dict.fromkeys(_TOWERS, Axes(mesh))


def _module(config: ModelConfig | DualConfig, mesh: Mesh, key: jax.Array) -> nnx.Module:
    init, axes = Init(nnx.Rngs(params=key)), _axes(mesh)
    if isinstance(config, DualConfig):
        return DualEncoder(init, axes, config)
    return VLM(init, axes, config)
