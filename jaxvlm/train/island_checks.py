"""Settings that islands (``config.mesh.island``) can't be combined with."""

from __future__ import annotations

from jaxvlm.config import Config, ConfigError, EncoderConfig, OuterConfig, uses_cache
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
    _check_streaming(config.outer)
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


def _check_streaming(outer: OuterConfig) -> None:
    """Refuse rounds without a step, and fragments or an overlap that do not fit into a round."""
    if outer.steps < 1:
        raise ConfigError(f"config.outer.steps={outer.steps}: must be at least 1")
    if not 1 <= outer.fragments <= outer.steps:
        raise ConfigError(
            f"config.outer.fragments={outer.fragments}: set 1 to config.outer.steps={outer.steps}, "
            "so that each has an outer update in its turn"
        )
    if not 0 <= outer.overlap_steps < outer.steps:
        raise ConfigError(
            f"config.outer.overlap_steps={outer.overlap_steps}: set 0 to below config.outer.steps="
            f"{outer.steps}, so that a result is mixed in before the next is sent"
        )
    if not 0 <= outer.mixing < 1:
        raise ConfigError(f"config.outer.mixing={outer.mixing:g}: set 0 to below 1")
    if outer.moments == "reset" and outer.fragments > 1:
        raise ConfigError(
            f"config.outer.moments='reset' with config.outer.fragments={outer.fragments}: Adam "
            "counts the steps of all moments together; leave it at 'keep'"
        )
