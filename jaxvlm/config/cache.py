"""Settings of the visual-token cache."""

from __future__ import annotations

import dataclasses

from jaxvlm.config.extension import Extension


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Caches visual tokens from step to step (docs/cache.md)."""

    policy: str = "off"
    """Chooses when cached tokens may be read: never ('off'), when the vision encoder has not been
    updated since they were computed ('strict'), or up to ``max_staleness`` updates later ('lazy',
    'hybrid', 'adaptive'), or as a policy of the user's own says ('custom'). Allowed values: 'off',
    'strict', 'lazy', 'hybrid', 'adaptive', 'custom'."""
    custom_policy: Extension = Extension()
    """Groups the settings of a cache policy of the user's own, with policy 'custom'."""
    max_staleness: int = 1
    """Limits how many updates of the vision encoder old cached tokens may be when they are read,
    with policy 'lazy', 'hybrid' or 'adaptive'."""
    prefetch_staleness: int = 0
    """Sets the staleness in updates above which policy 'hybrid' recomputes cached tokens early,
    where an encode batch that runs anyway has room; it is below ``max_staleness``."""
    drift_threshold: float = 0.1
    """Sets the relative change of an image's tokens at which policy 'adaptive' recomputes them."""
    refresh_fraction: float = 0.0
    """Sets the share of cache hits that is drawn at random and encoded all the same, with gradients
    divided by the probability of the draw; policy 'adaptive' draws half of it by importance. The
    default 0 draws none."""
    refresh_burst: int = 0
    """Draws all images of this many steps in a row and none of the other steps; the default 0 draws
    some images of every step."""
    drift_warning: float = 0.0
    """Logs a warning where recomputed tokens differ from the cached ones by more than this relative
    change; the default 0 means 0.001 where the vision encoder is frozen, and no warning
    otherwise."""
    store: str = ""
    """Names a folder on disk in which the tokens of a frozen vision encoder are kept from run to
    run; the default "" keeps none on disk."""
    codec: str = "exact"
    """Chooses the compression of tokens in ``store``; only 'exact' loses nothing. Allowed values:
    'exact', 'int8', 'fp8', 'int4'."""
    token_order: str = ""
    """Chooses the order in which an image's tokens are cached: 'row_major', 'morton', 'merge2x2',
    or 'tiled(m)' for blocks of m x m; the default "" means the order in which the model reads
    them."""
    identity: str = "all"
    """Chooses which tokens of ``store`` are read: those of the same weights and images computed
    with the same kind of device, JAX version, XLA flags, dtype, attention backend, mesh layout and
    encode batch ('all'), or with any of these ('weights'). Allowed values: 'all', 'weights'."""
    memory_mb: int = 0
    """Sets the host memory in MiB that each process uses for cached tokens; with a vision encoder
    that is trained they are those of images beyond ``max_images``. The default 0 uses none."""
    max_images: int = 0
    """Limits the number of images, or of tiles of images, that are cached over all devices; the
    default 0 means all images of ``data.train``."""
    min_pages_fraction: float = 1.0
    """Sets the smallest fraction of its pages to which the cache of a frozen vision encoder may be
    cut when a step runs out of memory: 1/2^n allows the pages to be halved n times, and the steps
    with fewer pages are compiled at the start. The default 1.0 never cuts it; the allowed values
    are 1.0, 0.5, 0.25 and so on."""
    evict_for_eval: bool = False
    """Frees the cache's device memory for each evaluation, after which images are cache misses
    when they are shown next."""
    encode_batch: int = 0
    """Sets how many images a data shard encodes at once; the default 0 means 8, or fewer where the
    shard's sequences have room for fewer, and all at once without a policy."""
