"""A stranger's bytes on the port of the peer watch change nothing."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from jaxvlm.parallel import compat
from jaxvlm.parallel.distributed import heartbeat

STRANGERS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a wrong token": b"hello 00000000000000000000000000000000 1\nbye\nlost 0\n",
    "not ASCII": "hello \u00fc \u0661\n".encode(),
    "no process": b"hello TOKEN 7\n",
    "no number": b"hello TOKEN one\n",
    "a large number": b"hello TOKEN " + b"9" * 5000 + b"\n",
    "process 0": b"hello TOKEN 0\n",
    "orders of a stranger": b"failed 1\nlost 1\nbye\n",
    "no line": b"x" * 100_000,
    "nothing": b"",
}


def process(number, ended=None):
    """A watch whose end is told, and never that of the process that tests run in."""
    made = heartbeat.PeerWatch(number, 2)
    made._die = lambda *_: ended and ended.set()  # also after the test, when connections close
    return made


@pytest.fixture
def watch(monkeypatch):
    """Process 0 of two, whether it ended, and how to connect."""
    stored, ended = {}, threading.Event()
    monkeypatch.setattr(compat, "put", stored.__setitem__)
    monkeypatch.setattr(compat, "get", lambda key, timeout_s: stored[key])
    monkeypatch.setattr(compat, "coordinator_host", lambda: "127.0.0.1")
    monkeypatch.setattr(heartbeat, "_catch_abort", lambda _: None)
    made = process(0, ended)
    token, port = stored[heartbeat._KEY].split()
    return made, ended, token, ("127.0.0.1", int(port))


@pytest.mark.parametrize("name", STRANGERS)
def test_a_strangers_bytes_change_nothing(watch, name):
    first, ended, token, address = watch
    with socket.create_connection(address) as stranger:
        stranger.sendall(STRANGERS[name].replace(b"TOKEN", token.encode()))
        time.sleep(0.1)
        other = process(1)
        deadline = time.monotonic() + 10
        while 1 not in first._peers and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 1 in first._peers and not ended.is_set()
        other._peers[0].shutdown(socket.SHUT_RDWR)  # as if the kernel closed a dead process's
        assert ended.wait(10), "the loss of the peer is no longer noticed"


def test_only_the_coordinators_address_listens(monkeypatch):
    """On all addresses only where the coordinator's is not one that others reach."""
    with heartbeat._listen("127.0.0.1") as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with heartbeat._listen("localhost") as server:
        assert server.getsockname()[0] in ("127.0.0.1", "::1")
    monkeypatch.setattr(socket, "getaddrinfo", loopback)  # as /etc/hosts has it on Debian
    with heartbeat._listen("the-machines-own-name") as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")
    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    with heartbeat._listen("behind.a.translated.address") as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def loopback(*_, **__):
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]


def no_such_name(*_, **__):
    raise socket.gaierror


def test_many_strangers_leave_room_for_a_peer(watch):
    first, ended, _, address = watch
    strangers = [socket.create_connection(address) for _ in range(100)]
    time.sleep(0.2)
    for stranger in strangers:
        stranger.close()
    time.sleep(0.2)
    process(1)
    deadline = time.monotonic() + 10
    while 1 not in first._peers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 1 in first._peers and not ended.is_set()
