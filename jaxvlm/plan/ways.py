"""The ways to train that are worth asking about: strategy, mesh, remat, microbatches, cache."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxvlm.build.pairs import CHOSEN, chunks_of
from jaxvlm.config import DualConfig, MeshConfig, ModelConfig, StrategyConfig, TrainConfig
from jaxvlm.parallel.mesh import AXES
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.memory import Setup
from jaxvlm.plan.pairs import Pairing
from jaxvlm.plan.question import Question
from jaxvlm.train.pairs import Chunk

REMATS = ("none", "dots", "full")
_LONG = 16_384
"""Tokens of a row from which on rows are cut over ``context``."""
_MOST_PARTS, _MOST_CHUNKS = 64, 256
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
    """Of pairs, chunks of gradient caching."""
    cache: str = "off"
    """strict: a frozen tower's tokens are kept, and it does not run."""
    vision: str = ""
    """Remat of the vision tower, where it is another."""
    chunk: tuple[int, int] = (0, 0)
    """Rows of queries and of documents that a shard runs at once, see ``config.grad_cache``; 0:
    all."""

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
        if any(self.chunk):
            parts.append(f"grad_cache={','.join(str(n) for n in dict.fromkeys(self.chunk))}")
        elif self.microbatches > 1:
            parts.append(f"microbatches={self.microbatches}")
        parts += [f"whole={','.join(self.strategy.whole)}"] if self.strategy.whole else []
        parts += [f"cache={self.cache}"] if self.cache != "off" else []
        return " ".join(part for part in parts if part)


def with_remat(config: ModelConfig | DualConfig, way: Way) -> ModelConfig | DualConfig:
    """The model with the way's ``remat``."""
    return _with_remat(config, way.vision or way.remat, way.remat)


@functools.lru_cache(maxsize=64)
def _with_remat(
    config: ModelConfig | DualConfig, vision: str, other: str
) -> ModelConfig | DualConfig:
    found: Any = config
    name = "text" if isinstance(config, DualConfig) else "decoder"
    towers = {
        "vision": dataclasses.replace(config.vision, remat=vision),
        name: dataclasses.replace(getattr(found, name), remat=other),
    }
    return dataclasses.replace(found, **towers)


def setup_of(question: Question, way: Way) -> Setup:
    """What memory and time are asked of."""
    return Setup(
        with_remat(question.config.network, way), way.mesh, way.strategy,
        question.machine.platform, question.rows, question.length, question.pictures,
        question.patches, question.config.optim.frozen, way.microbatches, pairs_of(question, way),
    )  # fmt: skip


def pairs_of(question: Question, way: Way) -> Pairing | None:
    """What examples are, in the way's chunks; ``None``: rows are trained on."""
    query, document = way.chunk
    chunks = Chunk(query), Chunk(document)
    return question.pairs._replace(chunks=chunks) if question.pairs else None


