"""Settings of the visual-token cache."""

from __future__ import annotations

import dataclasses

from jaxvlm.config.extension import Extension


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Caches visual tokens from step to step (docs/cache.md)."""

    policy: str = "off"
    """Chooses when cached tokens may be read: never ('off'), as long as the vision encoder has not
    been updated since they were computed ('strict'), up to ``max_staleness`` updates later ('lazy',
    'hybrid', 'adaptive'), or when a policy of the user's own allows it ('custom'). Allowed values:
    'off', 'strict', 'lazy', 'hybrid', 'adaptive', 'custom'."""
    custom_policy: Extension = Extension()
    """Groups the settings of a cache policy of the user's own, which is used with policy
    'custom'."""
    max_staleness: int = 1
    """Limits the age of cached tokens, in updates of the vision encoder, with policy 'lazy',
    'hybrid' or 'adaptive'; older tokens are recomputed."""
    prefetch_staleness: int = 0
    """Sets the age, in updates of the vision encoder, above which policy 'hybrid' recomputes cached
    tokens ahead of time, if an encode batch that runs anyway has room for them; it must be below
    ``max_staleness``."""
    drift_threshold: float = 0.1
    """Sets the relative change of an image's tokens at which policy 'adaptive' recomputes them."""
    refresh_fraction: float = 0.0
    """Sets the fraction of cache hits that are re-encoded at random; their gradients are divided by
    the probability of being chosen. Policy 'adaptive' chooses half of them by importance. The
    default 0 re-encodes none."""
    refresh_burst: int = 0
    """Applies ``refresh_fraction`` to whole steps: all cache hits of this many consecutive steps
    are re-encoded, and none in the steps between. The default 0 re-encodes some of the hits of
    every step."""
    drift_warning: float = 0.0
    """Logs a warning if recomputed tokens differ from the cached ones by more than this relative
    change; the default 0 means 0.001 with a frozen vision encoder, and no warning with a trained
    one."""
    store: str = ""
    """Names a folder on disk that keeps the tokens of a frozen vision encoder from run to run; the
    default "" keeps none on disk."""
    codec: str = "exact"
    """Chooses the compression of tokens in ``store``; only 'exact' loses nothing. Allowed values:
    'exact', 'int8', 'fp8', 'int4'."""
    token_order: str = ""
    """Chooses the order in which an image's tokens are cached: 'row_major', 'morton', 'merge2x2',
    or 'tiled(m)' for blocks of m x m; the default "" means the order in which the model reads
    them."""
    identity: str = "all"
    """Chooses what must be equal for the tokens in ``store`` to be read. With both values it is the
    vision encoder's weights and settings, and the image and its preparation; with 'all' also the
    kind of device, JAX's version, XLA's flags, the dtype, the attention backend, the mesh layout
    and the encode batch. Allowed values: 'all', 'weights'."""
    memory_mb: int = 0
    """Sets the host memory in MiB that each process uses for cached tokens; with a trained vision
    encoder, for those of images beyond ``max_images``. The default 0 uses none."""
    max_images: int = 0
    """Limits the number of images, or of tiles of images, that are cached over all devices; the
    default 0 caches all images of ``data.train``."""
    min_pages_fraction: float = 1.0
    """Sets the smallest fraction of its pages that the cache of a frozen vision encoder may be
    reduced to when a step runs out of memory: 1/2^n allows the pages to be halved n times, and the
    steps with fewer pages are compiled at the start. The default 1.0 never reduces them; the
    allowed values are 1.0, 0.5, 0.25 and so on."""
    evict_for_eval: bool = False
    """Frees the cache's device memory for each evaluation; afterwards, each image is a cache miss
    the next time it is shown."""
    encode_batch: int = 0
    """Sets how many images a data shard encodes at once. The default 0 means 8, or fewer if the
    shard's sequences have fewer images; without a policy, it means all images."""
