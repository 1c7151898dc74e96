"""The visual-token cache of a run, from its settings."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxvlm.build import tokens
from jaxvlm.build.model import Model
from jaxvlm.build.parts import tower_part
from jaxvlm.build.record import local_folder
from jaxvlm.cache.codec import CODECS
from jaxvlm.cache.policy import NEVER, Policy
from jaxvlm.cache.recompute import Recompute, Seen
from jaxvlm.cache.state import halved, init, places, shardings
from jaxvlm.config import CacheConfig, ConfigError, ModelConfig, TrainConfig, refuse_unread
from jaxvlm.data.loader import Dataset
from jaxvlm.data.slots import Given, Slots
from jaxvlm.models.vlm import DTYPES, tower_tokens, tower_width
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.train.apart import is_tower
from jaxvlm.train.programs import bytes_of
from jaxvlm.train.runner import FEATURES
from jaxvlm.types import PAGE, Batch, Cache, Params, Read, TrainState

TOKENS = "cache/tokens"
"""Among a step's metrics: what it made of its pictures, an array that stays on the devices."""
_OF_PICTURES = ("pixels", "patches", "image_key", "image_pages", "stored", "is_stored")
POLICIES = ("off", "strict", "lazy", "hybrid", "adaptive")


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
    size = 0 if vision.packed else tower_tokens(config.model)
    given = None
    if tokens.is_on(config.cache):
        if dataset.settings.patching and dataset.position_rows != 3:
            raise ConfigError(
                "config.cache.store and memory_mb take pictures of any size where their tokens "
                "have three rows of positions (Qwen-VL), which say a picture's shape; not here"
            )
        given = Given(tower_width(config.model), np.dtype(DTYPES[config.model.dtype]))
    return dataset.keep_tokens(size, config.cache.pictures, off, given)


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
    rate: Callable[[jax.Array], jax.Array] = jnp.ones_like,
    seed: int = 0,
) -> Cache:
    """The cache of a model on its mesh.

    Args:
        config: of the cache, its ``chunk`` set; see :func:`with_chunk`.
        model: with its tower.
        trained: paths of its trainable parameters.
        pages: C, over all devices.
        windows: tokens that the tower makes of a picture, at most; see ``Recompute``.
        rate: updates so far -> the learning rate of the next.
        seed: of draws.

    Raises:
        ConfigError: what does not go with a tower that learns.
    """
    learns = any(is_tower(path) for path in trained)
    if learns and (bits := model.strategies["vision"].reduce_bits) != 32:
        raise ConfigError(
            f"config.strategy.reduce_bits={bits} with config.cache and a tower that learns: its "
            "gradients are added up by the compiler; leave it at 32"
        )
    if learns and tokens.is_on(config):
        name = "store" if config.store else "memory_mb"
        raise ConfigError(
            f"config.cache.{name} with a tower that learns: its tokens are other ones after each "
            "update; leave it out, or freeze the tower: --config.optim.frozen=\"('vision/*',)\""
        )
    if learns and config.policy == "strict" and config.refresh:
        raise ConfigError(
            f"config.cache.refresh={config.refresh} with policy='strict' and a tower that learns: "
            "all are encoded each time as it is; leave it at 0"
        )
    if config.codec == "int4" and tower_width(model.config) % 2:
        raise ConfigError(
            f"config.cache.codec='int4' with {tower_width(model.config)} channels: odd"
        )
    tower, policy = (
        tower_part(model, model.mesh, model.strategies["vision"]),
        policy_of(config, seed),
    )
    pictures = Recompute(
        lambda params, batch: tower.module(params)(batch),
        model.mesh,
        windows,
        config.chunk,
        policy,
        lambda version: jnp.float32(rate(version)),
    )
    shards = batch_shards(model.mesh)
    for name in ("halvings", "spare_evaluations"):
        if learns and (value := getattr(config, name)):
            raise ConfigError(
                f"config.cache.{name}={value} with a tower that learns: what is kept of it is part "
                "of the run; leave it out, or freeze the tower"
            )
    if not halved(pages, shards, config.halvings):
        raise ConfigError(
            f"config.cache.halvings={config.halvings}: {pages // shards} pages a data shard can't "
            "be halved so often"
        )
    cached = _Cached(pictures, learns, tokens.is_on(config), pages)
    dtype, width = DTYPES[model.config.dtype], tower_width(model.config)
    return Cache(
        lambda times=0: init(halved(pages, shards, times), width, dtype),
        shardings(model.mesh),
        cached.read,
        cached.write,
        saved=learns and policy.bound > 0,
        gives=cached.gives,
    )