def of_mesh(question: Question, mesh: MeshConfig, strategy: StrategyConfig) -> Iterator[Way]:
    """All on one mesh under one strategy; both resolved."""
    shards = mesh.data * mesh.fsdp * mesh.expert
    for parts, chunk in _cuts(question, mesh, question.rows // shards):
        for remat in REMATS[mesh.stage > 1 :]:
            yield Way(strategy.name, mesh, strategy, remat, parts, chunk=chunk)


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
        for parts, chunk in _cuts(question, mesh, question.rows // shards):
            for remat in REMATS[mesh.stage > 1 :]:
                for cache in kept if mesh.stage == 1 else ["off"]:
                    yield Way(preset, mesh, strategy, remat, parts, cache, chunk=chunk)


def meshes(question: Question) -> Iterator[tuple[str, MeshConfig]]:
    """Presets and the meshes that they go with."""
    machine = question.machine
    for tensor, context, expert, stage in _inner(question):
        rest = machine.devices // (tensor * context * expert * stage)
        for fsdp in _shares(machine, rest, tensor * context):
            mesh = MeshConfig(rest // fsdp, fsdp, tensor, context, expert, stage)
            if mesh.data % machine.slices and machine.platform == "tpu":
                continue  # slow links between slices are for data alone
            plain = tensor * context * expert * stage == 1
            for preset in _presets(mesh, plain, bool(_experts(question))):
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
    machine, experts = question.machine, _experts(question)
    n, near = machine.devices, min(machine.island, 8)
    tensor = [t for t in (1, 2, 4, 8) if near % t == 0]
    long = question.length >= _LONG or question.rows < n
    context = [c for c in (1, 2, 4, 8) if near % c == 0 and question.length % (2 * c) == 0]
    expert = [1]
    if experts:
        expert = [e for e in _powers(128) if experts % e == 0 and n % e == 0]
    stage = [s for s in (1, 2, 4, 8, 16) if n % s == 0 and (s == 1 or n >= 4 * s)]
    if question.pairs:  # what is known of pairs is known of these axes alone
        long, expert, stage = False, [1], [1]
    for sizes in itertools.product(tensor, context if long else [1], expert, stage):
        few = sum(size > 1 for size in sizes) <= 2 and sizes[0] * sizes[1] <= near
        if few and n % math.prod(sizes) == 0:
            yield sizes


def _experts(question: Question) -> int:
    network = question.config.network
    return network.decoder.num_experts if isinstance(network, ModelConfig) else 0


def _shares(machine: Machine, rest: int, inner: int) -> list[int]:
    """Sizes of ``fsdp``: none, all, and what lies within fast links or a few of them."""
    near = max(1, machine.island // inner)
    sizes = {1, rest, near, 4 * near, 16 * near, rest // machine.slices}
    return sorted(size for size in sizes if size and rest % size == 0)


def _cuts(question: Question, mesh: MeshConfig, rows: int) -> list[tuple[int, tuple[int, int]]]:
    """Numbers of microbatches of a shard's rows; or of chunks of its pairs, and their rows."""
    if question.pairs is None:
        return [(parts, (0, 0)) for parts in _parts(question, mesh, rows)]
    documents = question.pairs.documents
    made = [(n, (rows // n, documents * rows // n)) for n in _powers(min(rows, _MOST_CHUNKS))]
    found = {parts: chunk for parts, chunk in made if parts > 1 and rows % parts == 0}
    own = chunk_of(question.pairs, question.given, rows)  # the recipe's
    return list({1: (0, 0), **found, own[0]: own[1]}.items())


def chunk_of(pairs: Pairing, config: TrainConfig, rows: int) -> tuple[int, tuple[int, int]]:
    """A run's own chunks of a shard's examples: how many at most, and their rows."""
    if config.grad_cache.query == CHOSEN:
        return 1, (0, 0)
    query, document = pairs._replace(chunks=chunks_of(config.grad_cache)).sides(rows)
    parts = max(query.parts, document.parts)
    sizes = -(-query.number // query.parts), -(-document.number // document.parts)
    return parts, sizes if parts > 1 else (0, 0)


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
        and not question.pairs
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
    name, tower = ("dual", "text") if config.encoder == "dual" else ("model", "decoder")
    lora = config.network.lora
    strategy = dataclasses.replace(way.strategy, name=way.preset)
    # A recipe's own strategy is not what was planned, whichever it is.
    found: dict[str, Any] = dict(_differing(given.strategy, strategy, "strategy"))
    found = {name: value for name, value in found.items() if _is_set(given.strategy, name)}
    found |= _differing(_bare(given, strategy), _bare(config, strategy))
    found |= {f"mesh.{axis}": getattr(way.mesh, axis) for axis in AXES}
    found |= {
        "strategy.name": way.preset,
        f"{name}.vision.remat": way.vision or way.remat,
        f"{name}.{tower}.remat": way.remat,
        **_cut_overrides(question, way),
        "data.batch_size": question.rows,
        "data.max_length": question.length,
        f"{name}.dtype": config.network.dtype,
        "optim.frozen": config.optim.frozen,
        f"{name}.lora.rank": lora.rank,
    }
    if not question.recipe and name == "model":  # whatever recipe they are put on
        found |= {f"data.{n}": getattr(config.data, n) for n in ("max_images", "max_patches")}
    if way.mesh.context > 1:
        found["strategy.context"] = way.strategy.context
    if way.strategy.whole:
        found["strategy.whole"] = way.strategy.whole
    if lora.rank:
        found[f"{name}.lora.alpha"] = lora.alpha
    if way.cache != "off" or config.cache.policy != "off":
        found["cache.policy"] = way.cache
    return [f"--config.{name}={value}" for name, value in found.items()]


def _cut_overrides(question: Question, way: Way) -> dict[str, int]:
    if question.pairs is None:
        return {"microbatches": way.microbatches}
    made = {"grad_cache.query": way.chunk[0], "grad_cache.document": way.chunk[1]}
    return made | ({"grad_cache.tokens": 0} if question.given.grad_cache.tokens else {})


def _bare(config: TrainConfig, strategy: StrategyConfig) -> TrainConfig:
    """Without dims, and with one strategy."""
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
    """Settings of ``new`` that ``old`` has otherwise, by their paths."""
    for field in dataclasses.fields(new):
        was, value = getattr(old, field.name), getattr(new, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            yield from _differing(was, value, name)
        elif was != value:
            yield name, value
