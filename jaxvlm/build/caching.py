"""The visual-token cache of a run, from its settings."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Collection

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvlm.build import tokens
from jaxvlm.build.losses import of_vectors
from jaxvlm.build.parts import features_of
from jaxvlm.build.record import local_folder
from jaxvlm.cache.codec import CODECS
from jaxvlm.cache.order import ROW_MAJOR, Kept, parse, permutation
from jaxvlm.cache.policy import NEVER, Policy
from jaxvlm.config import (
    CacheConfig,
    ConfigError,
    DualConfig,
    ModelConfig,
    TrainConfig,
    refuse_unread,
)
from jaxvlm.data.loader import Dataset
from jaxvlm.data.pair_loader import PairDataset
from jaxvlm.data.slots import Given, Slots, Unpaged, Written
from jaxvlm.models.vlm import DTYPES, tower_order
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.train.programs import bytes_of
from jaxvlm.types import PAGE, TrainState

POLICIES = ("off", "strict", "lazy", "hybrid", "adaptive")


def is_on(config: CacheConfig) -> bool:
    """Whether a step takes its pictures' tokens apart from the rest."""
    return config.policy != "off" or config.chunk > 0


def slots_of(
    config: TrainConfig, dataset: Dataset | PairDataset, learns: bool
) -> Slots | Unpaged | None:
    """Where the pictures' tokens are kept; ``None`` where no step looks for them.

    Args:
        config: of the run.
        dataset: is told of it.
        learns: whether the tower does: then pictures without pages may have room in host memory.

    Without a policy the step in chunks is the same program over as many pages, of which none is
    used (of pairs, with as much room for tokens, of which none are given): what a cache is compared
    with. (XLA's bits on CPU change with the size of any array.)
    """
    if not is_on(config.cache):
        return None
    size, width = features_of(config.network)
    given = Given(width, np.dtype(DTYPES[config.network.dtype]))
    outside = tokens.is_on(config.cache)
    if outside and not learns and not size and dataset.position_rows != 3:
        raise ConfigError(
            "config.cache.store and memory_mb take pictures of any size where their tokens "
            "have three rows of positions (Qwen-VL), which say a picture's shape; not here"
        )
    dataset.tag_keys(kept_of(config.cache, config.network).tag)
    if isinstance(dataset, PairDataset):
        return dataset.keep_tokens(size, given)
    off, beyond = config.cache.policy == "off", 0
    ages = learns and config.cache.memory_mb > 0 and policy_of(config.cache).bound > 0
    if ages:
        page = PAGE * given.width * given.dtype.itemsize
        beyond = jax.process_count() * config.cache.memory_mb * 2**20 // page
    asked = (config.cache.pictures, off, given if outside else None, beyond)
    slots = dataset.keep_tokens(size, *asked)
    if ages and not slots.tiles_beyond:
        raise ConfigError(
            f"config.cache.memory_mb={config.cache.memory_mb} holds the tokens of no picture: "
            + (
                "all have pages on the devices; set config.cache.pictures "
                f"({config.cache.pictures}) to how many are to have them"
                if slots.all_on_devices
                else f"it has room for {slots.beyond} pages of {PAGE} tokens for each virtual "
                "shard of the data, fewer than a picture takes; raise it, or lower "
                "data.virtual_shards"
            )
        )
    return slots


def kept_of(config: CacheConfig, network: ModelConfig | DualConfig) -> Kept:
    """How a picture's tokens lie where they are kept.

    Raises:
        ConfigError: an order that is none, or that such pictures can't have.
    """
    where = f"config.cache.order={config.order!r}"
    try:
        asked = parse(config.order) if config.order else None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if isinstance(network, DualConfig) or network.vision.packed:
        own = ROW_MAJOR if isinstance(network, DualConfig) else tower_order(network)
        if asked not in (None, own):
            what = (
                "vectors of whole pictures"
                if isinstance(network, DualConfig)
                else (f"pictures of any size, which lie as they are read ({own})")
            )
            raise ConfigError(f"{where} with {what}: leave it out")
        return Kept(own, own, 0)
    side = network.vision.image_size // network.vision.patch_size
    own = tower_order(network)
    kept = Kept(asked or own, own, side)
    try:
        permutation(kept.order, side, side)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return kept


def written_of(config: CacheConfig, slots: Slots | Unpaged | None, learns: bool) -> Written | None:
    """What a run goes by that leaves out the pixels of pictures whose tokens are in pages.

    ``None`` where a step may want them all the same: to draw, to audit, because what is kept grows
    old, or because a batch that was read ahead may meet fewer pages than there were.
    """
    kept = config.policy == "strict" and isinstance(slots, Slots)
    wanted = learns or config.refresh > 0 or config.halvings > 0 or tokens.is_on(config)
    return Written() if kept and not wanted else None


