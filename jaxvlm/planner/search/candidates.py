"""Candidates of a search: strategy, mesh, remat, microbatches and caching worth comparing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxvlm.config import (
    Config,
    DualConfig,
    MeshConfig,
    ModelConfig,
    OuterConfig,
    StrategyConfig,
)
from jaxvlm.parallel.mesh import AXES, BATCH_AXES
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.request import held_dtypes
from jaxvlm.planner.request.held_dtypes import Held
from jaxvlm.planner.request.pairs import PairShapes
from jaxvlm.planner.request.per_object import per_object
from jaxvlm.planner.request.request import PlanRequest
from jaxvlm.spmd.gradcache import AUTO_MINI_BATCH, grad_cache_mini_batches
from jaxvlm.train.gradcache import MiniBatch

REMATS = ("none", "dots", "full")
_LONG = 16_384
"""Tokens of a sequence from which on sequences are sharded over ``context``."""
_MOST_PARTS, _MOST_MINI_BATCHES = 64, 256
_NAMES = {"tensor": "tensor", "context": "context", "expert": "experts", "pipeline": "stages"}


class Candidate(NamedTuple):
    """One configuration of a run's parallelism and memory savings."""

    preset: str
    mesh: MeshConfig
    """The mesh, resolved."""
    strategy: StrategyConfig
    """The strategy, resolved."""
    remat: str
    """Remat of both towers, unless :attr:`vision` is set."""
    microbatches: int = 1
    """Number of microbatches; of pairs, of GradCache mini-batches."""
    cache: str = "off"
    """off | strict: a frozen vision encoder's visual tokens are cached, and it does not run."""
    vision: str = ""
    """Remat of the vision tower, if it differs."""
    mini_batches: tuple[int, int] = (0, 0)
    """Queries and documents of a batch shard that run at once, see ``config.grad_cache``; 0: all.
    """

    @property
    def family(self) -> str:
        """Strategy family as people name it: ``fsdp``, ``hybrid_shard + tensor``."""
        more = [name for axis, name in _NAMES.items() if getattr(self.mesh, axis) > 1]
        return " + ".join([self.preset, *more])

    @property
    def shards(self) -> int:
        """Number of shards of the batch."""
        return shards_of(self.mesh)

    def text(self) -> str:
        """One line for people."""
        axes = " ".join(f"{a}={getattr(self.mesh, a)}" for a in AXES if getattr(self.mesh, a) > 1)
        remat = f"remat={self.remat}" + (f" (vision {self.vision})" if self.vision else "")
        parts = [self.preset or "strategy", axes, remat]
        if any(self.mini_batches):
            parts.append(f"grad_cache={','.join(str(n) for n in dict.fromkeys(self.mini_batches))}")
        elif self.microbatches > 1:
            parts.append(f"microbatches={self.microbatches}")
        if self.strategy.replicated:
            parts.append(f"replicated={','.join(self.strategy.replicated)}")
        parts += [f"cache={self.cache}"] if self.cache != "off" else []
        return " ".join(part for part in parts if part)


def shards_of(mesh: MeshConfig) -> int:
    """Number of shards of the batch on a mesh."""
    return math.prod(getattr(mesh, axis) for axis in BATCH_AXES)


def with_remat(config: ModelConfig | DualConfig, candidate: Candidate) -> ModelConfig | DualConfig:
    """The model with the candidate's ``remat``."""
    return _with_remat(config, candidate.vision or candidate.remat, candidate.remat)


@per_object
def _with_remat(
    config: ModelConfig | DualConfig, vision: str, other: str
) -> ModelConfig | DualConfig:
    network: Any = config
    name = "text" if isinstance(config, DualConfig) else "decoder"
    towers = {
        "vision": dataclasses.replace(config.vision, remat=vision),
        name: dataclasses.replace(getattr(network, name), remat=other),
    }
    return dataclasses.replace(network, **towers)


