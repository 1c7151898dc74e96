"""The cached train step: visual tokens are read from the cache, or encoded and written to it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.cache import writer
from jaxvlm.cache.encode import EncodeStep
from jaxvlm.cache.metrics import metrics_of
from jaxvlm.cache.page_writes import PageWrites
from jaxvlm.cache.policy import Policy, make_policy
from jaxvlm.cache.settings import check_codec, is_outside_devices, token_layout
from jaxvlm.cache.state import advance, init, pages_after_halving, renumber_pages, shardings
from jaxvlm.cache.token_order import TokenLayout
from jaxvlm.config import CacheConfig, ConfigError, DualConfig, cache_halvings
from jaxvlm.models.vlm import DTYPES
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.spmd.model import AnyModelConfig, Model
from jaxvlm.spmd.submodels import feature_shape, vision_encoder_part
from jaxvlm.train.grad_accum import FEATURES
from jaxvlm.types import Age, Batch, Cache, Params, Read, is_vision_path, trains_vision

TOKENS = "cache/tokens"
"""Name, among a step's metrics, of its images' tokens, arrays that stay on the devices:
``EncodedTokens`` of a frozen vision encoder, ``TrainableTokens`` of a trained one; with pairs, a
tuple of those of queries and of documents."""
_OF_IMAGES = (
    *("pixels", "patches", "image_key", "image_pages", "in_pages"),
    *("stored", "is_stored", "stored_age"),
)


def make_cache(
    config: CacheConfig,
    model: Model[AnyModelConfig],
    trained: Collection[str],
    pages: int,
    windows: tuple[int, ...],
    rate: Callable[[jax.Array], jax.Array] = jnp.ones_like,
    seed: int = 0,
) -> Cache:
    """Build the cache of a model on its mesh.

    Args:
        config: of the cache, with ``encode_batch`` set; see
            :func:`jaxvlm.cache.settings.with_encode_batch`.
        model: with its vision encoder.
        trained: paths of its trainable parameters.
        pages: C, over all devices.
        windows: numbers of tokens that an image is padded to; see
            :class:`jaxvlm.cache.encode.EncodeStep`.
        rate: updates so far -> the learning rate of the next.
        seed: of random draws.

    Raises:
        ConfigError: a setting that a trained vision encoder, or this number of pages, excludes.
    """
    learns = trains_vision(trained)
    if learns:
        _check_learning(config, model)
    check_codec(config, trained)
    policy, shards = make_policy(config, seed), batch_shards(model.mesh)
    if not pages_after_halving(pages, shards, cache_halvings(config)):
        raise ConfigError(
            f"config.cache.min_pages_fraction={config.min_pages_fraction:g}: {pages // shards} "
            "pages per data shard can't be halved so often; raise it"
        )
    images = make_encode_step(config, model, windows, policy, rate)
    layout = token_layout(config, model.config)
    cached = CachedStep(images, learns, is_outside_devices(config), pages, layout)
    dtype, (_, width) = DTYPES[model.config.dtype], feature_shape(model.config)
    return Cache(
        lambda times=0: init(pages_after_halving(pages, shards, times), width, dtype),
        shardings(model.mesh),
        cached.read,
        cached.write,
        in_checkpoint=learns and policy.max_staleness > 0,
        outputs_tokens=cached.outputs_tokens,
    )


def make_encode_step(
    config: CacheConfig,
    model: Model[AnyModelConfig],
    windows: tuple[int, ...],
    policy: Policy,
    rate: Callable[[jax.Array], jax.Array] = jnp.ones_like,
) -> EncodeStep:
    """Build the step that looks images up and encodes them; arguments as of :func:`make_cache`.

    Raises:
        ConfigError: a codec that does not fit the vision encoder's width.
    """
    if config.codec == "int4" and (width := feature_shape(model.config)[1]) % 2:
        raise ConfigError(
            f"config.cache.codec='int4' packs two channels in a byte, and the vision encoder's "
            f"width {width} is odd; take 'int8' or 'exact'"
        )
    encoder = vision_encoder_part(model, model.mesh, model.strategies["vision"])
    layout = token_layout(config, model.config)
    return EncodeStep(
        lambda params, batch: layout.to_cache(encoder.module(params)(batch)),
        model.mesh,
        windows,
        config.encode_batch,
        policy,
        lambda version: jnp.float32(rate(version)),
        isinstance(model.config, DualConfig),
    )


def _check_learning(config: CacheConfig, model: Model[AnyModelConfig]) -> None:
    """Refuse settings that do not work with a trained vision encoder."""
    if (dtype := model.strategies["vision"].grad_reduce_dtype) != "float32":
        raise ConfigError(
            f"config.strategy.grad_reduce_dtype={dtype!r} with config.cache and a trained vision "
            "encoder: the compiler reduces its gradients; leave it at 'float32'"
        )
    if config.store:
        raise ConfigError(
            "config.cache.store with a trained vision encoder: its tokens change with each update; "
            "leave it out (memory_mb keeps them for this run), or freeze the encoder: "
            "--config.optim.frozen=\"('vision/*',)\""
        )
    if config.memory_mb and config.policy != "off" and not make_policy(config).max_staleness:
        raise ConfigError(
            f"config.cache.memory_mb={config.memory_mb} with policy={config.policy!r}, a staleness "
            "limit of 0 and a trained vision encoder: cached tokens are never read; take 'lazy', "
            "'hybrid' or 'adaptive' and a config.cache.max_staleness above 0, or freeze the "
            "encoder: --config.optim.frozen=\"('vision/*',)\""
        )
    if config.policy == "strict" and config.refresh_fraction:
        raise ConfigError(
            f"config.cache.refresh_fraction={config.refresh_fraction} with policy='strict' and a "
            "trained vision encoder: all images are encoded each time anyway; leave it at 0"
        )
    for name in ("min_pages_fraction", "evict_for_eval"):
        if (value := getattr(config, name)) != getattr(CacheConfig(), name):
            raise ConfigError(
                f"config.cache.{name}={value} with a trained vision encoder: its cached tokens are "
                "part of the run's state; leave it out, or freeze the encoder"
            )


class TrainableTokens(NamedTuple):
    """A step's visual tokens of a trained vision encoder, for the host cache."""

    tokens: Any
    """As ``Batch.features``, in the cache's token order."""
    encoded: Any
    """bool[B, I]: encoded in a step whose update was applied."""
    shown: Any
    """bool[B, I]: whose ``age.grad_norm`` is new, encoded or read."""
    age: Age
    """[B, I] each."""


