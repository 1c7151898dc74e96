"""Sites without a model: what they make of a version is a function of their name and of it."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np

from jaxvlm.config import Config, FederateConfig, OuterConfig
from jaxvlm.federate import codec, messages
from jaxvlm.federate.client import Client
from jaxvlm.federate.handshake import Facts, comparable
from jaxvlm.federate.messages import Update, group_digests

FIRST = {
    "vision/w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6),
    "decoder/b": np.array([0.0, 1e-12, -3.0], np.float32),
    "head/scale": np.asarray(2.5, np.float32),
}


FEDAVG = OuterConfig()


def federation(sites=3, rounds=4, outer=FEDAVG, **federate):
    """Settings of a federation."""
    federate = FederateConfig(sites=sites, rounds=rounds, **federate)
    CONFIG[0] = Config(federate=federate, outer=outer)
    return CONFIG[0]


CONFIG = [None]
"""The federation's settings, which every site's recipe has."""


def facts(site, **changed):
    """What a site says of itself; ``changed`` replaces groups of facts, or fields."""
    config = CONFIG[0]
    own = comparable(config.federate, "config.federate") | comparable(config.outer, "config.outer")
    common = {
        "settings": {"config.model.decoder.depth": 2, **own},
        "parameters": {path: f"{x.dtype} {list(x.shape)}" for path, x in FIRST.items()},
        "frozen": {},
        "start": group_digests(FIRST),
        "tokenizer": {"files": "a"},
        "images": {"preparation": "64 squash"},
        "tokens": {"dtype": "float32", "codec": "exact", "token_order": "", "version": 1},
    }
    fields = {f.name for f in dataclasses.fields(Facts)}
    own = {name: x for name, x in changed.items() if name in fields}
    common |= {name: x for name, x in changed.items() if name not in fields}
    return Facts(**{"site": site, "common": common, "about": {"platform": "cpu"}, **own})


def trained(site, version, params):
    """What a site makes of a version, in float32."""
    draws = np.random.default_rng([zlib.crc32(site.encode()), version])
    return {
        path: np.asarray(x * np.float32(0.9) + draws.normal(0, 0.1, x.shape), np.float32)
        for path, x in sorted(params.items())
    }


class FakeSite:
    """A site whose memory can be lost at any moment: it joins again, and goes on from its disk.

    Args:
        name: of the site.
        call: the way to the coordinator.
        dtype: of its updates.
    """

    def __init__(self, name, call, dtype="float32"):
        self.name, self.call, self.dtype = name, call, dtype
        self.disk = None  # (version, params, number, error), as of the last exchange
        self.verdicts, self.sent = [], 0
        self.start()

    def start(self):
        """As after a kill: everything but the disk is lost."""
        self.client = Client(self.name, self.call, is_stopped=lambda: True)
        self.offer, self.has_joined = None, False

    def turn(self):
        """Take one step of the protocol: join, fetch, or train and send; True where it is over."""
        if not self.has_joined:
            self.welcome = self.client.join(facts(self.name), lambda: FIRST)
            self.has_joined = True
            return False
        if self.disk is None:
            offer = self.client.fetch(-1)
            self.disk = (offer.version, offer.params, self.welcome.number, None)
            return offer.is_last
        version, params, number, error = self.disk
        new = trained(self.name, version, params)
        parts, error = codec.encode(new, params, self.dtype, error)
        update = Update(self.name, number + 1, version, 100.0, 4, 0, 1.0, parts)
        self.verdicts.append(self.client.submit(update)[0])
        self.sent = update.number
        offer = self.client.fetch(version)
        if offer is None:  # the others' updates are not there yet; asked again, as a duplicate
            return False
        number = max(number + 1, offer.number)
        self.disk = (offer.version, offer.params or params, number, error or None)
        return offer.is_last


def run(service, sites, turns=2000):
    """Let sites take turns until the federation is over for all of them."""
    left = list(sites)
    for _ in range(turns):
        left = [site for site in left if not site.turn()]
        if not left:
            return
    raise AssertionError(f"the federation does not end: {[s.name for s in left]}")


def same(a, b):
    """Whether two versions' parameters have the same bits."""
    return messages.digest_of(a) == messages.digest_of(b)
