"""A model on a mesh: its graph, the shapes and shardings of its parameters, initialization."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxvlm.config import (
    ConfigError,
    DualConfig,
    EmbeddingConfig,
    LoraConfig,
    ModelConfig,
    StrategyConfig,
)
from jaxvlm.models import int8_weights, lora
from jaxvlm.models.dual_encoder import DualEncoder
from jaxvlm.models.embedder import Embedder
from jaxvlm.models.int8_weights import Dims
from jaxvlm.models.vlm import VLM
from jaxvlm.nn.param import Init, Weight, linear_maps, logical_axes, merge, split
from jaxvlm.parallel.rules import ACTIVATIONS, IMAGES, PACKED, Axes, Place, split_over
from jaxvlm.types import Batch, Logical, Out, Params

Config = TypeVar("Config")
AnyModelConfig = TypeVar("AnyModelConfig", ModelConfig, DualConfig)
_FSDP = StrategyConfig()
_TOWERS = ("vision", "vision_top", "connector", "decoder", "text", "head")


@dataclasses.dataclass(frozen=True)
class Model(Generic[Config]):
    """A model without its parameters, laid out on a mesh."""

    config: Config
    mesh: Mesh
    graph: Any
    """Static; :func:`jaxvlm.nn.param.merge` combines it and parameters into a module."""
    shapes: dict[str, jax.ShapeDtypeStruct]
    logical: dict[str, Logical]
    make: Callable[[Init], nnx.Module]
    strategies: Mapping[str, StrategyConfig]
    """Strategy by submodel: the first part of a parameter's path."""
    adapter: LoraConfig
    adapted: dict[str, Dims]
    """Linear maps that have an adapter."""
    packed: dict[str, Dims]
    """Linear maps that are stored in eight bits."""
    has_dropout: frozenset[str] = frozenset()
    """Adapted linear maps whose adapters have dropout in training."""
    absent: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    """Parameters of a vision encoder that runs on other devices."""

    @property
    def has_frozen_blocks(self) -> bool:
        """Whether ``vision`` is frozen blocks, followed by the trainable ``vision_top``."""
        return isinstance(self.config, ModelConfig) and self.config.vision.frozen_blocks > 0

    def strategy(self, path: str) -> StrategyConfig:
        """Return the strategy of a parameter's submodel."""
        return self.strategies[path.split("/")[0]]

    @functools.cached_property
    def shardings(self) -> dict[str, NamedSharding]:
        """Shardings of parameters between steps."""
        return self.layout("params")

    def layout(self, of: str) -> dict[str, NamedSharding]:
        """Return the sharding of each parameter, of its gradient or of its moments.

        Args:
            of: a field of StrategyConfig: ``params``, ``all_gathered``, ``gradients``,
                ``optimizer``.

        Raises:
            ConfigError: a dim that its mesh axes do not divide.
        """
        shardings = {}
        for path, x in self.shapes.items():
            cut = path.startswith("decoder/")
            axes = Axes(self.mesh, split_over(getattr(self.strategy(path), of), cut))
            shardings[path] = axes.parameter(path, self.logical[path], x.shape)
        return shardings

    def init(self, seed: int) -> Params:
        """Initialize parameters, created sharded; the same values on every mesh."""
        return self.with_adapters(self.stored(self.draw(seed)), seed)

    def draw(self, seed: int, within: str = "") -> Params:
        """Initialize parameters of :meth:`base`, or only those under ``within``."""
        dtypes = {path: x.dtype for path, x in self.base().items() if path.startswith(within)}

        def draw(key: jax.Array) -> Params:
            drawn = split(self.make(Init(nnx.Rngs(params=key))))[1]
            return {path: drawn[path].astype(dtype) for path, dtype in dtypes.items()}

        return self._jit(draw, dtypes)(jax.random.key(seed))

    def stored(self, base: Params) -> Params:
        """Convert parameters of :meth:`base`, all or some, to their storage: some in eight bits."""
        stored = dict(base)
        for path in base.keys() & self.packed.keys():
            names = (path, f"{path}/{int8_weights.SCALE}")
            where = tuple(self.shardings[name] for name in names)
            run = jax.jit(int8_weights.quantize, static_argnums=1, out_shardings=where)
            stored |= zip(names, run(stored.pop(path), self.packed[path]))
        return stored

    def with_adapters(self, base: Params, seed: int) -> Params:
        """Add new adapters, which change no output, to the parameters of :meth:`stored`."""
        if not self.adapted:
            return base

        def draw(key: jax.Array, kept: Params) -> Params:
            weights = {path: int8_weights.dense(kept, path, d) for path, d in self.adapted.items()}
            return lora.draw(self.adapter, self.adapted, key, weights)

        paths = [path for path in self.shapes if lora.is_adapter(path)]
        scales: list[str] = [f"{path}/{int8_weights.SCALE}" for path in self.adapted]
        weights = {path: base[path] for path in (*self.adapted, *scales) if path in base}
        # A random stream of its own: the base's must not depend on adapters, nor theirs on it.
        key = jax.random.fold_in(jax.random.key(seed), 1)
        return {**base, **self._jit(draw, paths)(key, weights)}

    def _jit(self, draw: Callable[..., Params], paths: Iterable[str]) -> Callable[..., Params]:
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        # It runs once: with LLVM's full optimization, compiling takes five times as long.
        options = {"xla_backend_optimization_level": 0} if cpu else None
        where = {path: self.shardings[path] for path in paths}
        return jax.jit(draw, out_shardings=where, compiler_options=options)

    def module(
        self, params: Params, dropout_keys: jax.Array | None = None, first: jax.Array | None = None
    ) -> Any:
        """Return the module with ``params`` in it: a ``VLM``, or a ``DualEncoder``.

        Args:
            params: all parameters.
            dropout_keys: u32[B, 2] of a training batch; ``None``: no dropout in adapters.
            first: index of the first layer of a pipeline stage.
        """
        return merge(self.graph, self._attached(params, dropout_keys, first))

    def _attached(
        self, params: Params, dropout_keys: jax.Array | None = None, first: jax.Array | None = None
    ) -> Params:
        params = {**self.absent, **params}
        if not self.adapter.rank:
            return params
        noisy = {path: dims for path, dims in self.adapted.items() if path in self.has_dropout}
        keys = {} if dropout_keys is None else lora.dropout_keys(noisy, params, dropout_keys, first)
        rate = self.adapter.dropout
        return lora.attach(int8_weights.attach(params), lora.scale(self.adapter), rate, keys)

    def apply(self, params: Params, batch: Batch) -> Out:
        """Run the forward pass as a function of parameters."""
        return self.module(params, batch.dropout_keys)(batch)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of parameters with their shardings."""
        return {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.shardings[path])
            for path, x in self.shapes.items()
        }

    def base(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return :meth:`abstract` of the same model without adapters and eight-bit maps, which are
        float32 here.
        """
        more = ("/" + int8_weights.SCALE, *(f"/{name}" for name in lora.PARTS))
        return {
            path: x.update(dtype=jnp.float32) if path in self.packed else x
            for path, x in self.abstract().items()
            if not path.endswith(more)
        }

    def holding(self, dtypes: Mapping[str, Any]) -> Model[Config]:
        """Return the model with parameters held in other dtypes than float32.

        Args:
            dtypes: path -> dtype. Left as they are: adapters, maps in eight bits, paths that this
                model lacks, and parameters whose dtype is not one of floats.
        """
        paths = (self.base().keys() & dtypes.keys()) - self.packed.keys()
        held = {p: jnp.dtype(dtypes[p]) for p in paths if jnp.issubdtype(dtypes[p], jnp.floating)}
        shapes = {p: x.update(dtype=held.get(p, x.dtype)) for p, x in self.shapes.items()}
        return dataclasses.replace(self, shapes=shapes)

    @property
    def held(self) -> dict[str, str]:
        """Dtypes of the parameters of :meth:`base` that are not float32: path -> name."""
        return {p: str(x.dtype) for p, x in self.base().items() if x.dtype != jnp.float32}

    def merged(self, params: Params) -> Params:
        """Merge adapters into the weights, which become float32; others stay as they are held."""
        maps = {**self.packed, **self.adapted}
        attached = self._attached(params)

        def dense(weights: dict[str, Weight]) -> Params:
            def one(weight: Weight) -> jax.Array:
                return weight.dense()

            return {p: (jax.vmap(one) if maps[p].lead else one)(w) for p, w in weights.items()}

        where = {path: self.shardings[path] for path in maps}
        run = jax.jit(dense, out_shardings=where)
        return {**attached, **run({path: attached[path] for path in maps})}


