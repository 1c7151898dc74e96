"""Run one site of a federation: an ordinary training run with an exchange."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxvlm.cache.policy import make_policy
from jaxvlm.config import Config, ConfigError, from_config_dict, uses_cache
from jaxvlm.federate import handshake
from jaxvlm.federate.client import Client
from jaxvlm.federate.handshake import LOSSLESS
from jaxvlm.sites.callback import FederationCallback
from jaxvlm.train.callbacks import Callback
from jaxvlm.train.progress import named
from jaxvlm.trainer.trainer import Trainer


def make_site(
    config: Any,
    workdir: str | pathlib.Path,
    client: Client,
    devices: Sequence[jax.Device] | None = None,
    callbacks: Sequence[Callback] = (),
    log: Callable[[str], None] = print,
    name: str = "",
) -> Trainer:
    """Build a site's run; its ``fit`` joins the federation and trains to its end.

    Args:
        config: the federation's recipe with the site's own data, a Config or a ConfigDict.
        workdir: the site's folder; a run that is in it goes on.
        client: of the coordinator, with the site's name.
        devices: which devices the mesh is made of; all by default.
        callbacks: what happens around steps besides.
        log: takes lines for people.
        name: in front of the run's lines, where one process has several sites.

    Raises:
        ConfigError: settings or a name that can't be used.
        DataError: data that can't be used.
    """
    if not 0 < len(client.site) <= 200:
        raise ConfigError(f"--site={client.site!r}: give the site a name of at most 200 characters")

    def say(line: str) -> None:
        log(named(name, line))

    config = site_config(from_config_dict(config), say)
    exchange = FederationCallback(client, say)
    run = Trainer(config, workdir, devices, (*callbacks, exchange), name)
    exchange.run = run
    _check_length(run)
    _check_versions(run)
    run.dataset.check_batches()
    return run


def site_config(config: Config, log: Callable[[str], None] = print) -> Config:
    """The recipe as a site trains it: what the federation decides is filled in.

    Raises:
        ConfigError: what no site of a federation can use.
    """
    handshake.check_settings(config)
    if config.encoder.devices:
        raise ConfigError(
            f"config.encoder.devices={config.encoder.devices}: a site's vision encoder is on the "
            "mesh of the rest of its model; leave it at 0"
        )
    if jax.process_count() > 1:
        raise ConfigError(
            f"this site has {jax.process_count()} processes, and a federation's site has one; use "
            "the devices of one process"
        )
    if config.early_stop:
        raise ConfigError(
            f"config.early_stop={config.early_stop}: the federation decides when it is over; leave "
            "it at 0"
        )
    every = config.outer.steps
    if config.eval_every % every:
        raise ConfigError(
            f"config.eval_every={config.eval_every} is no multiple of config.outer.steps={every}: "
            "between exchanges a site has weights of its own, not the federation's; set it to "
            f"{-(-config.eval_every // every) * every}"
        )
    if config.federate.mixed_codecs == LOSSLESS and config.cache.codec != LOSSLESS:
        log(
            f"config.cache.codec={config.cache.codec!r} is replaced by {LOSSLESS!r}, as "
            "config.federate.mixed_codecs says"
        )
        config = dataclasses.replace(
            config, cache=dataclasses.replace(config.cache, codec=LOSSLESS)
        )
    adapters = config.network.lora.rank or config.network.lora.checkpoint
    if adapters and config.federate.lora == "freeze_a":
        frozen = (*config.optim.frozen, "*/lora_a")
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, frozen=frozen))
    return config


def _check_versions(run: Trainer) -> None:
    """Refuse cache settings under which outer updates would make versions mean another thing."""
    cache, federate = run.config.cache, run.config.federate
    if not (uses_cache(cache) and run.training.learns):
        return
    if cache.policy == "adaptive":
        raise ConfigError(
            "config.cache.policy='adaptive' with a trained vision encoder in a federation: it "
            "measures drift by the learning rate of each update, and outer updates have none; use "
            "'lazy'"
        )
    bound = make_policy(cache).max_staleness
    if federate.cache_invalidation == "flush" and (bound + 1) * federate.rounds > 2**30:
        raise ConfigError(
            f"config.federate.cache_invalidation='flush' with cache.max_staleness={bound} for "
            f"{federate.rounds} rounds: versions would be too large; lower max_staleness"
        )


def _check_length(run: Trainer) -> None:
    """Refuse a run that would end before a federation that waits for it."""
    federate, every = run.config.federate, run.config.outer.steps
    waits = not federate.buffer or federate.buffer == federate.sites
    if waits and run.steps < federate.rounds * every:
        raise ConfigError(
            f"the run has {run.steps} steps, and config.federate.rounds={federate.rounds} of "
            f"config.outer.steps={every} need {federate.rounds * every}: set config.steps to that"
        )
