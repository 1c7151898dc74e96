"""A site's end of a transport that pushes: its request waits here until somebody asks for it.

Flower starts a short process at a site for each message of the coordinator. Such a process brings
the answer to the site's last request, and takes its next one along.
"""

from __future__ import annotations

import pathlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxvlm.federate.client import Stopped
from jaxvlm.federate.sockets import Frame, Listener, SocketError

MAX_WAIT_S = 600.0
"""The longest time for which a frame may wait for a request."""
_SILENT_S = 30.0
"""Seconds after which a site says that nobody asks for its requests."""


class Mailbox:
    """Holds a site's one request, and gives its answer to the site.

    Args:
        is_stopped: whether the site was asked to stop; asked while it waits for an answer.
        silent: called once nobody has asked for a request for 30 seconds, and again after the next
            that was asked for.
    """

    def __init__(
        self,
        is_stopped: Callable[[], bool] = lambda: False,
        silent: Callable[[], None] = lambda: None,
    ):
        self._is_stopped, self._silent = is_stopped, silent
        self._heard, self._has_said = time.monotonic(), False
        self._is_taken = False
        self._changed = threading.Condition()
        self._process, self._count = secrets.token_hex(8), 0
        self._request: tuple[str, bytes] | None = None
        self._answer: bytes | None = None

    def call(self, request: bytes) -> bytes:
        """Wait until the request was fetched and answered; a :data:`~jaxvlm.federate.client.Call`.

        Raises:
            Stopped: the site was asked to stop before.
        """
        with self._changed:
            self._count += 1
            self._request = (f"{self._process}-{self._count}", request)
            self._answer = None
            self._heard, self._is_taken = time.monotonic(), False
            self._changed.notify_all()
            while self._answer is None:
                if self._is_stopped():
                    self._request = None
                    raise Stopped("stopped while it waited for the coordinator's answer")
                is_silent = time.monotonic() - self._heard > _SILENT_S
                if is_silent and not self._is_taken and not self._has_said:
                    self._has_said = True
                    self._silent()
                self._changed.wait(1.0)
            return self._answer

    def exchange(self, frame: Frame) -> Frame:
        """Take the answer to the request, and wait for the next request.

        Args:
            frame: ``id`` of the request that its body answers, "" where it answers none; an answer
                to any other request than the one that waits is dropped. ``wait_s``: how long to
                wait for the next request.

        Returns:
            The request that waits with its ``id``, which is "" where there is none.

        Raises:
            SocketError: the frame has no such values.
        """
        name, wait_s = frame.head.get("id"), frame.head.get("wait_s")
        if not isinstance(name, str) or not isinstance(wait_s, (int, float)):
            raise SocketError("a frame that brings no answer to a site: it has no id and wait_s")
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise SocketError(f"a frame that would wait for {wait_s:g} s")
        with self._changed:
            self._heard, self._has_said = time.monotonic(), False
            if self._request is not None and name == self._request[0]:
                self._request, self._answer = None, frame.body
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._request is not None, wait_s)
            self._heard, self._is_taken = time.monotonic(), self._request is not None
            name, request = self._request or ("", b"")
            return Frame({"id": name}, request)


class SiteSocket:
    """A mailbox on a unix socket, as a context.

    Args:
        path: of the socket.
        is_stopped: as of :class:`Mailbox`.
        log: takes lines for people.

    Raises:
        ConfigError: another process listens there, or the path can't be used.
    """

    def __init__(
        self,
        path: pathlib.Path,
        is_stopped: Callable[[], bool] = lambda: False,
        log: Callable[[str], None] = print,
    ):
        self.mailbox = Mailbox(
            is_stopped,
            lambda: log(
                f"nobody asks on {path} for what this site has to say: start flower-supernode by "
                "the line above with this socket, and `jaxvlm federate serve` with its SuperLink"
            ),
        )
        self._listener = Listener(path, self.mailbox.exchange, log)

    def __enter__(self) -> Mailbox:
        return self.mailbox

    def __exit__(self, *_: Any) -> None:
        self._listener.close()
