"""The ways to train that are worth asking about: strategy, mesh, remat, microbatches, cache."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxvlm.config import MeshConfig, ModelConfig, StrategyConfig
from jaxvlm.parallel.mesh import AXES
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.memory import Setup
from jaxvlm.plan.question import Question

REMATS = ("none", "dots", "full")
_LONG = 16_384
"""Tokens of a row from which on rows are cut over ``context``."""
_MOST_PARTS = 64
_NAMES = {"tensor": "tensor", "context": "context", "expert": "experts", "stage": "stages"}


class Way(NamedTuple):
    """A way to train."""

    preset: str
    mesh: MeshConfig
    """Resolved."""
    strategy: StrategyConfig
    """Likewise."""
    remat: str
    """Of both towers, where :attr:`vision` says nothing else."""
    microbatches: int = 1
    cache: str = "off"
    """strict: a frozen tower's tokens are kept, and it does not run."""
    vision: str = ""
    """Remat of the vision tower, where it is another."""

    @property
    def family(self) -> str:
        """``fsdp``, ``hybrid_shard + tensor``: what people call it."""
        more = [name for axis, name in _NAMES.items() if getattr(self.mesh, axis) > 1]
        return " + ".join([self.preset, *more])

    @property
    def shards(self) -> int:
        """Parts that a batch's rows are split into."""
        return self.mesh.data * self.mesh.fsdp * self.mesh.expert

    def text(self) -> str:
        """For people."""
        axes = " ".join(f"{a}={getattr(self.mesh, a)}" for a in AXES if getattr(self.mesh, a) > 1)
        remat = f"remat={self.remat}" + (f" (vision {self.vision})" if self.vision else "")
        parts = [self.preset or "strategy", axes, remat]
        parts += [f"microbatches={self.microbatches}"] if self.microbatches > 1 else []
        parts += [f"cache={self.cache}"] if self.cache != "off" else []
        return " ".join(part for part in parts if part)


def with_remat(config: ModelConfig, way: Way) -> ModelConfig:
    """The model with the way's ``remat``."""
    return dataclasses.replace(
        config,
        vision=dataclasses.replace(config.vision, remat=way.vision or way.remat),
        decoder=dataclasses.replace(config.decoder, remat=way.remat),
    )


def setup_of(question: Question, way: Way) -> Setup:
    """What memory and time are asked of."""
    return Setup(
        with_remat(question.config.model, way), way.mesh, way.strategy,
        question.machine.platform, question.rows, question.length, question.pictures,
        question.patches, question.config.optim.frozen, way.microbatches,
    )  # fmt: skip


