"""The visual-token cache of a run that trains vectors: a frozen tower's, outside of the devices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.build import cached as cached_step
from jaxvlm.build import caching, tokens
from jaxvlm.build.cache_metrics import metrics_of
from jaxvlm.build.cached import TOKENS, Cached
from jaxvlm.build.model import Known, Model
from jaxvlm.config import CacheConfig, ConfigError, DualConfig, TrainConfig
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.train.apart import is_tower
from jaxvlm.train.pairs import rows_of
from jaxvlm.types import Cache, Pairs, Params, Read


def check(config: TrainConfig) -> None:
    """Refuse what such a cache does not have.

    Raises:
        ConfigError: which setting, and what would do.
    """
    cache, where = config.cache, "config.cache"
    caching.check(config)
    if not caching.is_on(cache):
        return
    of, said = f"config.loss={config.loss!r}", f"{where}.policy={cache.policy!r}"
    if cache.policy not in ("off", "strict"):
        raise ConfigError(
            f"{said} with {of}: vectors are trained with tokens of a frozen tower alone, which "
            "never grow old; that is policy='strict'"
        )
    if cache.policy == "strict" and not tokens.is_on(cache):
        raise ConfigError(
            f"{said} with {of} keeps tokens in host memory or on disk, not on the devices; set "
            f"{where}.memory_mb or {where}.store"
        )
    for name in ("pictures", "halvings", "spare_evaluations"):
        if (value := getattr(cache, name)) != getattr(CacheConfig(), name):
            raise ConfigError(
                f"{where}.{name}={value} with {of}: it is of tokens on the devices, where none are "
                "kept; leave it out"
            )
    if isinstance(config.network, DualConfig) and "vision" not in config.network.towers:
        raise ConfigError(f"{said}: config.dual.towers={config.network.towers} see no picture")


def make_pair_cache(
    config: CacheConfig,
    model: Model[Known],
    trained: Collection[str],
    windows: tuple[int, ...],
) -> Cache:
    """The cache of a model of vectors: pictures whose tokens come with a batch are not encoded.

    Args:
        config: of the cache, its ``chunk`` set; see :func:`jaxvlm.build.caching.with_chunk`.
        model: with its tower.
        trained: paths of its trainable parameters.
        windows: tokens that the tower makes of a picture, at most; see ``Recompute``.

    Raises:
        ConfigError: a tower that learns.
    """
    if any(is_tower(path) for path in trained):
        name = "chunk" if config.policy == "off" else "policy"
        raise ConfigError(
            f"config.cache.{name}={getattr(config, name)!r} with a loss of vectors and a tower "
            "that learns: leave it out, or freeze the tower: "
            "--config.optim.frozen=\"('vision/*',)\""
        )
    caching.check_codec(config, trained)
    pictures = cached_step.recompute_of(config, model, windows, caching.policy_of(config))
    kept = caching.kept_of(config, model.config)
    # Given without a policy too, and then dropped: what is compared with is the same program.
    cached = _OfPairs(Cached(pictures, learns=False, gives=True, pages=0, kept=kept))
    return Cache(read=cached.read, write=cached.write, gives=True)


class _OfPairs(NamedTuple):
    """A step's visual tokens, of queries and of documents."""

    rows: Cached
    """Those of rows."""

    def read(self, state: Any, params: Params, frozen: Params, batch: Pairs) -> Read:
        """Tokens in the place of pictures; see ``Cache.read``."""
        sides = (batch.query, rows_of(batch.document))
        reads = [self.rows.read(state, params, frozen, side) for side in sides]
        query, document = (read.batch for read in reads)
        shape = batch.there.shape
        document = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), document)
        seen = tuple(read.seen for read in reads)
        _, others = cached_step.split_tower(frozen)
        return Read(
            params,
            others,
            batch._replace(query=query, document=document),
            lambda grads: grads,
            seen,
            metrics_of([known for known in seen if known]),
        )

    def write(
        self, state: Any, read: Read, grads: Params, ok: jax.Array
    ) -> tuple[Any, dict[str, Any]]:
        """Gives what was made of queries and of documents; see ``Cache.write``."""
        lie = batch_sharding(self.rows.pictures.mesh)
        made = [
            jax.lax.with_sharding_constraint(tokens.Made(known[2], known[1].encoded), lie)
            if known
            else None
            for known in read.seen
        ]
        # Nothing that is kept is made anew here; where what was stored is, the host compares.
        return state, {TOKENS: tuple(made), "cache/drift_most": jnp.float32(0)}
