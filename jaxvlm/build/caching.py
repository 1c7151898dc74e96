"""The visual-token cache of a run, from its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.build.model import Model
from jaxvlm.build.parts import tower_part
from jaxvlm.cache.recompute import Recompute, Seen
from jaxvlm.cache.state import init, shardings
from jaxvlm.config import CacheConfig, ConfigError, ModelConfig, TrainConfig, refuse_unread
from jaxvlm.data.loader import Dataset
from jaxvlm.data.slots import Slots
from jaxvlm.models.vit import num_patches
from jaxvlm.models.vlm import DTYPES, tower_width
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.train.apart import is_tower
from jaxvlm.train.programs import bytes_of
from jaxvlm.train.runner import FEATURES
from jaxvlm.types import PAGE, Batch, Cache, Params, Read, TrainState

POLICIES = ("off", "strict", "lazy")


def is_on(config: CacheConfig) -> bool:
    """Whether a step takes its pictures' tokens apart from the rest."""
    return config.policy != "off" or config.chunk > 0


def slots_of(config: TrainConfig, dataset: Dataset) -> Slots | None:
    """Where the pictures' tokens are kept; ``None`` where no step looks for them.

    Without a policy the step in chunks is the same program over as many pages, of which none is
    used: what a cache is compared with. (XLA's bits on CPU change with the size of any array.)
    """
    if not is_on(config.cache):
        return None
    off, vision = config.cache.policy == "off", config.model.vision
    tokens = 0 if vision.packed else _tokens(config.model)
    return dataset.keep_tokens(tokens, config.cache.pictures, off)


def check(config: TrainConfig) -> None:
    """Refuse what a cache can't be used with.

    Raises:
        ConfigError: which setting, and what would do.
    """
    cache, where = config.cache, "config.cache"
    if cache.policy not in POLICIES:
        raise ConfigError(f"{where}.policy={cache.policy!r}; known: {', '.join(POLICIES)}")
    refuse_unread(cache, where)
    for name in ("bound", "pictures", "chunk"):
        if getattr(cache, name) < 0:
            raise ConfigError(f"{where}.{name}={getattr(cache, name)} is below 0")
    if not is_on(cache):
        return
    said = f"{where}.policy={cache.policy!r}" if cache.policy != "off" else f"{where}.chunk"
    if config.tower.devices:
        raise ConfigError(
            f"{said} with config.tower.devices={config.tower.devices}: a tower on devices of its "
            "own has no cache; leave one of them out"
        )
    if cache.policy != "off" and (config.data.flip or config.data.shift):
        raise ConfigError(
            f"{said} with config.data.flip or config.data.shift: a picture is another one each "
            "time, so what is kept is never read; set --config.data.flip=False "
            "--config.data.shift=0"
        )


def with_chunk(config: TrainConfig, mesh: Mesh) -> CacheConfig:
    """``config.cache``; where it leaves ``chunk`` open, 8 or what a shard's rows have room for."""
    rows = config.data.batch_size // batch_shards(mesh)
    room = rows * (1 if config.model.vision.packed else config.data.max_images)
    return dataclasses.replace(config.cache, chunk=config.cache.chunk or max(1, min(8, room)))


def line(config: CacheConfig, slots: Slots, state: TrainState) -> str:
    """What is kept, for people."""
    size = sum(bytes_of(x) for x in jax.tree.leaves(state.cache))
    if config.policy == "off":
        return (
            f"visual tokens: none are kept, pictures are encoded {config.chunk} at once; "
            f"{slots.count:,} unused pages, {size / 2**20:.1f} MiB a device, for comparisons"
        )
    return (
        f"visual tokens ({config.policy}): room for {slots.tiles:,} pictures in {slots.count:,} "
        f"pages of {PAGE} tokens, {size / 2**20:.1f} MiB a device"
    )


def make_cache(
    config: CacheConfig,
    model: Model[ModelConfig],
    trained: Collection[str],
    pages: int,
    windows: tuple[int, ...],
) -> Cache:
    """The cache of a model on its mesh.

    Args:
        config: of the cache, its ``chunk`` set; see :func:`with_chunk`.
        model: with its tower.
        trained: paths of its trainable parameters.
        pages: C, over all devices.
        windows: tokens that the tower makes of a picture, at most; see ``Recompute``.

    Raises:
        ConfigError: a strategy that does not go with a tower that learns behind a cache.
    """
    learns = any(is_tower(path) for path in trained)
    if learns and (bits := model.strategies["vision"].reduce_bits) != 32:
        raise ConfigError(
            f"config.strategy.reduce_bits={bits} with config.cache and a tower that learns: its "
            "gradients are added up by the compiler; leave it at 32"
        )
    tower = tower_part(model, model.mesh, model.strategies["vision"])

    bound = config.bound if config.policy == "lazy" else 0
    pictures = Recompute(
        lambda params, batch: tower.module(params)(batch),
        model.mesh,
        windows,
        config.chunk,
        bound,
    )

    def read(state: Any, params: Params, frozen: Params, batch: Batch) -> Read:
        if batch.pixels is None and batch.patches is None:
            return Read(params, frozen, batch, lambda grads: grads)
        own = {path: x for path, x in params.items() if is_tower(path)}
        still = {path: x for path, x in frozen.items() if is_tower(path)}
        seen = pictures.look(state, batch)

        def features(own: Params) -> jax.Array:
            made = pictures.features({**own, **still}, state, batch, seen)
            return jax.lax.with_sharding_constraint(made, batch_sharding(model.mesh))

        made, pull = jax.vjp(features, own)
        rest = {path: x for path, x in params.items() if path not in own}
        others = {path: x for path, x in frozen.items() if path not in still}
        without = batch._replace(pixels=None, patches=None, image_key=None, image_pages=None)
        metrics = _metrics(seen)
        if not own:
            return Read(
                rest, others, without._replace(features=made), lambda grads: grads,
                (batch, seen, made), metrics,
            )  # fmt: skip

        def back(grads: Params) -> Params:
            others = {path: g for path, g in grads.items() if path != FEATURES}
            return {**others, **pull(grads[FEATURES])[0]}

        return Read({**rest, FEATURES: made}, others, without, back, (batch, seen, made), metrics)

    def write(state: Any, read: Read, ok: jax.Array) -> Any:
        if read.seen:
            batch, seen, made = read.seen
            state = pictures.write(state, batch, seen, made, ok)
        return state._replace(version=state.version + (ok & learns))

    dtype, width = DTYPES[model.config.dtype], tower_width(model.config)
    return Cache(
        lambda: init(pages, width, dtype),
        shardings(model.mesh),
        read,
        write,
        saved=learns and bound > 0,
    )


def _metrics(seen: Seen) -> dict[str, Any]:
    found = jnp.sum(seen.here & ~seen.stale)
    return {
        "cache/found": found / jnp.maximum(jnp.sum(seen.here), 1),
        "cache/encoded": jnp.sum(seen.stale),
        "cache/lag": jnp.sum(seen.lag) / jnp.maximum(found, 1),
    }


def _tokens(config: ModelConfig) -> int:
    """What the tower makes of a picture of one size, or of a tile."""
    return num_patches(config.vision) + config.vision.keep_class_token
