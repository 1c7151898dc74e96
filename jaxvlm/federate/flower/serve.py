"""Serves a federation over Flower: the coordinator, which Flower's app asks on a unix socket."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Sequence

from jaxvlm.config import Config
from jaxvlm.federate.reception import Reception
from jaxvlm.federate.service import Service
from jaxvlm.federate.sockets import Listener

_TICK_S = 0.5
_SILENT_S = 10.0
"""Seconds without a word of Flower's app after which it is started."""
_AGAIN_S = 120.0
"""Seconds that it has from then on, before it is started again."""


def serve(
    config: Config,
    workdir: pathlib.Path,
    socket: pathlib.Path,
    linger_s: float,
    start: Callable[[], bool] = lambda: True,
    lines: Sequence[str] = (),
    log: Callable[[str], None] = print,
) -> Service:
    """Coordinate a federation until it is over.

    Args:
        config: its ``federate`` and ``outer`` are the federation's.
        workdir: the coordinator's folder; a federation that is in it goes on.
        socket: path of the unix socket on which Flower's app asks.
        linger_s: seconds without a request after which a federation that is over is closed.
        start: starts Flower's app, and returns whether it could; called while it is not heard.
        lines: said once the coordinator listens.
        log: takes lines for people.

    Raises:
        ConfigError: settings, a folder or a socket that can't be used.
    """
    service = Service(config, workdir, log)
    reception = Reception(service, linger_s, log=log)
    with Listener(socket, reception.answer, log) as listener:
        for line in (f"listening on {socket}", *lines):
            log(line)
        patient_until = time.monotonic()
        while not reception.is_done:
            service.tick()
            if listener.failure is not None:
                raise listener.failure
            if reception.silent_s > _SILENT_S and time.monotonic() >= patient_until:
                wait_s = _AGAIN_S if start() else _SILENT_S
                patient_until = time.monotonic() + wait_s
            time.sleep(_TICK_S)
    return service
