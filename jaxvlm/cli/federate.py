"""The command ``jaxvlm federate``: simulate a federation, run one, or show the state of one."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, define_recipe

SUMMARY = "Train one model at several sites, each on data of its own."
USAGE = (
    "simulate --config=FILE[:arg] --workdir=DIR [...] | "
    "serve --config=FILE[:arg] --workdir=DIR --superlink=HOST:PORT --root_certificates=FILE [...] "
    "| site --config=FILE[:arg] --workdir=DIR --site=NAME [...] | status DIR [--plot=FILE]"
)
_FLAGS = {
    "workdir": "simulate, serve, site: the folder of the federation, the coordinator or the site; "
    "what is in it goes on.",
    "alpha": "simulate: the concentration of the Dirichlet distribution by which data.train is "
    "divided among the sites: near 0 each label is at one site; infinity, the default, divides all "
    "alike.",
    "site_data": "simulate: the sites' files of training data, separated by commas, instead of "
    "dividing data.train.",
    "step_seconds": "simulate: the virtual seconds of a train step at each site, separated by "
    "commas, such as 4,1,1 for a first site that is four times slower; 1 where there are fewer.",
    "site": "site: the site's name, which no other site of the federation has.",
    "socket": "serve, site: the unix socket on which Flower's app finds this process; by default "
    "WORKDIR.flower/socket next to --workdir.",
    "superlink": "serve: the host:port of Flower's SuperLink.",
    "root_certificates": "serve: the file of the certificates by which the SuperLink's is checked.",
    "wait_s": "serve: the seconds for which a message of Flower waits at a site for what the site "
    "wants next. Each message starts a process there.",
    "linger_s": "serve: the seconds without a request of a site after which a federation that is "
    "over is closed.",
    "plot": "status: the file (.png, .svg, .pdf) in which loss, lag and bytes by version are "
    "drawn.",
}
VERBS = {
    "simulate": ("config", "workdir", "alpha", "site_data", "step_seconds"),
    "serve": (
        *("config", "workdir", "socket", "superlink", "root_certificates", "wait_s", "linger_s"),
    ),
    "site": ("config", "workdir", "site", "socket"),
    "status": ("plot",),
}
"""The flags that each verb reads."""

LOCAL = ("workdir",)
"""Flags that name what can't be in an object store."""


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``federate``."""
    define_recipe(
        values,
        argv,
        "simulate, serve, site: the federation's recipe, whose config.federate and config.outer "
        "say how it trains; of a site, with the site's own data. Override any setting with "
        "--config.a.b=value.",
    )
    seconds = {"wait_s": 60.0, "linger_s": 60.0}
    define_flags(values, _FLAGS, alpha=math.inf, site_data=[], step_seconds=[], **seconds)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Simulate a federation, run its coordinator or a site, or show its state."""
    from jaxvlm.config import ConfigError

    verbs = {"simulate": _simulate, "serve": _serve, "site": _site, "status": _status}
    if not args or args[0] not in verbs:
        raise ConfigError(f"usage: jaxvlm federate {USAGE}")
    every = {flag for names in VERBS.values() for flag in names}
    for name in sorted(every - set(VERBS[args[0]])):
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


def _serve(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    from jaxvlm.cli.common import flags_only
    from jaxvlm.config import ConfigError, from_config_dict

    flags_only("federate serve", args)
    _needs(values, "serve", "config", "workdir", "superlink", "root_certificates")
    from jaxvlm.federate import status
    from jaxvlm.federate.flower import commands
    from jaxvlm.federate.flower.app_folder import FlowerApp
    from jaxvlm.federate.flower.serve import serve
    from jaxvlm.federate.mailbox import MAX_WAIT_S

    for name, value in (("wait_s", values.wait_s), ("linger_s", values.linger_s)):
        if not 0 <= value <= MAX_WAIT_S:
            raise ConfigError(f"--{name}={value:g}: give seconds from 0 to {MAX_WAIT_S:g}")
    workdir, root = pathlib.Path(values.workdir), pathlib.Path(values.root_certificates)
    config, socket = from_config_dict(values.config), _socket(values)
    app = FlowerApp(_flower(values), socket, values.wait_s, values.superlink, root)
    lines = ["next to this, on this machine, and the second line for each site's key:"]
    lines += [f"  {line}" for line in commands.of_coordinator(app, values.superlink, root)]
    serve(config, workdir, socket, values.linger_s, app.start, lines)
    return status.read_status(str(workdir))


def _site(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    from jaxvlm.cli.common import flags_only

    flags_only("federate site", args)
    _needs(values, "site", "config", "workdir", "site")
    from jaxvlm.federate.client import Client
    from jaxvlm.federate.flower import commands
    from jaxvlm.federate.mailbox import SiteSocket
    from jaxvlm.parallel.distributed import processes
    from jaxvlm.sites.site import make_site

    workdir, socket = pathlib.Path(values.workdir), _socket(values)
    processes.initialize()

    def is_stopped() -> bool:
        return processes.should_stop(0)

    with SiteSocket(socket, is_stopped) as mailbox:
        site = make_site(values.config, workdir, Client(values.site, mailbox.call, is_stopped))
        print("next to this, on this machine:")
        print("\n".join(f"  {line}" for line in commands.of_site(socket, _flower(values))))
        return site.fit()


def _needs(values: flags.FlagValues, verb: str, *names: str) -> None:
    from jaxvlm.config import ConfigError

    if missing := [name for name in names if values[name].value in (None, "")]:
        raise ConfigError(f"federate {verb} needs --{', --'.join(missing)}")


def _socket(values: flags.FlagValues) -> pathlib.Path:
    return pathlib.Path(values.socket) if values.socket else _flower(values) / "socket"


def _flower(values: flags.FlagValues) -> pathlib.Path:
    """The folder of the socket and of Flower's files; a run's workdir holds neither."""
    workdir = pathlib.Path(values.workdir)
    return workdir.with_name(workdir.name + ".flower")


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
