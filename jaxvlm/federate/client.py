"""A site's side of the three calls, over any transport that carries bytes there and back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.federate import messages
from jaxvlm.federate.handshake import Facts
from jaxvlm.federate.messages import Message, Update

Call = Callable[[bytes], bytes]
"""A transport: takes a message to the coordinator, and returns its answer; may raise
:class:`Stopped`."""


class Stopped(ConfigError):
    """The site was asked to stop while it waited for the coordinator's answer."""


class Welcome(NamedTuple):
    """What a site is told when it joins."""

    federation: str
    """Id of the federation."""
    number: int
    """The highest number of the site's updates that the coordinator has judged."""


class Offer(NamedTuple):
    """A version of the shared parameters."""

    version: int
    params: dict[str, np.ndarray] | None
    """f32 by path; ``None``: the site has them already."""
    digests: dict[str, str]
    """Digest of each submodel's parameters."""
    is_last: bool
    """Whether the federation is over."""
    number: int
    """The highest number of the site's updates that the coordinator has judged."""


class Client:
    """A site's connection to its coordinator.

    Args:
        site: its name.
        call: the transport.
        is_stopped: whether to stop waiting; asked while the next version is not there.
        sleep: waits some seconds.
    """

    def __init__(
        self,
        site: str,
        call: Call,
        is_stopped: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.site, self._call = site, call
        self._is_stopped, self._sleep = is_stopped, sleep
        self._session = ""

    def join(self, facts: Facts, weights: Callable[[], Mapping[str, np.ndarray]]) -> Welcome:
        """Join the federation.

        Args:
            facts: of the site.
            weights: returns its first parameters, which become version 0 where it is the first.

        Raises:
            ConfigError: it is refused; the message says why.
        """
        head = {"site": self.site, "facts": dataclasses.asdict(facts)}
        answer = self._answer(messages.pack("join", head), "welcome")
        if answer.head["needs_weights"]:
            answer = self._answer(messages.pack("join", head, weights()), "welcome")
        self._session = answer.head["session"]
        return Welcome(answer.head["federation"], answer.head["number"])

    def fetch(self, have: int) -> Offer | None:
        """Wait for the version that the site trains from next.

        Args:
            have: the version whose parameters the site has; -1: none.

        Returns:
            The version; ``None`` if the wait was stopped.
        """
        head = {"site": self.site, "session": self._session, "have": have}
        while True:
            answer = self._answer(messages.pack("fetch", head), "weights", "wait", "done")
            if answer.kind != "wait":
                version, is_last = answer.head["version"], answer.kind == "done"
                params = answer.arrays if version != have else None
                number = answer.head["number"]
                return Offer(version, params, answer.head["digests"], is_last, number)
            if self._is_stopped():
                return None
            self._sleep(answer.head["poll_s"])

    def submit(self, update: Update) -> tuple[str, str]:
        """Send an update.

        Returns:
            The verdict (accepted, late, bad or duplicate), and why.
        """
        answer = self._answer(messages.pack_update(update, self._session), "verdict")
        return answer.head["verdict"], answer.head["why"]

    def _answer(self, data: bytes, *kinds: str) -> Message:
        answer = messages.unpack(self._call(data))
        if answer.kind == "refused":
            raise ConfigError(f"the coordinator refused: {answer.head['why']}")
        if answer.kind not in kinds:
            raise ConfigError(
                f"the coordinator answered {answer.kind!r} where {' or '.join(kinds)} is expected; "
                "install the same version of jaxvlm at all sites and at the coordinator"
            )
        return answer
