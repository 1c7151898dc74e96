"""The coordinator's end of a transport that pushes: answers what a relay brings from the sites."""

from __future__ import annotations

import json
import pathlib
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from jaxvlm.checkpoint import run_record
from jaxvlm.config import ConfigError, json_text
from jaxvlm.federate import messages
from jaxvlm.federate.service import Service
from jaxvlm.federate.sockets import Frame, SocketError

HOLD_S = 60.0
"""Seconds for which a site's question for the next version waits for it at most; then the site is
told that it is not there yet, and can see whether it was asked to stop."""
_SMALL = 2**16
"""Bytes of an answer that is kept for a request that comes twice."""


def _read_nodes(path: pathlib.Path) -> dict[str, str]:
    try:
        return dict(json_text.read(path)) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; restore it from a copy") from None


class _Waiting(NamedTuple):
    """A site's question for the next version, which is not there yet."""

    name: str
    """Its id."""
    since: float
    there: int | None = None
    """The version that is there; ``None``: it was not asked for yet."""


class Reception:
    """Answers a relay's frames.

    Each relay has a name of its own, and the one that came last counts: an older one is told to
    stop. So no two of them bring the requests of a site, in an order that nobody knows.

    Args:
        service: the coordinator.
        linger_s: seconds without a request after which a federation that is over is closed.
        clock: seconds.
        log: takes lines for people.

    Raises:
        ConfigError: the file that says which node is which site's is damaged.
    """

    def __init__(
        self,
        service: Service,
        linger_s: float,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[[str], None] = print,
    ):
        self._service, self._linger_s, self._clock, self._log = service, linger_s, clock, log
        self._lock = threading.Lock()
        self._relay = ""
        self._heard = self._quiet_since = clock()
        self._busy = 0
        self._answered: dict[str, tuple[str, bytes]] = {}
        """Node -> id of its last request, and the answer."""
        self._waiting: dict[str, _Waiting] = {}
        """Node -> its question for the next version."""
        self._is_done = False
        self._nodes_file = service.folder.path / "nodes.json"
        self._nodes = _read_nodes(self._nodes_file)
        """Site -> its node, which no other may speak for."""

    @property
    def silent_s(self) -> float:
        """Seconds since a relay was heard; 0 while it waits for an answer."""
        return 0.0 if self._busy else self._clock() - self._heard

    @property
    def is_done(self) -> bool:
        """Whether the federation is over, all have their answers, and a relay knows that."""
        return self._is_done

    def answer(self, frame: Frame) -> Frame:
        """Answer a frame of a relay.

        Args:
            frame: ``relay``, its name; ``hello`` where it is its first. With ``node`` and ``id``
                it brings a request, else ``undelivered`` is the number of answers that it still
                has to deliver.

        Returns:
            ``stop``: whether the relay ends. Of a request: ``later``, whether to ask again in a
            moment; else the answer.

        Raises:
            SocketError: the frame has no such values.
        """
        head = frame.head
        if not isinstance(head.get("relay"), str) or not head["relay"]:
            raise SocketError("a frame that is of no relay")
        with self._lock:
            if head.get("hello") or not self._relay:
                self._relay, self._quiet_since = head["relay"], self._clock()
            if head["relay"] != self._relay:
                return Frame({"stop": True})
            self._busy += 1
        try:
            return self._request(frame) if "node" in head else self._report(head)
        finally:
            with self._lock:
                self._busy -= 1
                self._heard = self._clock()

    def _report(self, head: dict[str, Any]) -> Frame:
        undelivered = head.get("undelivered")
        if not isinstance(undelivered, int):
            raise SocketError("a frame of a relay that brings nothing")
        with self._lock:
            if undelivered or not self._service.is_over:
                self._quiet_since = self._clock()
            self._is_done = self._clock() - self._quiet_since >= self._linger_s
            return Frame({"stop": self._is_done})

    def _request(self, frame: Frame) -> Frame:
        node, name = frame.head["node"], frame.head.get("id")
        if not isinstance(node, str) or not isinstance(name, str) or not name:
            raise SocketError("a request without the id of its node and its own")
        self._quiet_since = self._clock()
        before, answer = self._answered.get(node, ("", b""))
        if before == name:
            return Frame({"id": name}, answer)
        waiting = self._waiting.pop(node, None)
        if waiting is None or waiting.name != name:
            waiting = _Waiting(name, self._clock())
        is_held = self._clock() - waiting.since < HOLD_S
        if is_held and waiting.there == self._version():
            self._waiting[node] = waiting
            return Frame({"later": True})
        answer = self._answer_of(node, frame.body)
        if len(answer) < _SMALL:
            message = messages.unpack(answer)
            if message.kind == "wait" and is_held:
                self._waiting[node] = waiting._replace(there=message.head["version"])
                return Frame({"later": True})
            self._answered[node] = (name, answer)
        return Frame({"id": name}, answer)

    def _answer_of(self, node: str, data: bytes) -> bytes:
        """Answer a request, of the node of its site alone; its first one says which that is."""
        site = messages.site_of(data)
        if self._nodes.get(site, node) != node or any(
            name != site and other == node for name, other in self._nodes.items()
        ):
            mine = next((name for name, other in self._nodes.items() if other == node), "none yet")
            why = f"site {site} is not this node's: node {node} has spoken for {mine}"
            self._log(f"refused: {why}; {self._nodes_file} has the nodes of all sites")
            return messages.pack("refused", {"why": why})
        answer = self._service.handle(data)
        if site in self._joined() and site not in self._nodes:
            self._nodes[site] = node
            run_record.write_whole(self._nodes_file, json.dumps(self._nodes, indent=1))
        return answer

    def _joined(self) -> Collection[str]:
        return () if self._service.state is None else self._service.state.sites

    def _version(self) -> int:
        return -1 if self._service.state is None else self._service.state.version
