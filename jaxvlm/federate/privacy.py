"""Client-level differential privacy: noise on an outer update, and what it promises."""

from __future__ import annotations

import hashlib
import importlib.util

import numpy as np

from jaxvlm.config import ConfigError, FederateConfig


def check_privacy(config: FederateConfig) -> None:
    """Refuse settings under which noise would promise nothing.

    Raises:
        ConfigError: which setting, and what would do.
    """
    if not config.noise_multiplier:
        return
    where = f"config.federate.noise_multiplier={config.noise_multiplier:g}"
    if config.aggregator != "mean" or config.weighting != "uniform":
        raise ConfigError(
            f"{where}: the noise is that of a mean in which all updates weigh alike; set "
            "config.federate.aggregator='mean' and weighting='uniform'"
        )
    if config.buffer not in (0, config.sites) or config.max_staleness:
        raise ConfigError(
            f"{where} with buffer={config.buffer}, max_staleness={config.max_staleness}: an outer "
            "update could hold two of a site's updates, which the noise is too small for; leave "
            "both at 0 (synchronous)"
        )
    if not 0 < config.privacy_delta < 1:
        raise ConfigError(
            f"config.federate.privacy_delta={config.privacy_delta:g}: set a probability below 1, "
            "such as 1e-5"
        )
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError(
            f"{where} needs an accountant: pip install 'jaxvlm[federate]' brings dp-accounting"
        )


def with_noise(
    mean: dict[str, np.ndarray], deviation: float, secret: bytes, about: bytes
) -> dict[str, np.ndarray]:
    """Add Gaussian noise to each number.

    Args:
        mean: f64[...] by path.
        deviation: its standard deviation.
        secret: known to the coordinator alone; with ``about`` it seeds the draws, so that a
            coordinator that restarts makes the same version.
        about: the updates and their version: other updates get other noise, also where a folder
            was restored from an older copy.
    """
    seed = hashlib.blake2b(secret + about, digest_size=16).digest()
    draws = np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "little")))
    return {
        path: np.asarray(x + deviation * draws.standard_normal(x.shape))
        for path, x in sorted(mean.items())
    }


def epsilon(config: FederateConfig, updates: int) -> float:
    """The privacy loss after some outer updates, each of which may use every site's update.

    Args:
        config: of the federation.
        updates: outer updates so far.

    Returns:
        epsilon at ``config.privacy_delta``, by the Renyi accountant of dp-accounting; 0 after none.
    """
    if not updates:
        return 0.0
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant()
    event = dp_accounting.GaussianDpEvent(config.noise_multiplier)
    accountant.compose(event, updates)
    return float(accountant.get_epsilon(config.privacy_delta))
