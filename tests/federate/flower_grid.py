"""Flower's grid in this process, which loses, delays, repeats and reorders what it carries."""

from __future__ import annotations

from collections import deque

from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


class FaultyGrid(Grid):
    """Carries a message to a node when it is pushed, and its reply when it is pulled.

    Args:
        nodes: node -> what answers a message there.
        faults: what happens to messages, one after another; nothing after the last.
    """

    def __init__(self, nodes, faults=()):
        self.nodes, self.faults = nodes, deque(faults)
        self.activated = dict.fromkeys(nodes, "0")
        self.delayed = []
        self.replies = []
        self.count = 0

    def get_node_ids(self):
        return list(self.nodes)

    def get_nodes(self):
        return [NodeInfo(node_id=x, last_activated_at=self.activated[x]) for x in self.nodes]

    def push_messages(self, messages):
        names = []
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = f"m{self.count}"
            names.append(f"m{self.count}")
            fault = self.faults.popleft() if self.faults else "none"
            if fault == "delay":
                self.delayed.append(message)
            elif fault == "node restarts":
                self.activated[message.metadata.dst_node_id] = names[-1]
            elif fault != "lose":
                self._carry(message, fault)
        return names

    def pull_messages(self, names):
        names = set(names)
        found = [x for x in self.replies if x.metadata.reply_to_message_id in names]
        self.replies = [x for x in self.replies if x not in found]
        while self.delayed:  # behind those that came later
            self._carry(self.delayed.pop(), "none")
        return found[::-1]

    # What Flower's grid has too, and the relay never calls.

    def set_run(self, run):
        raise NotImplementedError

    run = property(set_run)

    def create_message(self, *args, **more):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def _carry(self, message: Message, fault: str):
        for _ in range(2 if fault == "repeat" else 1):
            reply = self.nodes[message.metadata.dst_node_id](message)
            if fault != "lose reply":
                self.replies.append(reply)
