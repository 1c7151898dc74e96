"""Bytes of the visual tokens that a process caches, by tier."""

from __future__ import annotations

from jaxvlm.cache.host_cache import HostCache
from jaxvlm.cache.writer import CacheWriter


def tier_bytes(device: int, writer: CacheWriter | None, host: HostCache | None) -> dict[str, int]:
    """Return the bytes that this process caches, by tier: ``device``, ``host``, ``disk``.

    Args:
        device: bytes of the pages on one device.
        writer: cache writer of a frozen vision encoder.
        host: host cache of a trained vision encoder.
    """
    sizes = {"device": device} if device else {}
    if host is not None:
        sizes["host"] = host.nbytes
    if writer is not None:
        sizes["host"] = writer.tiers.nbytes
        if writer.tiers.store:
            sizes["disk"] = writer.tiers.store.counts().bytes
    return sizes