def _towers(config: ModelConfig | DualConfig, embeddings: EmbeddingConfig | None) -> list[str]:
    absent: tuple[str, ...] = ("text",)
    if isinstance(config, DualConfig):
        absent = ("connector", "decoder")
    absent += () if config.vision.frozen_blocks else ("vision_top",)
    if isinstance(config, ModelConfig) and embeddings is None:
        absent = (*absent, "head")
    return [tower for tower in _TOWERS if tower not in absent]


def build_model(
    config: AnyModelConfig,
    mesh: Mesh,
    strategy: StrategyConfig = _FSDP,
    with_encoder: bool = True,
    embeddings: EmbeddingConfig | None = None,
) -> Model[AnyModelConfig]:
    """Build the model of ``config`` on ``mesh``; allocates nothing.

    Args:
        config: dims and variants, with the vocabulary's size set.
        mesh: the mesh that it runs on.
        strategy: the mesh axes that parameters are split over.
        with_encoder: whether its vision encoder runs on ``mesh`` too.
        embeddings: pooling of a vision-language model's output into embeddings; ``None``: logits.

    Raises:
        ConfigError: dims that do not fit each other or the mesh.
    """
    strategies = _strategies(config, mesh, strategy, with_encoder, _towers(config, embeddings))
    axes = axes_of(config, mesh, strategy)

    def make(init: Init) -> nnx.Module:
        if isinstance(config, DualConfig):
            return DualEncoder(init, axes, config)
        if embeddings is not None:
            return Embedder(init, axes, config, embeddings)
        return VLM(init, axes, config)

    return wrap(make, mesh, strategies, config)


