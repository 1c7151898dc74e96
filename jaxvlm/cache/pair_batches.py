"""The visual-token cache of embedding training: a frozen vision encoder's, on host and disk."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.cache import cached_step, settings, writer
from jaxvlm.cache.cached_step import TOKENS, CachedStep
from jaxvlm.cache.metrics import metrics_of
from jaxvlm.cache.policy import make_policy
from jaxvlm.cache.settings import is_outside_devices
from jaxvlm.config import CacheConfig, Config, ConfigError, DualConfig, uses_cache
from jaxvlm.losses.registry import loss_setting
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.spmd.model import AnyModelConfig, Model
from jaxvlm.train.gradcache import rows_of
from jaxvlm.types import Cache, Pairs, Params, Read, trains_vision


def check_pair_cache(config: Config) -> None:
    """Refuse cache settings that embedding training does not support.

    Raises:
        ConfigError: names the setting, and what would do.
    """
    cache, where = config.cache, "config.cache"
    settings.check_cache(config)
    if not uses_cache(cache):
        return
    loss, policy = loss_setting(config), f"{where}.policy={cache.policy!r}"
    if cache.policy not in ("off", "strict"):
        raise ConfigError(
            f"{policy} with {loss}: embedding training caches tokens of a frozen vision encoder "
            "alone, which are never stale; that is policy='strict'"
        )
    if cache.policy == "strict" and not is_outside_devices(cache):
        raise ConfigError(
            f"{policy} with {loss} caches tokens in host memory or on disk, not on the devices; "
            f"set {where}.memory_mb or {where}.store"
        )
    for name in ("max_images", "min_pages_fraction", "evict_for_eval"):
        if (value := getattr(cache, name)) != getattr(CacheConfig(), name):
            raise ConfigError(
                f"{where}.{name}={value} with {loss}: it concerns pages on the devices, and "
                "embedding training has none; leave it out"
            )
    if isinstance(config.network, DualConfig) and "vision" not in config.network.towers:
        raise ConfigError(
            f"{policy} with config.dual.towers={config.network.towers}: no tower takes images; "
            "leave the cache out"
        )


def make_pair_cache(
    config: CacheConfig,
    model: Model[AnyModelConfig],
    trained: Collection[str],
    windows: tuple[int, ...],
) -> Cache:
    """Build the cache of an embedding model: images whose tokens come with a batch are not encoded.

    Args:
        config: of the cache, with ``encode_batch`` set; see
            :func:`jaxvlm.cache.settings.with_encode_batch`.
        model: with its vision encoder.
        trained: paths of its trainable parameters.
        windows: numbers of tokens that an image is padded to; see
            :class:`jaxvlm.cache.encode.EncodeStep`.

    Raises:
        ConfigError: the vision encoder is trained, or the codec does not fit it.
    """
    if trains_vision(trained):
        name = "encode_batch" if config.policy == "off" else "policy"
        raise ConfigError(
            f"config.cache.{name}={getattr(config, name)!r} with an embedding loss and a trained "
            "vision encoder: leave it out, or freeze the encoder: "
            "--config.optim.frozen=\"('vision/*',)\""
        )
    settings.check_codec(config, trained)
    images = cached_step.make_encode_step(config, model, windows, make_policy(config))
    layout = settings.token_layout(config, model.config)
    # Tokens are an output without a policy too, and dropped then, so that a run with the cache is
    # compared with the same compiled program.
    rows = CachedStep(images, learns=False, outputs_tokens=True, pages=0, layout=layout)
    cached = _PairCachedStep(rows)
    return Cache(read=cached.read, write=cached.write, outputs_tokens=True)


class _PairCachedStep(NamedTuple):
    """Reads and writes a step's visual tokens of queries and of documents."""

    rows: CachedStep
    """Of one batch of sequences."""

    def read(self, state: Any, params: Params, frozen: Params, batch: Pairs) -> Read:
        """Replace a batch's images by their tokens; see ``Cache.read``."""
        columns = (batch.query, rows_of(batch.document))
        reads = [self.rows.read(state, params, frozen, column) for column in columns]
        query, document = (read.batch for read in reads)
        shape = batch.valid.shape
        document = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), document)
        seen = tuple(read.seen for read in reads)
        _, others = cached_step.split_vision(frozen)
        return Read(
            params,
            others,
            batch._replace(query=query, document=document),
            lambda grads: grads,
            seen,
            metrics_of([looked_up for looked_up in seen if looked_up]),
        )

    def write(
        self, state: Any, read: Read, grads: Params, ok: jax.Array
    ) -> tuple[Any, dict[str, Any]]:
        """Return the tokens of queries and of documents to the host; see ``Cache.write``."""
        sharding = batch_sharding(self.rows.encode.mesh)
        tokens = [
            jax.lax.with_sharding_constraint(
                writer.EncodedTokens(looked_up[2], looked_up[1].encoded), sharding
            )
            if looked_up
            else None
            for looked_up in read.seen
        ]
        # The step recomputes no cached tokens; where stored ones are audited, the host compares.
        return state, {TOKENS: tuple(tokens), "cache/drift_max": jnp.float32(0)}
