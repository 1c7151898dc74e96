"""Flower's own commands, as they have to run next to ours: lines to copy."""

from __future__ import annotations

import pathlib
import shlex

from jaxvlm.federate.flower.app_folder import CONNECTION, OFFLINE, FlowerApp

_OFFLINE = " ".join(f"{name}={value}" for name, value in OFFLINE.items())


def of_coordinator(app: FlowerApp, superlink: str, root_certificates: pathlib.Path) -> list[str]:
    """What runs on the coordinator's machine: the SuperLink, and a line for each site's key.

    Args:
        app: whose folder holds Flower's files.
        superlink: ``host:port`` that sites reach.
        root_certificates: file of the certificates by which the SuperLink's is checked.
    """
    host, _, port = superlink.rpartition(":")
    home = f"FLWR_HOME={_quoted(app.home)} {_OFFLINE}"
    return [
        f"{home} flower-superlink --host {host} --port {port} --database "
        f"{_quoted(app.home / 'superlink.db')} --enable-supernode-auth "
        f"--ssl-ca-certfile {_quoted(root_certificates)} --ssl-certfile SERVER.crt "
        "--ssl-keyfile SERVER.key --disable-runtime-dependency-installation",
        f"{home} flwr supernode register SITE.pub {CONNECTION}",
    ]


def of_site(socket: pathlib.Path, home: pathlib.Path) -> list[str]:
    """What runs on a site's machine; until a killed SuperNode's heartbeat has expired, Flower ends
    the next one at once.

    Args:
        socket: of the site's process.
        home: folder of Flower's files.
    """
    config = shlex.quote(f'socket="{socket.absolute()}"')
    return [
        f"until FLWR_HOME={_quoted(home)} {_OFFLINE} flower-supernode --superlink HOST:PORT "
        f"--root-certificates CA.crt --auth-supernode-private-key SITE --node-config {config}; "
        "do sleep 10; done"
    ]


def _quoted(path: pathlib.Path) -> str:
    return shlex.quote(str(path.absolute()))