def _strategies(
    config: ModelConfig | DualConfig,
    mesh: Mesh,
    strategy: StrategyConfig,
    with_encoder: bool,
    towers: Iterable[str],
) -> dict[str, StrategyConfig]:
    """Return the strategy of each submodel; refuses a mesh that the model cannot use."""
    experts = isinstance(config, ModelConfig) and config.decoder.num_experts
    if mesh.shape["expert"] > 1 and not experts:
        raise ConfigError(
            f"config.mesh.expert={mesh.shape['expert']}: this model has no experts; put these "
            "devices on config.mesh.data or fsdp"
        )
    _check_stages(config, mesh, strategy, with_encoder)
    if unknown := set(strategy.replicated) - set(towers):
        raise ConfigError(
            f"config.strategy.replicated names {unknown.pop()!r}; this model has "
            f"{', '.join(towers)}"
        )
    replicated = dataclasses.replace(strategy, params=(), all_gathered=())
    return {t: replicated if t in strategy.replicated else strategy for t in towers}


def on(model: Model[AnyModelConfig], mesh: Mesh, strategy: StrategyConfig) -> Model[AnyModelConfig]:
    """Return the shapes and shardings of a model on another mesh, for planning.

    Modules are not rebuilt: the result's ``graph`` and ``make`` stay those of the model's mesh.

    Args:
        model: a model on any mesh.
        mesh: the mesh to lay parameters out on.
        strategy: the mesh axes that parameters would be split over.

    Raises:
        ConfigError: what :func:`build_model` refuses.
    """
    strategies = _strategies(model.config, mesh, strategy, True, list(model.strategies))
    moved = dataclasses.replace(model, mesh=mesh, strategies=strategies)
    _ = moved.shardings  # refuses dims that the mesh does not divide
    return moved


def _check_stages(
    config: ModelConfig | DualConfig, mesh: Mesh, strategy: StrategyConfig, with_encoder: bool
) -> None:
    stages = mesh.shape["pipeline"]
    if stages == 1:
        return
    where = f"config.mesh.pipeline={stages}"
    if isinstance(config, DualConfig):
        raise ConfigError(
            f"{where} splits a decoder's layers, and this model has none; put these devices on "
            "config.mesh.data or fsdp"
        )
    for tower in ("vision", "decoder") if with_encoder else ("decoder",):
        if (remat := getattr(config, tower).remat) in ("none", "offload"):
            raise ConfigError(
                f"config.model.{tower}.remat={remat!r} with {where}: each microbatch in flight "
                "would keep a copy of the weights in the compute dtype, and residuals cannot stay "
                "in host memory; set 'dots' (keeps the products with weights) or 'full' (keeps "
                "the blocks' inputs)"
            )
    parts, depth = stages * strategy.virtual_stages, config.decoder.depth
    if depth % parts:
        cut = (
            where
            if parts == stages
            else f"{where} x config.strategy.virtual_stages={strategy.virtual_stages}"
        )
        near = [n for n in range(2, depth + 1) if depth % (n * strategy.virtual_stages) == 0]
        fits = f"sizes that do: {', '.join(map(str, near))}" if near else "no size does"
        raise ConfigError(f"{cut} does not divide the decoder's {depth} layers; {fits}")