class CachedStep(NamedTuple):
    """Reads a step's visual tokens before its forward pass, and writes them after its update."""

    encode: EncodeStep
    learns: bool
    """Whether the vision encoder is trained."""
    outputs_tokens: bool
    """Whether the step returns its tokens to the host."""
    pages: int
    """C that batches number their images' pages for; 0: there are no pages."""
    layout: TokenLayout
    """Order of the cached tokens."""

    def read(self, state: Any, params: Params, frozen: Params, batch: Batch) -> Read:
        """Replace a batch's images by their tokens; see ``Cache.read``."""
        if batch.pixels is None and batch.patches is None:
            return Read(params, frozen, batch, lambda grads: grads)
        cache = state if self.pages else None
        if cache is not None:
            shards, now = batch_shards(self.encode.mesh), cache.pages.shape[0]
            image_pages = renumber_pages(batch.image_pages, self.pages, now, shards)
            batch = batch._replace(image_pages=image_pages)
        trained, rest = split_vision(params)
        frozen_vision, others = split_vision(frozen)
        seen = self.encode.lookup(cache, batch)

        def features(trained: Params) -> jax.Array:
            every = {**trained, **frozen_vision}
            tokens = self.encode.features(every, cache, batch, seen, bool(trained))
            return jax.lax.with_sharding_constraint(tokens, batch_sharding(self.encode.mesh))

        tokens, vjp = jax.vjp(features, trained)
        without = batch._replace(**dict.fromkeys(_OF_IMAGES))
        looked_up, in_order = (batch, seen, tokens), self.layout.from_cache(tokens)
        metrics = metrics_of([looked_up], self.encode.policy.max_staleness)
        if not trained:
            without = without._replace(features=in_order)
            return Read(rest, others, without, lambda grads: grads, looked_up, metrics)

        def back(grads: Params) -> Params:
            others = {path: g for path, g in grads.items() if path != FEATURES}
            back = self.layout.to_cache(grads[FEATURES])
            return {**others, **vjp(self.encode.reweighted(seen, back))[0]}

        return Read({**rest, FEATURES: in_order}, others, without, back, looked_up, metrics)

    def write(
        self, state: Any, read: Read, grads: Params, ok: jax.Array
    ) -> tuple[Any, dict[str, Any]]:
        """Write what was encoded into the cache; see ``Cache.write``."""
        metrics = {}
        if read.seen:
            batch, seen, tokens = read.seen
            gradient = grads.get(FEATURES)  # only its norm is used, which no token order changes
            encode = self.encode
            writes = PageWrites(encode.mesh, encode.policy, encode.rate)
            state, change, age = writes.write(state, batch, seen, tokens, gradient, ok)
            metrics["cache/drift_max"] = change
            if self.outputs_tokens:
                given: Any = writer.EncodedTokens(tokens, seen.encoded)
                if self.learns:
                    shown = (seen.stale | seen.cached) & self.encode.policy.by_importance
                    given = TrainableTokens(tokens, seen.encoded & ok, shown & ok, age)
                sharding = batch_sharding(self.encode.mesh)
                metrics[TOKENS] = jax.lax.with_sharding_constraint(given, sharding)
        return advance(state, ok & self.learns), metrics


def split_vision(params: Params) -> tuple[Params, Params]:
    """Split parameters into the vision encoder's and the others."""
    own = {path: x for path, x in params.items() if is_vision_path(path)}
    return own, {path: x for path, x in params.items() if path not in own}