def check(config: TrainConfig) -> None:
    """Refuse what a cache can't be used with.

    Raises:
        ConfigError: which setting, and what would do.
    """
    cache, where = config.cache, "config.cache"
    if cache.policy not in POLICIES:
        raise ConfigError(f"{where}.policy={cache.policy!r}; known: {', '.join(POLICIES)}")
    refuse_unread(cache, where)
    if cache.trust not in tokens.TRUST:
        raise ConfigError(f"{where}.trust={cache.trust!r}; known: {', '.join(tokens.TRUST)}")
    if cache.codec not in CODECS:
        raise ConfigError(f"{where}.codec={cache.codec!r}; known: {', '.join(CODECS)}")
    numbers = ("bound", "ahead", "tolerance", "refresh", "at_once", "alarm", "memory_mb")
    for name in (*numbers, "pictures", "chunk", "halvings"):
        if not 0 <= getattr(cache, name) < math.inf:
            raise ConfigError(f"{where}.{name}={getattr(cache, name)} is below 0, or no number")
    for name in ("bound", "ahead", "pictures", "chunk"):
        if getattr(cache, name) >= NEVER:
            raise ConfigError(f"{where}.{name}={getattr(cache, name)}: {NEVER - 1:,} at most")
    if cache.refresh > 1:
        raise ConfigError(f"{where}.refresh={cache.refresh} is a share: 1 at most")
    if cache.policy == "hybrid" and cache.ahead >= cache.bound:
        raise ConfigError(
            f"{where}.ahead={cache.ahead} is not below bound={cache.bound}: nothing would be made "
            "anew ahead; policy='lazy' is that"
        )
    if not is_on(cache):
        return
    if cache.policy == "hybrid" and cache.refresh:
        raise ConfigError(
            f"{where}.refresh={cache.refresh} with policy='hybrid': what is made anew ahead was "
            "not drawn, so gradients would not be right in the mean; take 'lazy' or 'adaptive'"
        )
    if cache.policy == "adaptive" and cache.bound < 2:
        raise ConfigError(
            f"{where}.bound={cache.bound} with policy='adaptive' leaves it nothing to choose; set "
            "the most updates that tokens may be behind, an epoch's or more"
        )
    if cache.policy == "adaptive" and not (cache.tolerance or cache.refresh):
        raise ConfigError(f"{where}.tolerance=0 with policy='adaptive': nothing is ever due")
    local_folder(f"{where}.store", cache.store)
    there = pathlib.Path(cache.store or ".").expanduser()
    if any(path.exists() and not path.is_dir() for path in (there, *there.parents)):
        raise ConfigError(f"{where}.store={cache.store}: a file, where a folder is wanted")
    said = f"{where}.policy={cache.policy!r}" if cache.policy != "off" else f"{where}.chunk"
    if config.tower.devices:
        raise ConfigError(
            f"{said} with config.tower.devices={config.tower.devices}: a tower on devices of its "
            "own has no cache; leave one of them out"
        )
    if cache.spare_evaluations and not config.data.eval:
        raise ConfigError(f"{where}.spare_evaluations=True is not read without config.data.eval")
    if cache.policy != "off" and (config.data.flip or config.data.shift):
        raise ConfigError(
            f"{said} with config.data.flip or config.data.shift: a picture is another one each "
            "time, so what is kept is never read; set --config.data.flip=False "
            "--config.data.shift=0"
        )


def with_chunk(config: TrainConfig, mesh: Mesh) -> CacheConfig:
    """``config.cache``; where it leaves ``chunk`` open, 8 or what a shard's rows have room for."""
    rows = config.data.batch_size // batch_shards(mesh)
    alone = of_vectors(config) or config.network.vision.packed
    room = rows * (1 if alone else config.data.max_images)
    return dataclasses.replace(config.cache, chunk=config.cache.chunk or max(1, min(8, room)))


def line(config: CacheConfig, slots: Slots | Unpaged, state: TrainState) -> str:
    """What is kept, for people."""
    if isinstance(slots, Unpaged):
        on = {"on disk": bool(config.store), "in host memory": config.memory_mb > 0}
        where = " and ".join(place for place, used in on.items() if used)
        kept = f"kept {where}" if where else "none are kept"
        return f"visual tokens: {kept}; {config.chunk} pictures are encoded at once"
    size = sum(bytes_of(x) for x in jax.tree.leaves(state.cache))
    if config.policy == "off":
        return (
            f"visual tokens: none are kept, pictures are encoded {config.chunk} at once; "
            f"{slots.count:,} unused pages, {size / 2**20:.1f} MiB a device, for comparisons"
        )
    beyond = ""
    if slots.tiles_beyond and slots.given:
        page = PAGE * slots.given.width * slots.given.dtype.itemsize
        mib = slots.pages_beyond * page / 2**20
        beyond = f"; for {slots.tiles_beyond:,} in host memory, {mib:.1f} MiB over all processes"
    asked = ""
    if slots.tiles < config.pictures and not slots.all_on_devices:
        asked = f" (of {config.pictures:,}: as many for each of the data's virtual shards)"
    return (
        f"visual tokens ({config.policy}): room for {slots.tiles:,} pictures{asked} in "
        f"{slots.count:,} pages of {PAGE} tokens, {size / 2**20:.1f} MiB a device{beyond}"
    )


def check_codec(config: CacheConfig, trained: Collection[str]) -> None:
    """Refuse tokens that a codec changes where blocks of the tower learn from them.

    Raises:
        ConfigError: they do.
    """
    if config.codec != "exact" and any(path.startswith("top/") for path in trained):
        raise ConfigError(
            f"config.cache.codec={config.codec!r} with a tower whose top learns: it would learn "
            "from tokens that the trunk does not make; take 'exact', or freeze the top too: "
            "--config.optim.frozen=\"('vision/*', 'top/*')\""
        )


def policy_of(config: CacheConfig, seed: int = 0) -> Policy:
    """What the settings say of when tokens are stale."""
    late = config.policy in ("lazy", "hybrid", "adaptive")
    return Policy(
        bound=config.bound if late else 0,
        ahead=config.ahead if config.policy == "hybrid" else NEVER,
        tolerance=config.tolerance if config.policy == "adaptive" else 0.0,
        share=config.refresh,
        seed=seed,
        by_need=config.policy == "adaptive" and config.refresh > 0 and not config.at_once,
        at_once=config.at_once,
    )