def setup_of(request: PlanRequest, candidate: Candidate) -> StepSetup:
    """The train step whose memory and time are estimated."""
    return StepSetup(
        with_remat(request.config.network, candidate), candidate.mesh, candidate.strategy,
        request.machine.platform, request.rows, request.length, request.images,
        request.patches, request.config.optim.frozen, candidate.microbatches,
        pair_mini_batches(request, candidate), held_of(request),
        outer_config(request, candidate.mesh),
    )  # fmt: skip


def outer_config(request: PlanRequest, mesh: MeshConfig) -> OuterConfig | None:
    """Outer updates of the mesh's islands; ``None``: it has none."""
    return request.config.outer if mesh.island > 1 else None


def held_of(request: PlanRequest) -> Held:
    """Dtypes of the run's frozen parameters that are not float32."""
    config, embeddings = request.config, request.pairs.embeddings if request.pairs else None
    return held_dtypes.of(config.network, config.optim, embeddings, request.file_dtypes)


def pair_mini_batches(request: PlanRequest, candidate: Candidate) -> PairShapes | None:
    """Shapes of an example, in the candidate's mini-batches; ``None``: training is not on pairs."""
    query, document = candidate.mini_batches
    mini_batches = MiniBatch(query), MiniBatch(document)
    return request.pairs._replace(mini_batches=mini_batches) if request.pairs else None