class _Cached(NamedTuple):
    """A step's visual tokens."""

    pictures: Recompute
    learns: bool
    """Whether the tower does."""
    gives: bool
    """Whether the step gives its tokens to the host."""
    pages: int
    """C, that batches number their pictures' pages for."""

    def read(self, state: Any, params: Params, frozen: Params, batch: Batch) -> Read:
        """Tokens in the place of pictures; see ``Cache.read``."""
        if batch.pixels is None and batch.patches is None:
            return Read(params, frozen, batch, lambda grads: grads)
        shards = batch_shards(self.pictures.mesh)
        here = places(batch.image_pages, self.pages, state.pages.shape[0], shards)
        batch = batch._replace(image_pages=here)
        own, rest = _split(params)
        still, others = _split(frozen)
        seen = self.pictures.look(state, batch)

        def features(own: Params) -> jax.Array:
            made = self.pictures.features({**own, **still}, state, batch, seen)
            return jax.lax.with_sharding_constraint(made, batch_sharding(self.pictures.mesh))

        made, pull = jax.vjp(features, own)
        without = batch._replace(**dict.fromkeys(_OF_PICTURES))
        known = (batch, seen, made)
        if not own:
            without = without._replace(features=made)
            return Read(rest, others, without, lambda grads: grads, known, _metrics(seen, batch))

        def back(grads: Params) -> Params:
            others = {path: g for path, g in grads.items() if path != FEATURES}
            return {**others, **pull(self.pictures.weighed(seen, grads[FEATURES]))[0]}

        params = {**rest, FEATURES: made}
        return Read(params, others, without, back, known, _metrics(seen, batch))

    def write(
        self, state: Any, read: Read, grads: Params, ok: jax.Array
    ) -> tuple[Any, dict[str, Any]]:
        """What was encoded is kept; see ``Cache.write``."""
        noted = {}
        if read.seen:
            batch, seen, made = read.seen
            gradient = grads.get(FEATURES)
            state, change = self.pictures.write(state, batch, seen, made, gradient, ok)
            noted["cache/drift_most"] = change
            if self.gives:
                noted[TOKENS] = jax.lax.with_sharding_constraint(
                    made, batch_sharding(self.pictures.mesh)
                )
        # With each update, though it may leave the tower where it is: else one that stands still
        # made nothing old, and as nothing old was encoded it would stand still for ever.
        return state._replace(version=state.version + (ok & self.learns)), noted


def _split(params: Params) -> tuple[Params, Params]:
    """The tower's, and the others."""
    own = {path: x for path, x in params.items() if is_tower(path)}
    return own, {path: x for path, x in params.items() if path not in own}


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


def _metrics(seen: Seen, batch: Batch) -> dict[str, Any]:
    found = jnp.sum(seen.found)
    lag = jnp.where(seen.found, seen.lag, 0)
    all_of = jnp.maximum(jnp.sum(seen.here), 1)
    values = {
        "cache/found": found / all_of,
        "cache/encoded": jnp.sum(seen.stale),
        "cache/lag": jnp.sum(lag) / jnp.maximum(found, 1),
        "cache/lag_most": jnp.max(lag),
    }
    if batch.is_stored is not None:
        values["cache/stored"] = jnp.sum(batch.is_stored) / all_of
    return values
