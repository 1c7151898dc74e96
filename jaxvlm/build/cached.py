"""A step whose visual tokens are read from the cache, or encoded and kept in it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.build import tokens
from jaxvlm.build.cache_metrics import metrics_of
from jaxvlm.build.caching import check_codec, kept_of, policy_of
from jaxvlm.build.model import Known, Model
from jaxvlm.build.parts import features_of, tower_part
from jaxvlm.cache.order import Kept
from jaxvlm.cache.policy import Policy
from jaxvlm.cache.recompute import Recompute
from jaxvlm.cache.state import advance, halved, init, places, shardings
from jaxvlm.config import CacheConfig, ConfigError, DualConfig
from jaxvlm.models.vlm import DTYPES
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.train.apart import is_tower
from jaxvlm.train.runner import FEATURES
from jaxvlm.types import Age, Batch, Cache, Params, Read

TOKENS = "cache/tokens"
"""Among a step's metrics: what it has of its pictures, arrays that stay on the devices: ``Made``
of a tower that rests, ``MadeNow`` of one that learns; of pairs one of queries, one of documents."""
_OF_PICTURES = (
    *("pixels", "patches", "image_key", "image_pages", "in_pages"),
    *("stored", "is_stored", "stored_age"),
)


def make_cache(
    config: CacheConfig,
    model: Model[Known],
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
    if learns:
        _check_learning(config, model)
    check_codec(config, trained)
    policy, shards = policy_of(config, seed), batch_shards(model.mesh)
    if not halved(pages, shards, config.halvings):
        raise ConfigError(
            f"config.cache.halvings={config.halvings}: {pages // shards} pages a data shard can't "
            "be halved so often"
        )
    pictures = recompute_of(config, model, windows, policy, rate)
    kept = kept_of(config, model.config)
    cached = Cached(pictures, learns, tokens.is_on(config), pages, kept)
    dtype, (_, width) = DTYPES[model.config.dtype], features_of(model.config)
    return Cache(
        lambda times=0: init(halved(pages, shards, times), width, dtype),
        shardings(model.mesh),
        cached.read,
        cached.write,
        saved=learns and policy.bound > 0,
        gives=cached.gives,
    )


def recompute_of(
    config: CacheConfig,
    model: Model[Known],
    windows: tuple[int, ...],
    policy: Policy,
    rate: Callable[[jax.Array], jax.Array] = jnp.ones_like,
) -> Recompute:
    """What encodes pictures, and chooses which; arguments as of :func:`make_cache`.

    Raises:
        ConfigError: a codec that does not fit the tower.
    """
    if config.codec == "int4" and (width := features_of(model.config)[1]) % 2:
        raise ConfigError(f"config.cache.codec='int4' with {width} channels: odd")
    tower = tower_part(model, model.mesh, model.strategies["vision"])
    kept = kept_of(config, model.config)
    return Recompute(
        lambda params, batch: kept.keep(tower.module(params)(batch)),
        model.mesh,
        windows,
        config.chunk,
        policy,
        lambda version: jnp.float32(rate(version)),
        isinstance(model.config, DualConfig),
    )


def _check_learning(config: CacheConfig, model: Model[Known]) -> None:
    """Refuse what does not go with a tower that learns."""
    if (bits := model.strategies["vision"].reduce_bits) != 32:
        raise ConfigError(
            f"config.strategy.reduce_bits={bits} with config.cache and a tower that learns: its "
            "gradients are added up by the compiler; leave it at 32"
        )
    if config.store:
        raise ConfigError(
            "config.cache.store with a tower that learns: its tokens are other ones after each "
            "update; leave it out (memory_mb keeps them for this run), or freeze the tower: "
            "--config.optim.frozen=\"('vision/*',)\""
        )
    if config.memory_mb and config.policy != "off" and not policy_of(config).bound:
        raise ConfigError(
            f"config.cache.memory_mb={config.memory_mb} with policy={config.policy!r}, no update "
            "behind and a tower that learns: what is kept is never read; take 'lazy', 'hybrid' or "
            "'adaptive' and a config.cache.bound above 0, or freeze "
            "the tower: --config.optim.frozen=\"('vision/*',)\""
        )
    if config.policy == "strict" and config.refresh:
        raise ConfigError(
            f"config.cache.refresh={config.refresh} with policy='strict' and a tower that learns: "
            "all are encoded each time as it is; leave it at 0"
        )
    for name in ("halvings", "spare_evaluations"):
        if value := getattr(config, name):
            raise ConfigError(
                f"config.cache.{name}={value} with a tower that learns: what is kept of it is part "
                "of the run; leave it out, or freeze the tower"
            )


class MadeNow(NamedTuple):
    """What a step gives of the tokens of a tower that learns."""

    tokens: Any
    """``Batch.features``, as they are kept."""
    encoded: Any
    """bool[B, I]: made anew in a step that was good."""
    shown: Any
    """bool[B, I]: whose ``age.pull`` is new, made or read."""
    age: Age


class Cached(NamedTuple):
    """A step's visual tokens."""

    pictures: Recompute
    learns: bool
    """Whether the tower does."""
    gives: bool
    """Whether the step gives its tokens to the host."""
    pages: int
    """C, that batches number their pictures' pages for; 0: there are none."""
    kept: Kept

    def read(self, state: Any, params: Params, frozen: Params, batch: Batch) -> Read:
        """Tokens in the place of pictures; see ``Cache.read``."""
        if batch.pixels is None and batch.patches is None:
            return Read(params, frozen, batch, lambda grads: grads)
        kept = state if self.pages else None
        if kept is not None:
            shards = batch_shards(self.pictures.mesh)
            here = places(batch.image_pages, self.pages, kept.pages.shape[0], shards)
            batch = batch._replace(image_pages=here)
        own, rest = split_tower(params)
        still, others = split_tower(frozen)
        seen = self.pictures.look(kept, batch)

        def features(own: Params) -> jax.Array:
            every = {**own, **still}
            made = self.pictures.features(every, kept, batch, seen, bool(own))
            return jax.lax.with_sharding_constraint(made, batch_sharding(self.pictures.mesh))

        made, pull = jax.vjp(features, own)
        without = batch._replace(**dict.fromkeys(_OF_PICTURES))
        known = (batch, seen, made)
        if not own:
            without = without._replace(features=self.kept.give(made))
            return Read(
                rest,
                others,
                without,
                lambda grads: grads,
                known,
                metrics_of([known], self.pictures.policy.bound),
            )

        def back(grads: Params) -> Params:
            others = {path: g for path, g in grads.items() if path != FEATURES}
            back = self.kept.keep(grads[FEATURES])
            return {**others, **pull(self.pictures.weighed(seen, back))[0]}

        params = {**rest, FEATURES: self.kept.give(made)}
        return Read(
            params, others, without, back, known, metrics_of([known], self.pictures.policy.bound)
        )

    def write(
        self, state: Any, read: Read, grads: Params, ok: jax.Array
    ) -> tuple[Any, dict[str, Any]]:
        """What was encoded is kept; see ``Cache.write``."""
        noted = {}
        if read.seen:
            batch, seen, made = read.seen
            gradient = grads.get(FEATURES)  # its norm alone is read, in whatever order
            state, change, age = self.pictures.write(state, batch, seen, made, gradient, ok)
            noted["cache/drift_most"] = change
            if self.gives:
                given: Any = tokens.Made(made, seen.encoded)
                if self.learns:
                    shown = (seen.stale | seen.known) & self.pictures.policy.by_need
                    given = MadeNow(made, seen.encoded & ok, shown & ok, age)
                noted[TOKENS] = jax.lax.with_sharding_constraint(
                    given, batch_sharding(self.pictures.mesh)
                )
        return advance(state, ok & self.learns), noted


def split_tower(params: Params) -> tuple[Params, Params]:
    """The tower's, and the others."""
    own = {path: x for path, x in params.items() if is_tower(path)}
    return own, {path: x for path, x in params.items() if path not in own}
