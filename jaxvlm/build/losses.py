"""Losses by name: what ``config.loss`` may be."""

from __future__ import annotations

from collections.abc import Callable

from jaxvlm.config import ConfigError, TrainConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.types import Loss

LOSSES: dict[str, Callable[[TrainConfig], Loss]] = {
    "next_token": lambda config: NextToken(config.loss_chunk, config.router_loss),
}
"""Name -> a function that makes the loss from the run's settings."""


def make_loss(config: TrainConfig) -> Loss:
    """The loss that ``config.loss`` names.

    Raises:
        ConfigError: an unknown name, or a loss of what the model does not have.
    """
    if config.loss not in LOSSES:
        raise ConfigError(f"config.loss={config.loss!r}; known: {', '.join(LOSSES)}")
    if config.router_loss and not config.model.decoder.num_experts:
        raise ConfigError(
            f"config.router_loss={config.router_loss}: there is no router where "
            "config.model.decoder.num_experts=0"
        )
    if config.loss == "next_token" and not config.model.decoder.head:
        raise ConfigError(
            "config.loss='next_token': a model without an output matrix "
            "(config.model.decoder.head=False) predicts no token"
        )
    return LOSSES[config.loss](config)