def of_mesh(question: Question, mesh: MeshConfig, strategy: StrategyConfig) -> Iterator[Way]:
    """All on one mesh under one strategy; both resolved."""
    shards = mesh.data * mesh.fsdp * mesh.expert
    for parts in _parts(question, mesh, question.rows // shards):
        for remat in REMATS[mesh.stage > 1 :]:
            yield Way(strategy.name, mesh, strategy, remat, parts)


def ways(question: Question) -> Iterator[Way]:
    """All that make sense on the machine, those that the dims refuse too."""
    kept = ["off", "strict"] if can_keep(question) else ["off"]
    for preset, mesh in meshes(question):
        strategy = dataclasses.replace(PRESETS[preset], name=preset)
        if mesh.context > 1:
            strategy = dataclasses.replace(strategy, context="ring")
        shards = mesh.data * mesh.fsdp * mesh.expert
        if question.rows % shards:
            continue
        for parts in _parts(question, mesh, question.rows // shards):
            for remat in REMATS[mesh.stage > 1 :]:
                for cache in kept if mesh.stage == 1 else ["off"]:
                    yield Way(preset, mesh, strategy, remat, parts, cache)


def meshes(question: Question) -> Iterator[tuple[str, MeshConfig]]:
    """Presets and the meshes that they go with."""
    machine, model = question.machine, question.config.model
    for tensor, context, expert, stage in _inner(question):
        rest = machine.devices // (tensor * context * expert * stage)
        for fsdp in _shares(machine, rest, tensor * context):
            mesh = MeshConfig(rest // fsdp, fsdp, tensor, context, expert, stage)
            if mesh.data % machine.slices and machine.platform == "tpu":
                continue  # slow links between slices are for data alone
            plain = tensor * context * expert * stage == 1
            for preset in _presets(mesh, plain, bool(model.decoder.num_experts)):
                yield preset, mesh


def _presets(mesh: MeshConfig, plain: bool, experts: bool) -> tuple[str, ...]:
    alone = mesh.data == mesh.fsdp == 1
    if mesh.fsdp == 1:
        return ("single",) if plain and alone else ("ddp",)
    if mesh.data == 1:
        every = ("zero1", "zero2", "fsdp", "fsdp_no_reshard")
        return every if plain or experts else every[2:]
    return ("hybrid_shard", "hpz") if plain else ("hybrid_shard",)


def _inner(question: Question) -> Iterator[tuple[int, int, int, int]]:
    """Sizes of (tensor, context, expert, stage), at most two of them above one."""
    machine, decoder = question.machine, question.config.model.decoder
    n, near = machine.devices, min(machine.island, 8)
    tensor = [t for t in (1, 2, 4, 8) if near % t == 0]
    long = question.length >= _LONG or question.rows < n
    context = [c for c in (1, 2, 4, 8) if near % c == 0 and question.length % (2 * c) == 0]
    expert = [1]
    if decoder.num_experts:
        expert = [e for e in _powers(128) if decoder.num_experts % e == 0 and n % e == 0]
    stage = [s for s in (1, 2, 4, 8, 16) if n % s == 0 and (s == 1 or n >= 4 * s)]
    for sizes in itertools.product(tensor, context if long else [1], expert, stage):
        few = sum(size > 1 for size in sizes) <= 2 and sizes[0] * sizes[1] <= near
        if few and n % math.prod(sizes) == 0:
            yield sizes


def _shares(machine: Machine, rest: int, inner: int) -> list[int]:
    """Sizes of ``fsdp``: none, all, and what lies within fast links or a few of them."""
    near = max(1, machine.island // inner)
    sizes = {1, rest, near, 4 * near, 16 * near, rest // machine.slices}
    return sorted(size for size in sizes if size and rest % size == 0)


def _parts(question: Question, mesh: MeshConfig, rows: int) -> list[int]:
    """Numbers of microbatches of a shard's rows."""
    if mesh.stage > 1:
        wanted = [mesh.stage * k for k in (1, 2, 4, 8)]
    else:
        own = max(1, question.given.microbatches)  # the recipe's, whichever number it is
        wanted = sorted({own, *_powers(min(rows, _MOST_PARTS))})
    return [m for m in wanted if rows % m == 0]


def can_keep(question: Question) -> bool:
    """Whether visual tokens never change: the tower is frozen, and has no adapters."""
    config = question.config
    return bool(
        question.pictures
        and not config.model.lora.rank
        and any(pattern in ("vision/*", "*") for pattern in config.optim.frozen)
    )


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def overrides(question: Question, way: Way) -> list[str]:
    """What makes a recipe's run of it, as ``jaxvlm train`` takes it.

    The way, the batch and what is trained always; of all else what differs from the recipe, but for
    the model's dims, which are its own or its checkpoint's.
    """
    config, given = question.config, question.given
    lora = config.model.lora
    strategy = dataclasses.replace(way.strategy, name=way.preset)
    # A recipe's own strategy is not what was planned, whichever it is.
    found: dict[str, Any] = dict(_differing(given.strategy, strategy, "strategy"))
    found = {name: value for name, value in found.items() if _is_set(given.strategy, name)}
    found |= _differing(
        dataclasses.replace(given, model=_bare(given.model), strategy=strategy),
        dataclasses.replace(config, model=_bare(config.model), strategy=strategy),
    )
    found |= {f"mesh.{axis}": getattr(way.mesh, axis) for axis in AXES}
    found |= {
        "strategy.name": way.preset,
        "model.vision.remat": way.vision or way.remat,
        "model.decoder.remat": way.remat,
        "microbatches": way.microbatches,
        "data.batch_size": question.rows,
        "data.max_length": question.length,
        "model.dtype": config.model.dtype,
        "optim.frozen": config.optim.frozen,
        "model.lora.rank": lora.rank,
    }
    if not question.recipe:  # whatever recipe they are put on
        found |= {f"data.{n}": getattr(config.data, n) for n in ("max_images", "max_patches")}
    if way.mesh.context > 1:
        found["strategy.context"] = way.strategy.context
    if lora.rank:
        found["model.lora.alpha"] = lora.alpha
    if way.cache != "off" or config.cache.policy != "off":
        found["cache.policy"] = way.cache
    return [f"--config.{name}={value}" for name, value in found.items()]


def _bare(model: ModelConfig) -> ModelConfig:
    """Without dims."""
    default = ModelConfig()
    towers = {name: getattr(default, name) for name in ("vision", "connector", "decoder")}
    return dataclasses.replace(model, **towers)


def _is_set(strategy: StrategyConfig, name: str) -> bool:
    """Whether a recipe sets a field that another preset's name would not replace."""
    field, default = name.removeprefix("strategy."), StrategyConfig()
    usual = [getattr(x, field) for x in (default, PRESETS.get(strategy.name, default))]
    return getattr(strategy, field) not in usual


def _differing(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of ``new`` that ``old`` has otherwise, by their paths."""
    for field in dataclasses.fields(new):
        was, value = getattr(old, field.name), getattr(new, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            yield from _differing(was, value, name)
        elif was != value:
            yield name, value
