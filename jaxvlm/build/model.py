"""From settings to a model: its graph, the shapes and shardings of its parameters, its draw."""

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
    LoraConfig,
    ModelConfig,
    StrategyConfig,
    VectorConfig,
)
from jaxvlm.models import lora, quantized
from jaxvlm.models.dual import DualEncoder
from jaxvlm.models.embedder import Embedder
from jaxvlm.models.quantized import Dims
from jaxvlm.models.vlm import VLM
from jaxvlm.nn.param import Init, Weight, linear_maps, logical_axes, merge, split
from jaxvlm.parallel.rules import ACTIVATIONS, PACKED, PICTURES, Axes, Place, split_over
from jaxvlm.types import Batch, Logical, Out, Params

Config = TypeVar("Config")
Known = TypeVar("Known", ModelConfig, DualConfig)
_FSDP = StrategyConfig()
_TOWERS = ("vision", "top", "connector", "decoder", "text", "head")


@dataclasses.dataclass(frozen=True)
class Model(Generic[Config]):
    """A model without its parameters."""

    config: Config
    mesh: Mesh
    graph: Any
    """Static; :func:`jaxvlm.nn.param.merge` makes a module of it and parameters."""
    shapes: dict[str, jax.ShapeDtypeStruct]
    logical: dict[str, Logical]
    make: Callable[[Init], nnx.Module]
    strategies: Mapping[str, StrategyConfig]
    """By tower: the first part of a parameter's path."""
    adapter: LoraConfig
    adapted: dict[str, Dims]
    """The linear maps that have an adapter."""
    packed: dict[str, Dims]
    """Those that are kept in eight bits."""
    noisy: frozenset[str] = frozenset()
    """Of the adapted ones, those whose adapters drop some of their input in training."""
    absent: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    """Parameters of a tower that is elsewhere, and is not run here."""

    @property
    def has_trunk(self) -> bool:
        """Whether ``vision`` is a trunk, frozen, and ``top`` behind it is not."""
        return isinstance(self.config, ModelConfig) and self.config.vision.trunk > 0

    def strategy(self, path: str) -> StrategyConfig:
        """The strategy of a parameter's tower."""
        return self.strategies[path.split("/")[0]]

    @functools.cached_property
    def shardings(self) -> dict[str, NamedSharding]:
        """Where parameters lie between steps."""
        return self.layout("params")

    def layout(self, of: str) -> dict[str, NamedSharding]:
        """Where each parameter, its gradients' sum or its moments lie.

        Args:
            of: a field of StrategyConfig: ``params``, ``gathered``, ``gradients``, ``optimizer``.

        Raises:
            ConfigError: a dim that its mesh axes do not divide.
        """
        made = {}
        for path, x in self.shapes.items():
            cut = path.startswith("decoder/")
            axes = Axes(self.mesh, split_over(getattr(self.strategy(path), of), cut))
            made[path] = axes.parameter(path, self.logical[path], x.shape)
        return made

    def init(self, seed: int) -> Params:
        """Random parameters, born sharded; the same on every mesh."""
        return self.with_adapters(self.stored(self.draw(seed)), seed)

    def draw(self, seed: int, within: str = "") -> Params:
        """Random parameters of :meth:`base`; of those alone whose paths begin with ``within``."""
        paths = [path for path in self.base() if path.startswith(within)]

        def draw(key: jax.Array) -> Params:
            drawn = split(self.make(Init(nnx.Rngs(params=key))))[1]
            return {path: drawn[path] for path in paths}

        return self._jit(draw, paths)(jax.random.key(seed))

    def stored(self, base: Params) -> Params:
        """Parameters of :meth:`base`, all or some, as they are kept: some in eight bits."""
        made = dict(base)
        for path in base.keys() & self.packed.keys():
            names = (path, f"{path}/{quantized.SCALE}")
            where = tuple(self.shardings[name] for name in names)
            run = jax.jit(quantized.quantize, static_argnums=1, out_shardings=where)
            made |= zip(names, run(made.pop(path), self.packed[path]))
        return made

    def with_adapters(self, base: Params, seed: int) -> Params:
        """``base``, as :meth:`stored` gives it, and new adapters that change no output."""
        if not self.adapted:
            return base

        def draw(key: jax.Array, kept: Params) -> Params:
            weights = {path: quantized.dense(kept, path, d) for path, d in self.adapted.items()}
            return lora.draw(self.adapter, self.adapted, key, weights)

        made = [path for path in self.shapes if lora.is_adapter(path)]
        scales: list[str] = [f"{path}/{quantized.SCALE}" for path in self.adapted]
        weights = {path: base[path] for path in (*self.adapted, *scales) if path in base}
        # Another stream than the base's: its draw must not depend on adapters, nor they on it.
        key = jax.random.fold_in(jax.random.key(seed), 1)
        return {**base, **self._jit(draw, made)(key, weights)}

    def _jit(self, draw: Callable[..., Params], paths: Iterable[str]) -> Callable[..., Params]:
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        # It runs once: LLVM's full effort on every random draw takes five times as long.
        options = {"xla_backend_optimization_level": 0} if cpu else None
        where = {path: self.shardings[path] for path in paths}
        return jax.jit(draw, out_shardings=where, compiler_options=options)

    def module(
        self, params: Params, noise: jax.Array | None = None, first: jax.Array | None = None
    ) -> Any:
        """The module with ``params`` in it: a ``VLM``, or a ``DualEncoder``.

        Args:
            params: all of them.
            noise: u32[B, 2] of a batch that is trained on; ``None``: adapters drop nothing.
            first: of a pipeline's stage, the number of its first layer.
        """
        return merge(self.graph, self._attached(params, noise, first))

    def _attached(
        self, params: Params, noise: jax.Array | None = None, first: jax.Array | None = None
    ) -> Params:
        params = {**self.absent, **params}
        if not self.adapter.rank:
            return params
        noisy = {path: dims for path, dims in self.adapted.items() if path in self.noisy}
        keys = {} if noise is None else lora.noise_of(noisy, params, noise, first)
        rate = self.adapter.dropout
        return lora.attach(quantized.attach(params), lora.scale(self.adapter), rate, keys)

    def apply(self, params: Params, batch: Batch) -> Out:
        """The forward pass as a function of parameters."""
        return self.module(params, batch.noise)(batch)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes with their shardings."""
        return {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.shardings[path])
            for path, x in self.shapes.items()
        }

    def base(self) -> dict[str, jax.ShapeDtypeStruct]:
        """:meth:`abstract` of the same model without adapters, all in float32."""
        more = ("/" + quantized.SCALE, *(f"/{name}" for name in lora.PARTS))
        return {
            path: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)
            for path, x in self.abstract().items()
            if not path.endswith(more)
        }

    def merged(self, params: Params) -> Params:
        """Parameters of :meth:`base`: adapters are added to the weights."""
        maps = {**self.packed, **self.adapted}
        whole = self._attached(params)

        def dense(weights: dict[str, Weight]) -> Params:
            def one(weight: Weight) -> jax.Array:
                return weight.dense()

            return {p: (jax.vmap(one) if maps[p].lead else one)(w) for p, w in weights.items()}

        where = {path: self.shardings[path] for path in maps}
        run = jax.jit(dense, out_shardings=where)
        return {**whole, **run({path: whole[path] for path in maps})}


def _towers(config: ModelConfig | DualConfig, vectors: VectorConfig | None) -> list[str]:
    absent: tuple[str, ...] = ("text",)
    if isinstance(config, DualConfig):
        absent = ("connector", "decoder")
    absent += () if config.vision.trunk else ("top",)
    if isinstance(config, ModelConfig) and vectors is None:
        absent = (*absent, "head")
    return [tower for tower in _TOWERS if tower not in absent]


def build_model(
    config: Known,
    mesh: Mesh,
    strategy: StrategyConfig = _FSDP,
    tower_here: bool = True,
    vectors: VectorConfig | None = None,
) -> Model[Known]:
    """The model of ``config`` on ``mesh``; allocates nothing.

    Args:
        config: dims and variants, the vocabulary's size set.
        mesh: where it will run.
        strategy: over which of its axes parameters are split.
        tower_here: whether it will run its vision tower too.
        vectors: what a vision-language model's rows become; ``None``: logits.

    Raises:
        ConfigError: dims that do not fit each other or the mesh.
    """
    strategies = _strategies(config, mesh, strategy, tower_here, _towers(config, vectors))
    axes = axes_of(config, mesh, strategy)

    def make(init: Init) -> nnx.Module:
        if isinstance(config, DualConfig):
            return DualEncoder(init, axes, config)
        if vectors is not None:
            return Embedder(init, axes, config, vectors)
        return VLM(init, axes, config)

    return wrap(make, mesh, strategies, config)


def _strategies(
    config: ModelConfig | DualConfig,
    mesh: Mesh,
    strategy: StrategyConfig,
    tower_here: bool,
    towers: Iterable[str],
) -> dict[str, StrategyConfig]:
    """Of each tower; what the model cannot be on this mesh is refused."""
    experts = isinstance(config, ModelConfig) and config.decoder.num_experts
    if mesh.shape["expert"] > 1 and not experts:
        raise ConfigError(
            f"config.mesh.expert={mesh.shape['expert']}: this model has no experts; its devices "
            "can lie on config.mesh.data or fsdp"
        )
    _check_stages(config, mesh, strategy, tower_here)
    if unknown := set(strategy.whole) - set(towers):
        raise ConfigError(
            f"config.strategy.whole names {unknown.pop()!r}; this model has {', '.join(towers)}"
        )
    whole = dataclasses.replace(strategy, params=(), gathered=())
    return {t: whole if t in strategy.whole else strategy for t in towers}


def on(model: Model[Known], mesh: Mesh, strategy: StrategyConfig) -> Model[Known]:
    """The shapes and layouts of a model on another mesh, its modules not made again: to plan with.

    Args:
        model: on any mesh; its ``graph`` and ``make`` stay those of that one.
        mesh: where its parameters would lie.
        strategy: over which of its axes they would be split.

    Raises:
        ConfigError: what :func:`build_model` refuses.
    """
    strategies = _strategies(model.config, mesh, strategy, True, list(model.strategies))
    moved = dataclasses.replace(model, mesh=mesh, strategies=strategies)
    _ = moved.shardings  # dims that the mesh does not divide are refused here
    return moved


def _check_stages(
    config: ModelConfig | DualConfig, mesh: Mesh, strategy: StrategyConfig, tower_here: bool
) -> None:
    stages = mesh.shape["stage"]
    if stages == 1:
        return
    where = f"config.mesh.stage={stages}"
    if isinstance(config, DualConfig):
        raise ConfigError(
            f"{where} cuts a decoder's layers, and this model has none; its devices can lie on "
            "config.mesh.data or fsdp"
        )
    for tower in ("vision", "decoder") if tower_here else ("decoder",):
        if (remat := getattr(config, tower).remat) in ("none", "offload"):
            raise ConfigError(
                f"config.model.{tower}.remat={remat!r} with {where}: each microbatch in flight "
                "would keep a copy of the weights in the compute dtype, and host memory cannot be "
                "kept; 'dots' keeps the products with weights, 'full' the blocks' inputs"
            )
    parts, depth = stages * strategy.chunks, config.decoder.depth
    if depth % parts:
        cut = where if parts == stages else f"{where} x config.strategy.chunks={strategy.chunks}"
        near = [n for n in range(2, depth + 1) if depth % (n * strategy.chunks) == 0]
        fits = f"stages that do: {', '.join(map(str, near))}" if near else "no stages do"
        raise ConfigError(f"{cut} does not divide the decoder's {depth} layers; {fits}")


def wrap(
    make: Callable[[Init], nnx.Module],
    mesh: Mesh,
    strategies: Mapping[str, StrategyConfig],
    config: Any = None,
) -> Model[Any]:
    """A model of any module; allocates nothing.

    Args:
        make: the module; what it calls its attributes are its towers.
        mesh: where it will run.
        strategies: of each tower. What lies split is theirs; how activations are split is said by
            the ``Axes`` that ``make`` gives to its parts.
        config: of models whose linear maps may have adapters: its ``lora`` is read.

    Raises:
        ConfigError: a tower without a strategy, or dims that the mesh does not divide.
    """
    if mesh.shape["stage"] > 1 and not isinstance(config, ModelConfig):
        raise ConfigError(
            f"config.mesh.stage={mesh.shape['stage']}: where to cut this module is not known; its "
            "devices can lie on config.mesh.data or fsdp"
        )
    seen: dict[str, Any] = {}

    def draw(key: jax.Array) -> Params:
        module = make(Init(nnx.Rngs(params=key)))
        seen["graph"], params = split(module)
        seen["logical"], seen["linear"] = logical_axes(module), linear_maps(module)
        return params

    shapes = jax.eval_shape(draw, jax.eval_shape(jax.random.key, 0))  # no device is asked
    logical, adapter = seen["logical"], LoraConfig() if config is None else config.lora
    if missing := {path.split("/")[0] for path in shapes} - set(strategies):
        raise ConfigError(f"no strategy for the tower {sorted(missing)[0]!r}")
    trunk = isinstance(config, ModelConfig) and config.vision.trunk > 0
    free = {p: n for p, n in seen["linear"].items() if not (trunk and p.startswith("vision/"))}
    where = "config.dual.lora" if isinstance(config, DualConfig) else "config.model.lora"
    adapted = lora.find(adapter, free, logical, where)
    packed = lora.packed(adapter, seen["linear"], logical, where)
    for more, words in (
        lora.parameters(adapter, adapted, shapes, logical),
        quantized.parameters(packed, shapes, logical),
    ):
        shapes, logical = {**shapes, **more}, {**logical, **words}
    model = Model(
        config, mesh, seen["graph"], shapes, logical, make, strategies, adapter, adapted, packed,
        frozenset(adapted if adapter.dropout else ()),
    )  # fmt: skip
    _ = model.shardings  # dims that the mesh does not divide are refused here
    return model


def axes_of(
    config: ModelConfig | DualConfig, mesh: Mesh, strategy: StrategyConfig
) -> dict[str, Axes]:
    """Mesh and rules of each tower."""
    both: dict[str, Place] = {"stream": ("context", "tensor")} if strategy.sequence else {}
    own: dict[str, Place] = {"stream": "tensor"} if strategy.sequence else {}
    rows = Axes(mesh, activations=tuple({**ACTIVATIONS, **both}.items()), context=strategy.context)
    pictures = Axes(mesh, activations=tuple({**PICTURES, **own}.items()))
    if config.vision.packed:
        pictures = dataclasses.replace(rows, activations=tuple({**PACKED, **both}.items()))
    of_pictures = dict.fromkeys(("vision", "top", "connector"), pictures)
    return {**dict.fromkeys(_TOWERS, rows), **of_pictures}
