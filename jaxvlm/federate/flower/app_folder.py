"""The Flower app as a folder, and how it is started: ``flwr run`` reads both."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

from jaxvlm import __version__
from jaxvlm.checkpoint import run_record
from jaxvlm.config import ConfigError

CONNECTION = "federation"
"""Name of the SuperLink in Flower's settings."""
LOST_S = 600.0
"""Seconds, besides those that it waits at a site, after which a message is sent again; of a node
that was started again, it is at once."""
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Variables with which Flower's commands ask nobody outside."""
_START_S = 120.0
_FRAME = str.maketrans(dict.fromkeys("╭╮╰╯─│", " "))
"""What Flower draws around its errors."""
_APP = """\
# Made by `jaxvlm federate serve`. It holds no code: Flower's processes import jaxvlm, which has to
# be installed where they run, in the same version.
[project]
name = "jaxvlm-relay"
version = "{version}"
description = "Carries messages between the coordinator of a federation and its sites."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "jaxvlm"

[tool.flwr.app.components]
serverapp = "jaxvlm.federate.flower.server_app:app"
clientapp = "jaxvlm.federate.flower.client_app:app"

[tool.flwr.app.config]
socket = {socket}
wait-s = {wait_s}
lost-s = {lost_s}
"""
_CONNECTIONS = """\
[superlink]
default = "{name}"

[superlink.{name}]
address = {address}
root-certificates = {root}
"""


class FlowerApp:
    """The app in a folder.

    Args:
        folder: where it is written, with Flower's own files.
        socket: of the coordinator.
        wait_s: seconds that a message waits at a site for its next request.
        superlink: ``host:port`` of the SuperLink.
        root_certificates: file of the certificates by which the SuperLink's is checked.

    Raises:
        ConfigError: there is no such file or address, or flwr is not installed.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        socket: pathlib.Path,
        wait_s: float,
        superlink: str,
        root_certificates: pathlib.Path,
    ):
        if not root_certificates.is_file():
            raise ConfigError(f"--root_certificates={root_certificates}: there is no such file")
        host, _, port = superlink.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"--superlink={superlink}: give the host and port that sites reach, as in "
                "coordinator.example:9092"
            )
        self.command, self._last_line = flower_command("flwr"), ""
        self.app, self.home = folder / "app", folder / "home"
        text = _APP.format(
            version=__version__,
            socket=json.dumps(str(socket.absolute())),
            wait_s=float(wait_s),
            lost_s=LOST_S,
        )
        connections = _CONNECTIONS.format(
            name=CONNECTION,
            address=json.dumps(superlink),
            root=json.dumps(str(root_certificates.absolute())),
        )
        for path, content in (
            (self.app / "pyproject.toml", text),
            (self.home / "config.toml", connections),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            run_record.write_whole(path, content)

    def start(self) -> bool:
        """Ask the SuperLink to run the app; returns whether it will, and prints what it said."""
        command = [self.command, "run", str(self.app), CONNECTION]
        environment = {**os.environ, **OFFLINE, "FLWR_HOME": str(self.home)}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_START_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._say(f"flwr run failed: {error}")
            return False
        words = (done.stdout + done.stderr).translate(_FRAME).split()
        failed = "flwr run failed: " if done.returncode else "flwr run: "
        self._say(failed + " ".join(words))
        return not done.returncode

    def _say(self, text: str) -> None:
        """Print a line that differs from the one before; it is tried again and again."""
        if text == self._last_line:
            return
        self._last_line, more = text, ""
        if "unavailable" in text:
            more = " (it is tried again; is flower-superlink running, by the line above?)"
        print(text + more, flush=True)


def flower_command(name: str) -> str:
    """Path of one of Flower's commands, first next to this Python.

    Raises:
        ConfigError: it is not installed.
    """
    own = pathlib.Path(sys.executable).with_name(name)
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is not installed: pip install 'jaxvlm[federate]' brings Flower")
    return found
