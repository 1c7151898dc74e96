"""Settings of a run's visual-token cache: checks, page allocation, token order and policy."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Collection

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvlm.cache.identity import IDENTITIES
from jaxvlm.cache.policy import NEVER, make_policy
from jaxvlm.cache.store.codec import CODECS
from jaxvlm.cache.token_order import ROW_MAJOR, TokenLayout, parse, permutation
from jaxvlm.checkpoint.run_record import local_folder
from jaxvlm.config import (
    CacheConfig,
    Config,
    ConfigError,
    DualConfig,
    ModelConfig,
    cache_halvings,
    refuse_unread,
    uses_cache,
)
from jaxvlm.data.conversations.dataset import Dataset
from jaxvlm.data.page_allocation import NoPages, PageAllocation, TokenShape, WrittenPages
from jaxvlm.data.pairs.dataset import PairDataset
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.models.vlm import DTYPES, encoder_token_order
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.spmd.submodels import feature_shape
from jaxvlm.train.program_memory import bytes_of
from jaxvlm.types import PAGE, TrainState

POLICIES = ("off", "strict", "lazy", "hybrid", "adaptive", "custom")


def is_outside_devices(config: CacheConfig) -> bool:
    """Whether tokens are cached outside of the devices: in host memory or on disk."""
    return bool(config.store) or config.memory_mb > 0


def allocate_pages(
    config: Config, dataset: Dataset | PairDataset, learns: bool
) -> PageAllocation | NoPages:
    """Allocate pages for the images' tokens, of a run that uses the cache.

    With ``policy='off'`` and ``encode_batch`` set, the step is compiled with as many pages, of
    which none is used (with pairs: with an array of the same size for stored tokens, all absent),
    so that a run with a cache can be compared with it to the bit: on CPU, XLA's bits change with
    the size of any array.

    Args:
        config: of the run.
        dataset: its batches carry the images' pages from now on.
        learns: whether the vision encoder is trained: then images without pages on the devices may
            have pages in host memory.

    Raises:
        ConfigError: settings that leave nothing to cache, or images that can't be.
    """
    size, width = feature_shape(config.network)
    given = TokenShape(width, np.dtype(DTYPES[config.network.dtype]))
    outside = is_outside_devices(config.cache)
    if outside and not learns and not size and dataset.position_rows != 3:
        raise ConfigError(
            "config.cache.store and memory_mb take images of any size only with models whose "
            "position ids have three rows (Qwen-VL), which give an image's shape; this model's "
            "have one; leave both out"
        )
    dataset.tag_keys(token_layout(config.cache, config.network).cache_key)
    if isinstance(dataset, PairDataset):
        return dataset.allocate_tokens(size, given)
    off, beyond = config.cache.policy == "off", 0
    ages = learns and config.cache.memory_mb > 0 and make_policy(config.cache).max_staleness > 0
    if ages:
        page = PAGE * given.width * given.dtype.itemsize
        beyond = jax.process_count() * config.cache.memory_mb * 2**20 // page
    asked = (config.cache.max_images, off, given if outside else None, beyond)
    pages = dataset.allocate_tokens(size, *asked)
    if ages and not pages.tiles_beyond:
        raise ConfigError(
            f"config.cache.memory_mb={config.cache.memory_mb} holds the tokens of no image: "
            + (
                "all images have pages on the devices; set config.cache.max_images "
                f"({config.cache.max_images}) to how many are to have them"
                if pages.all_on_devices
                else f"it has room for {pages.beyond} pages of {PAGE} tokens for each sequence "
                "of a batch, fewer than an image takes; raise it"
            )
        )
    return pages


def token_layout(config: CacheConfig, network: ModelConfig | DualConfig) -> TokenLayout:
    """Return the order of an image's tokens in the cache and in the model.

    Raises:
        ConfigError: ``token_order`` is not an order, or these images can't be stored in it.
    """
    where = f"config.cache.token_order={config.token_order!r}"
    try:
        asked = parse(config.token_order) if config.token_order else None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if isinstance(network, DualConfig) or network.vision.packed:
        own = ROW_MAJOR if isinstance(network, DualConfig) else encoder_token_order(network)
        if asked not in (None, own):
            what = (
                "embeddings of whole images, which have no order"
                if isinstance(network, DualConfig)
                else (f"images of any size, which are stored as the model reads them ({own})")
            )
            raise ConfigError(f"{where} with {what}: leave it out")
        return TokenLayout(own, own, 0)
    side = network.vision.image_size // network.vision.patch_size
    own = encoder_token_order(network)
    kept = TokenLayout(asked or own, own, side)
    try:
        permutation(kept.order, side, side)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return kept


def pages_written(
    config: CacheConfig, pages: PageAllocation | NoPages | None, learns: bool
) -> WrittenPages | None:
    """Return a record of written pages, by which batches leave out the pixels of cached images.

    ``None`` where a step may need the pixels of any image: for refresh draws, for audits, because
    tokens become stale, or because the pages may be halved after a batch was prefetched.
    """
    on_devices = config.policy == "strict" and isinstance(pages, PageAllocation)
    needs_pixels = (
        learns
        or config.refresh_fraction > 0
        or config.min_pages_fraction < 1
        or is_outside_devices(config)
    )
    return WrittenPages() if on_devices and not needs_pixels else None


def check_cache(config: Config) -> None:
    """Refuse cache settings that are invalid or that do not go with the run's other settings.

    Raises:
        ConfigError: names the setting, and what would do.
    """
    cache, where = config.cache, "config.cache"
    if cache.policy not in POLICIES:
        raise ConfigError(f"{where}.policy={cache.policy!r}; known: {', '.join(POLICIES)}")
    refuse_unread(cache, where)
    if cache.identity not in IDENTITIES:
        raise ConfigError(f"{where}.identity={cache.identity!r}; known: {', '.join(IDENTITIES)}")
    if cache.codec not in CODECS:
        raise ConfigError(f"{where}.codec={cache.codec!r}; known: {', '.join(CODECS)}")
    make_policy(cache)
    numbers = (
        *("max_staleness", "prefetch_staleness", "drift_threshold"),
        *("refresh_fraction", "refresh_burst", "drift_warning", "memory_mb"),
    )
    for name in (*numbers, "max_images", "encode_batch"):
        if not 0 <= getattr(cache, name) < math.inf:
            raise ConfigError(
                f"{where}.{name}={getattr(cache, name)} must be a finite number, 0 or more"
            )
    cache_halvings(cache)  # refuses a fraction that is not 1/2^n
    for name in ("max_staleness", "prefetch_staleness", "max_images", "encode_batch"):
        if getattr(cache, name) >= NEVER:
            raise ConfigError(
                f"{where}.{name}={getattr(cache, name)} is too large; {NEVER - 1:,} at most"
            )
    if cache.refresh_fraction > 1:
        raise ConfigError(
            f"{where}.refresh_fraction={cache.refresh_fraction} is a fraction; 1 at most"
        )
    if cache.policy == "hybrid" and cache.prefetch_staleness >= cache.max_staleness:
        raise ConfigError(
            f"{where}.prefetch_staleness={cache.prefetch_staleness} is not below "
            f"max_staleness={cache.max_staleness}: no tokens would be recomputed early; lower it, "
            "or take policy='lazy'"
        )
    if not uses_cache(cache):
        return
    if cache.policy == "hybrid" and cache.refresh_fraction:
        raise ConfigError(
            f"{where}.refresh_fraction={cache.refresh_fraction} with policy='hybrid': tokens "
            "recomputed early are not drawn at random, so gradients would be biased; take 'lazy' "
            "or 'adaptive'"
        )
    if cache.policy == "adaptive" and cache.max_staleness < 2:
        raise ConfigError(
            f"{where}.max_staleness={cache.max_staleness} with policy='adaptive' leaves nothing to "
            "choose; set it to the largest lag in updates, an epoch's or more"
        )
    if cache.policy == "adaptive" and not (cache.drift_threshold or cache.refresh_fraction):
        raise ConfigError(
            f"{where}.drift_threshold=0 with policy='adaptive': no token would ever be stale by "
            "drift; set it above 0, or set refresh_fraction"
        )
    local_folder(f"{where}.store", cache.store)
    store = pathlib.Path(cache.store or ".").expanduser()
    if any(path.exists() and not path.is_dir() for path in (store, *store.parents)):
        raise ConfigError(f"{where}.store={cache.store}: a file is there; give a folder")
    used = f"{where}.policy={cache.policy!r}" if cache.policy != "off" else f"{where}.encode_batch"
    if config.encoder.devices:
        raise ConfigError(
            f"{used} with config.encoder.devices={config.encoder.devices}: a vision encoder on "
            "devices of its own has no cache; leave one of them out"
        )
    if cache.policy != "off" and (config.data.flip or config.data.max_shift):
        raise ConfigError(
            f"{used} with config.data.flip or config.data.max_shift: each show of an image has "
            "other pixels, so its cached tokens are never read; set --config.data.flip=False "
            "--config.data.max_shift=0"
        )


def with_encode_batch(config: Config, mesh: Mesh) -> CacheConfig:
    """Return ``config.cache`` with ``encode_batch`` set: 0 becomes 8, or fewer where the sequences
    of a data shard have fewer images.
    """
    rows = config.data.batch_size // batch_shards(mesh)
    alone = trains_embeddings(config) or config.network.vision.packed
    room = rows * (1 if alone else config.data.max_images_per_sequence)
    return dataclasses.replace(
        config.cache, encode_batch=config.cache.encode_batch or max(1, min(8, room))
    )


def cache_line(config: CacheConfig, pages: PageAllocation | NoPages, state: TrainState) -> str:
    """Describe in one line what is cached and how much memory it takes."""
    if isinstance(pages, NoPages):
        on = {"on disk": bool(config.store), "in host memory": config.memory_mb > 0}
        where = " and ".join(place for place, used in on.items() if used)
        cached = f"cached {where}" if where else "not cached"
        return f"visual tokens: {cached}; {config.encode_batch} images are encoded at once"
    size = sum(bytes_of(x) for x in jax.tree.leaves(state.cache))
    if config.policy == "off":
        return (
            f"visual tokens: not cached, {config.encode_batch} images are encoded at once; "
            f"{pages.count:,} unused pages, {size / 2**20:.1f} MiB per device, for comparisons"
        )
    on_host = ""
    if pages.tiles_beyond and pages.given:
        page = PAGE * pages.given.width * pages.given.dtype.itemsize
        mib = pages.pages_beyond * page / 2**20
        on_host = f"; for {pages.tiles_beyond:,} in host memory, {mib:.1f} MiB over all processes"
    limit = ""
    if pages.tiles < config.max_images and not pages.all_on_devices:
        limit = f" (of {config.max_images:,}: as many for each sequence of a batch)"
    return (
        f"visual tokens ({config.policy}): room for {pages.tiles:,} images{limit} in "
        f"{pages.count:,} pages of {PAGE} tokens, {size / 2**20:.1f} MiB per device{on_host}"
    )


def check_codec(config: CacheConfig, trained: Collection[str]) -> None:
    """Refuse a lossy codec where the vision encoder's upper blocks are trained on cached tokens.

    Raises:
        ConfigError: the codec is lossy, and blocks above ``frozen_blocks`` are trained.
    """
    if config.codec != "exact" and any(path.startswith("vision_top/") for path in trained):
        raise ConfigError(
            f"config.cache.codec={config.codec!r} with trained blocks above frozen_blocks: they "
            "would be trained on hidden states that the frozen blocks do not compute; take "
            "'exact', or freeze the upper blocks too: "
            "--config.optim.frozen=\"('vision/*', 'vision_top/*')\""
        )