def of_mesh(
    request: PlanRequest, mesh: MeshConfig, strategy: StrategyConfig
) -> Iterator[Candidate]:
    """All candidates on one mesh under one strategy; both resolved."""
    for parts, mini_batches in _cuts(request, mesh, request.rows // shards_of(mesh)):
        for remat in REMATS[mesh.pipeline > 1 :]:
            yield Candidate(strategy.name, mesh, strategy, remat, parts, mini_batches=mini_batches)


def candidates(request: PlanRequest) -> Iterator[Candidate]:
    """All candidates that make sense on the machine, including those whose dims do not divide."""
    cache_policies = ["off", "strict"] if can_cache(request) else ["off"]
    for preset, mesh in meshes(request):
        strategy = dataclasses.replace(PRESETS[preset], name=preset)
        if mesh.context > 1:
            strategy = dataclasses.replace(strategy, context="ring")
        if request.rows % shards_of(mesh):
            continue
        for parts, mini_batches in _cuts(request, mesh, request.rows // shards_of(mesh)):
            for remat in REMATS[mesh.pipeline > 1 :]:
                for cache in cache_policies if mesh.pipeline == 1 else ["off"]:
                    yield Candidate(
                        preset, mesh, strategy, remat, parts, cache, mini_batches=mini_batches
                    )


def meshes(request: PlanRequest) -> Iterator[tuple[str, MeshConfig]]:
    """Strategy presets and the meshes that they are compared on."""
    machine, islands = request.machine, request.config.mesh.island
    if machine.devices % islands:
        return
    slices = machine.slices // math.gcd(machine.slices, islands)  # of an island
    for tensor, context, expert, stage in _inner(request, machine.devices // islands):
        rest = machine.devices // islands // (tensor * context * expert * stage)
        for fsdp in _shares(machine, rest, tensor * context, slices):
            mesh = MeshConfig(rest // fsdp, fsdp, tensor, context, expert, stage, islands)
            if mesh.data % slices and machine.platform == "tpu":
                continue  # of an island's axes, data alone crosses the slow links between slices
            plain = tensor * context * expert * stage == 1
            for preset in _presets(mesh, plain, bool(_experts(request))):
                yield preset, mesh


def _presets(mesh: MeshConfig, plain: bool, experts: bool) -> tuple[str, ...]:
    alone = mesh.data == mesh.fsdp == mesh.island == 1
    if mesh.fsdp == 1:
        return ("single",) if plain and alone else ("ddp",)
    if mesh.data == 1:
        every = ("zero1", "zero2", "fsdp", "fsdp_no_reshard")
        return every if plain or experts else every[2:]
    return ("hybrid_shard", "hpz") if plain else ("hybrid_shard",)


def _inner(request: PlanRequest, n: int) -> Iterator[tuple[int, int, int, int]]:
    """Sizes of (tensor, context, expert, pipeline), at most two of them above one.

    Args:
        request: model and batch.
        n: devices of an island; without islands, all.
    """
    near, experts = min(request.machine.island, 8), _experts(request)
    tensor = [t for t in (1, 2, 4, 8) if near % t == 0]
    long = request.length >= _LONG or request.rows < request.machine.devices
    context = [c for c in (1, 2, 4, 8) if near % c == 0 and request.length % (2 * c) == 0]
    expert = [1]
    if experts:
        expert = [e for e in _powers(128) if experts % e == 0 and n % e == 0]
    stage = [s for s in (1, 2, 4, 8, 16) if n % s == 0 and (s == 1 or n >= 4 * s)]
    if request.pairs:  # pairs can't be planned over the other axes
        long, expert, stage = False, [1], [1]
    for sizes in itertools.product(tensor, context if long else [1], expert, stage):
        few = sum(size > 1 for size in sizes) <= 2 and sizes[0] * sizes[1] <= near
        if few and n % math.prod(sizes) == 0:
            yield sizes


def _experts(request: PlanRequest) -> int:
    network = request.config.network
    return network.decoder.num_experts if isinstance(network, ModelConfig) else 0


def _shares(machine: Machine, rest: int, inner: int, slices: int) -> list[int]:
    """Sizes of ``fsdp``: none, all, and those that fit within fast links or a few groups of
    them.
    """
    near = max(1, machine.island // inner)
    sizes = {1, rest, near, 4 * near, 16 * near, rest // slices}
    return sorted(size for size in sizes if size and rest % size == 0)


def _cuts(request: PlanRequest, mesh: MeshConfig, rows: int) -> list[tuple[int, tuple[int, int]]]:
    """(number, sizes) of microbatches of a batch shard; for pairs, of mini-batches."""
    if request.pairs is None:
        return [(parts, (0, 0)) for parts in _parts(request, mesh, rows)]
    documents = request.pairs.documents
    sizes = [
        (n, (rows // n, documents * rows // n)) for n in _powers(min(rows, _MOST_MINI_BATCHES))
    ]
    mini_batches = {
        parts: mini_batches for parts, mini_batches in sizes if parts > 1 and rows % parts == 0
    }
    own = mini_batches_of(request.pairs, request.given, rows)  # the recipe's
    return list({1: (0, 0), **mini_batches, own[0]: own[1]}.items())


def mini_batches_of(pairs: PairShapes, config: Config, rows: int) -> tuple[int, tuple[int, int]]:
    """A run's own mini-batches of a batch shard: their number at most, and their sizes."""
    if config.grad_cache.query_mini_batch == AUTO_MINI_BATCH:
        return 1, (0, 0)
    query, document = pairs._replace(mini_batches=grad_cache_mini_batches(config.grad_cache)).sides(
        rows
    )
    parts = max(query.parts, document.parts)
    sizes = -(-query.number // query.parts), -(-document.number // document.parts)
    return parts, sizes if parts > 1 else (0, 0)


def _parts(request: PlanRequest, mesh: MeshConfig, rows: int) -> list[int]:
    """Numbers of microbatches that divide a batch shard."""
    if mesh.pipeline > 1:
        wanted = [mesh.pipeline * k for k in (1, 2, 4, 8)]
    else:
        own = max(1, request.given.microbatches)  # the recipe's, any number
        wanted = sorted({own, *_powers(min(rows, _MOST_PARTS))})
    return [m for m in wanted if rows % m == 0]


def can_cache(request: PlanRequest) -> bool:
    """Whether visual tokens never change and can be cached: a frozen tower without adapters."""
    config = request.config
    return bool(
        request.images
        and not request.pairs
        and config.mesh.island == 1
        and not config.model.lora.rank
        and any(pattern in ("vision/*", "*") for pattern in config.optim.frozen)
    )


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def overrides(request: PlanRequest, candidate: Candidate) -> list[str]:
    """Command-line overrides of ``jaxvlm train`` that turn a recipe's run into the candidate.

    The candidate, the batch and what is trained are always included; other settings only if they
    differ from the recipe. The model's dims are left out: they are its own or its checkpoint's.
    """
    config, given = request.config, request.given
    name, tower = ("dual", "text") if config.embedder == "dual" else ("model", "decoder")
    lora = config.network.lora
    strategy = dataclasses.replace(candidate.strategy, name=candidate.preset)
    # The planned strategy replaces the recipe's own.
    settings: dict[str, Any] = dict(_differing(given.strategy, strategy, "strategy"))
    settings = {name: value for name, value in settings.items() if _is_set(given.strategy, name)}
    settings |= _differing(_bare(given, strategy), _bare(config, strategy))
    settings |= {f"mesh.{axis}": getattr(candidate.mesh, axis) for axis in AXES}
    settings |= {
        "strategy.name": candidate.preset,
        f"{name}.vision.remat": candidate.vision or candidate.remat,
        f"{name}.{tower}.remat": candidate.remat,
        **_cut_overrides(request, candidate),
        "data.batch_size": request.rows,
        "data.max_length": request.length,
        f"{name}.dtype": config.network.dtype,
        "optim.frozen": config.optim.frozen,
        f"{name}.lora.rank": lora.rank,
    }
    if not request.recipe and name == "model":  # for any recipe that they are applied to
        for n in ("max_images_per_sequence", "max_patches_per_sequence"):
            settings[f"data.{n}"] = getattr(config.data, n)
    if candidate.mesh.context > 1:
        settings["strategy.context"] = candidate.strategy.context
    if candidate.strategy.replicated:
        settings["strategy.replicated"] = candidate.strategy.replicated
    if lora.rank:
        settings[f"{name}.lora.alpha"] = lora.alpha
    if candidate.cache != "off" or config.cache.policy != "off":
        settings["cache.policy"] = candidate.cache
    return [f"--config.{name}={value}" for name, value in settings.items()]


def _cut_overrides(request: PlanRequest, candidate: Candidate) -> dict[str, int]:
    if request.pairs is None:
        return {"microbatches": candidate.microbatches}
    names = ("grad_cache.query_mini_batch", "grad_cache.document_mini_batch")
    sizes = dict(zip(names, candidate.mini_batches, strict=True))
    return sizes | ({"grad_cache.max_tokens": 0} if request.given.grad_cache.max_tokens else {})


def _bare(config: Config, strategy: StrategyConfig) -> Config:
    """The settings without dims, and with one strategy."""
    default, dual = ModelConfig(), DualConfig()
    towers = {name: getattr(default, name) for name in ("vision", "connector", "decoder")}
    own = ("dtype", "attention", "lora", "checkpoint", "vision_checkpoint", "text_checkpoint")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **towers),
        dual=dataclasses.replace(dual, **{name: getattr(config.dual, name) for name in own}),
        strategy=strategy,
    )


def _is_set(strategy: StrategyConfig, name: str) -> bool:
    """Whether a recipe sets a field that another preset's name would not replace."""
    field, default = name.removeprefix("strategy."), StrategyConfig()
    usual = [getattr(x, field) for x in (default, PRESETS.get(strategy.name, default))]
    return getattr(strategy, field) not in usual


def _differing(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of ``new`` that differ from ``old``, by their paths."""
    for field in dataclasses.fields(new):
        was, value = getattr(old, field.name), getattr(new, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            yield from _differing(was, value, name)
        elif was != value:
            yield name, value
