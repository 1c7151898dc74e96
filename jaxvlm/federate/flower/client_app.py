"""The app that Flower starts at a site for each message: it takes bytes to the site and back.

It imports no JAX: the site is another process, which listens on a unix socket.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from jaxvlm.federate import sockets
from jaxvlm.federate.flower import records
from jaxvlm.federate.sockets import Frame

app = ClientApp()
_RETRY_S = 0.5
_MARGIN_S = 30.0
"""Seconds that a site has for its answer beyond those for which it was asked to wait."""


@app.query()
def query(message: Message, context: Context) -> Message:
    """Give the site the answer to its last request, and return its next one."""
    path = pathlib.Path(str(context.node_config["socket"]))
    return reply(message, lambda frame, wait_s: sockets.ask(path, frame, wait_s))


def reply(message: Message, ask: Callable[[Frame, float], Frame]) -> Message:
    """Answer a message of the coordinator's app.

    Args:
        message: its frame has ``wait_s``, how long to wait for the site's next request.
        ask: takes a frame to the site, and returns its answer within some seconds; raises
            ``OSError`` while no site is there.
    """
    frame = records.unpack(message.content)
    wait_s = float(frame.head["wait_s"])
    end = time.monotonic() + wait_s
    answer = Frame({"id": ""})
    while True:
        try:
            answer = ask(frame, wait_s + _MARGIN_S)
            break
        except OSError:  # the site starts, or has gone and will be started again
            if time.monotonic() + _RETRY_S > end:
                break
            time.sleep(_RETRY_S)
            wait_s = max(0.0, end - time.monotonic())
            frame = Frame({**frame.head, "wait_s": wait_s}, frame.body)
    return Message(records.pack(answer), reply_to=message)
