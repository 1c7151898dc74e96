"""The app that Flower runs for the coordinator: it takes bytes between Flower and the coordinator.

It imports no JAX: the coordinator, ``jaxvlm federate serve``, is another process, which listens on
a unix socket and outlives this one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from jaxvlm.federate import sockets
from jaxvlm.federate.flower import records
from jaxvlm.federate.sockets import Frame

app = ServerApp()
_NO_ANSWER = Frame({"id": ""})
_STEP_S, _REPORT_S = 0.3, 2.0
_FAILED_S = 5.0
"""Seconds until a node whose app failed is sent another message."""
_ANSWER_S = 600.0
"""Seconds that the coordinator has for an answer: it may have to make a version first."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry messages until the coordinator says that it is over."""
    config = context.run_config
    path = pathlib.Path(str(config["socket"]))
    wait_s, lost_s = float(str(config["wait-s"])), float(str(config["lost-s"]))
    relay = Relay(grid, lambda frame: sockets.ask(path, frame, _ANSWER_S), wait_s, lost_s)
    threading.Thread(target=_report, args=(relay,), daemon=True).start()
    while relay.step():
        time.sleep(_STEP_S)


def _report(relay: Relay) -> None:
    """Tell the coordinator that the relay is there, also while it waits for Flower."""
    while relay.report():
        time.sleep(_REPORT_S)


@dataclasses.dataclass
class _Node:
    """What is under way with a node."""

    message: str = ""
    """Id of the message that it has not answered yet; "": none."""
    activated: str = ""
    """When the node was activated that the message was sent to."""
    sent: float = 0.0
    """When that was sent."""
    not_before: float = -math.inf
    """When the next one may be sent."""
    request: Frame | None = None
    """Of its site, for the coordinator."""
    answer: Frame = _NO_ANSWER
    """Of the coordinator, for its site; its id is "" where there is none."""


class Relay:
    """Carries requests of sites to the coordinator, and its answers back.

    A node has one message at a time, and an answer is sent until a message that carried it is
    answered, so that whatever is lost on the way comes again. A node's requests therefore reach the
    coordinator in the order in which its site made them.

    Args:
        grid: Flower's connection to the nodes, a ``HttpGrid``.
        ask: takes a frame to the coordinator and returns its answer; raises ``OSError`` while it
            is not there.
        wait_s: how long a message waits at a site for its next request.
        lost_s: seconds beyond ``wait_s`` after which a message counts as lost.
        clock: seconds.
    """

    def __init__(
        self,
        grid: Any,
        ask: Callable[[Frame], Frame],
        wait_s: float,
        lost_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._grid, self._ask, self._clock = grid, ask, clock
        self._wait_s, self._lost_s = wait_s, lost_s
        self._name = secrets.token_hex(8)
        self._is_known = self._is_stopped = False
        self._nodes: dict[int, _Node] = {}

    def step(self) -> bool:
        """Carry what is there; False when the coordinator wants no more."""
        if not self._is_known:
            return not self._is_stopped
        self._pull()
        try:
            for number, node in self._nodes.items():
                if node.request is not None:
                    self._forward(number, node)
        except OSError:
            pass  # the coordinator starts again; requests wait for it
        if not self._is_stopped:
            self._push()
        return not self._is_stopped

    def report(self) -> bool:
        """Tell the coordinator that the relay is there; False when it wants no more."""
        nodes = list(self._nodes.values())
        undelivered = sum(bool(x.answer.head["id"] or x.request) for x in nodes)
        head = {"relay": self._name, "hello": not self._is_known, "undelivered": undelivered}
        with contextlib.suppress(OSError):  # the coordinator starts again
            answer = self._ask(Frame(head))
            self._is_known = True
            self._is_stopped |= bool(answer.head.get("stop"))
        return not self._is_stopped

    def _pull(self) -> None:
        """Take in nodes' replies, and give up messages that have been away too long."""
        by_message = {x.message: x for x in self._nodes.values() if x.message}
        for reply in self._grid.pull_messages(list(by_message)) if by_message else ():
            node = by_message.get(reply.metadata.reply_to_message_id, _Node())
            if node.message != reply.metadata.reply_to_message_id:
                continue  # it has come twice
            node.message = ""
            try:
                frame = records.unpack(reply.content) if reply.has_content() else None
                why = reply.error.reason if frame is None else ""
            except ValueError as error:
                frame, why = None, str(error)
            if frame is None:
                print(f"node {reply.metadata.src_node_id}: {why}", flush=True)
                node.not_before = self._clock() + _FAILED_S
                continue
            node.answer = _NO_ANSWER
            if frame.head["id"]:
                node.request = frame
        late = self._clock() - self._wait_s - self._lost_s
        for number, node in self._nodes.items():
            if node.message and node.sent < late:
                print(f"node {number}: a message has no answer, and is sent again", flush=True)
                node.message = ""

    def _forward(self, number: int, node: _Node) -> None:
        """Take a node's request to the coordinator."""
        request = node.request
        assert request is not None
        head = {"relay": self._name, "node": str(number), "id": request.head["id"]}
        answer = self._ask(Frame(head, request.body))
        self._is_stopped |= bool(answer.head.get("stop"))
        if not (self._is_stopped or answer.head.get("later")):
            node.request, node.answer = None, answer

    def _push(self) -> None:
        """Send each node that has nothing to do the answer for its site, or a question for it."""
        messages: list[tuple[_Node, Message]] = []
        for info in self._grid.get_nodes():
            node = self._nodes.setdefault(info.node_id, _Node())
            if node.message and node.activated != info.last_activated_at:
                node.message = ""  # its process was killed and started again, and forgot it
            is_free = not node.message and node.request is None
            if is_free and self._clock() >= node.not_before:
                node.activated = info.last_activated_at
                messages.append((node, self._message(info.node_id, node.answer)))
        sent = self._grid.push_messages([x for _, x in messages]) if messages else ()
        for (node, _), name in zip(messages, sent):
            node.message, node.sent = name or "", self._clock()

    def _message(self, number: int, answer: Frame) -> Message:
        head: dict[str, Any] = {"id": answer.head["id"], "wait_s": self._wait_s}
        content = records.pack(Frame(head, answer.body))
        return Message(content, dst_node_id=number, message_type=MessageType.QUERY)
