"""Settings that islands (``config.mesh.island``) can't be combined with."""

from __future__ import annotations

from jaxvlm.config import Config, ConfigError, EncoderConfig, uses_cache
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.optim.outer import make_outer_optimizer


def check(config: Config) -> None:
    """Refuse what islands can't be combined with, and outer updates that can't be made.

    Raises:
        ConfigError: which setting, and what to do.
    """
    islands = config.mesh.island
    where = f"config.mesh.island={islands}"
    if islands < 1:
        raise ConfigError(f"{where}: set the number of islands, 1 or more")
    make_outer_optimizer(config.outer)
    if config.outer.steps < 1:
        raise ConfigError(f"config.outer.steps={config.outer.steps}: must be at least 1")
    refused = {
        "config.federate.sites": (
            config.federate.sites,
            "outer updates are those of islands or those of a federation; leave one out",
        ),
        "config.encoder.devices": (
            config.encoder != EncoderConfig(),
            "the vision encoder lies on the islands' own mesh; leave config.encoder out",
        ),
        "a loss of pairs": (
            trains_embeddings(config),
            "its negatives would be those of one island; use config.mesh.data",
        ),
        "config.cache": (
            uses_cache(config.cache),
            "islands have no cache of visual tokens; set config.cache.policy='off'",
        ),
        "config.strategy.offload": (
            config.strategy.offload,
            "the moments of islands stay on the devices; leave it out",
        ),
        "config.early_stop": (
            config.early_stop and config.eval_every % config.outer.steps,
            f"an evaluation is of the last outer update, so that config.eval_every="
            f"{config.eval_every} must be a multiple of config.outer.steps={config.outer.steps}",
        ),
    }  # fmt: skip
    for what, (bad, why) in refused.items():
        if bad:
            raise ConfigError(f"{where} cannot be combined with {what}: {why}")
