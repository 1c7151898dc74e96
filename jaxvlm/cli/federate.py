"""The command ``jaxvlm federate``: simulate a federation, or show the state of one."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, define_recipe

SUMMARY = "Train one model at several sites, each on data of its own."
USAGE = "simulate --config=FILE[:arg] --workdir=DIR [...] | status DIR [--plot=FILE]"
_FLAGS = {
    "workdir": "simulate: the folder of the federation; one that is in it goes on.",
    "alpha": "simulate: the concentration of the Dirichlet distribution by which data.train is "
    "divided among the sites: near 0 each label is at one site; infinity, the default, divides all "
    "alike.",
    "site_data": "simulate: the sites' files of training data, separated by commas, instead of "
    "dividing data.train.",
    "step_seconds": "simulate: the virtual seconds of a train step at each site, separated by "
    "commas, such as 4,1,1 for a first site that is four times slower; 1 where there are fewer.",
    "plot": "status: the file (.png, .svg, .pdf) in which loss, lag and bytes by version are "
    "drawn.",
}
_OF = {"simulate": ("config", "workdir", "alpha", "site_data", "step_seconds"), "status": ("plot",)}


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``federate``."""
    define_recipe(
        values,
        argv,
        "simulate: the federation's recipe, whose config.federate and config.outer say how it "
        "trains. Override any setting with --config.a.b=value.",
    )
    define_flags(values, _FLAGS, alpha=math.inf, site_data=[], step_seconds=[])


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Simulate a federation, or show the state of one."""
    from jaxvlm.config import ConfigError

    verbs = {"simulate": _simulate, "status": _status}
    if not args or args[0] not in verbs:
        raise ConfigError(f"usage: jaxvlm federate {USAGE}")
    every = {flag for names in _OF.values() for flag in names}
    for name in sorted(every - set(_OF[args[0]])):
        if values[name].present:
            raise ConfigError(f"federate {args[0]} takes no --{name}")
    return verbs[args[0]](values, args[1:])


def _simulate(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    from jaxvlm.cli.common import flags_only
    from jaxvlm.config import ConfigError
    from jaxvlm.sites.simulate import Simulation

    flags_only("federate simulate", args)
    if values.config is None or not values.workdir:
        raise ConfigError("federate simulate needs --config=FILE and --workdir=DIR")
    if not values.alpha > 0:
        raise ConfigError(f"--alpha={values.alpha:g}: must be above 0")
    if values.site_data and values["alpha"].present:
        raise ConfigError("--alpha divides data.train, and --site_data gives each site's; use one")
    simulation = Simulation(
        values.config,
        pathlib.Path(values.workdir),
        values.alpha,
        values.site_data,
        [_positive(text) for text in values.step_seconds],
    )
    return simulation.run()


def _status(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    from jaxvlm.config import ConfigError
    from jaxvlm.federate import status

    if len(args) != 1:
        raise ConfigError("usage: jaxvlm federate status DIR [--plot=FILE]")
    found = status.read_status(args[0])
    print(status.as_text(found))
    if values.plot:
        status.plot(found, values.plot)
        print(f"drawn in {values.plot}")
    return found


def _positive(text: str) -> float:
    from jaxvlm.config import ConfigError

    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"--step_seconds has {text!r}: give numbers above 0, such as 4,1,1")
    return value