def wrap(
    make: Callable[[Init], nnx.Module],
    mesh: Mesh,
    strategies: Mapping[str, StrategyConfig],
    config: Any = None,
) -> Model[Any]:
    """Wrap any module as a model on a mesh; allocates nothing.

    Args:
        make: makes the module; its attributes are the submodels.
        mesh: the mesh that it runs on.
        strategies: strategy of each submodel, for its parameters; activations are sharded by the
            ``Axes`` that ``make`` gives to its submodules.
        config: settings of models whose linear maps may have adapters: its ``lora`` is read.

    Raises:
        ConfigError: a submodel without a strategy, or dims that the mesh does not divide.
    """
    if mesh.shape["pipeline"] > 1 and not isinstance(config, ModelConfig):
        raise ConfigError(
            f"config.mesh.pipeline={mesh.shape['pipeline']}: how to split this module into stages "
            "is not known; put these devices on config.mesh.data or fsdp"
        )
    seen: dict[str, Any] = {}

    def draw(key: jax.Array) -> Params:
        module = make(Init(nnx.Rngs(params=key), is_abstract=True))
        seen["graph"], params = split(module)
        seen["logical"], seen["linear"] = logical_axes(module), linear_maps(module)
        return params

    shapes = jax.eval_shape(draw, jax.eval_shape(jax.random.key, 0))  # uses no device
    logical, adapter = seen["logical"], LoraConfig() if config is None else config.lora
    if missing := {path.split("/")[0] for path in shapes} - set(strategies):
        raise ConfigError(
            f"no strategy for the submodel {sorted(missing)[0]!r}; add one to strategies"
        )
    adapted: dict[str, Dims] = {}
    packed: dict[str, Dims] = {}
    if adapter != LoraConfig():
        frozen = isinstance(config, ModelConfig) and config.vision.frozen_blocks > 0
        free = {p: n for p, n in seen["linear"].items() if not (frozen and p.startswith("vision/"))}
        where = "config.dual.lora" if isinstance(config, DualConfig) else "config.model.lora"
        adapted = lora.find(adapter, free, logical, where)
        packed = lora.int8_maps(adapter, seen["linear"], logical, where)
        for more, words in (
            lora.parameters(adapter, adapted, shapes, logical),
            int8_weights.parameters(packed, shapes, logical),
        ):
            shapes, logical = {**shapes, **more}, {**logical, **words}
    model = Model(
        config, mesh, seen["graph"], shapes, logical, make, strategies, adapter, adapted, packed,
        frozenset(adapted if adapter.dropout else ()),
    )  # fmt: skip
    _ = model.shardings  # refuses dims that the mesh does not divide
    return model


def axes_of(
    config: ModelConfig | DualConfig, mesh: Mesh, strategy: StrategyConfig
) -> dict[str, Axes]:
    """Return mesh and sharding rules of each submodel."""
    on_rows: dict[str, Place] = {}
    on_images: dict[str, Place] = {}
    if strategy.sequence_parallel:
        on_rows, on_images = {"stream": ("context", "tensor")}, {"stream": "tensor"}
    activations = tuple({**ACTIVATIONS, **on_rows}.items())
    rows = Axes(mesh, activations=activations, context=strategy.context)
    images = Axes(mesh, activations=tuple({**IMAGES, **on_images}.items()))
    if config.vision.packed:
        images = dataclasses.replace(rows, activations=tuple({**PACKED, **on_rows}.items()))
    of_images = dict.fromkeys(("vision", "vision_top", "connector"), images)
    return {**dict.fromkeys(_TOWERS, rows), **of_images}
