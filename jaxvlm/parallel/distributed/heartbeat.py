"""Failure detection: notice quickly that a peer process died, and end this one with a clear line.

A process that waits in a collective for a dead peer hangs: neither gloo nor NCCL returns. JAX's
own heartbeat ends it only tens of seconds later, with a C++ stack trace. So each process holds one
TCP connection to process 0. The kernel closes it when its owner dies, for whatever reason, and TCP
keep-alive (also done by the kernel) covers machines and networks that vanish. Nothing here depends
on Python running at regular intervals, so a long compilation is never mistaken for a failure.

Messages: ``hello TOKEN ID``, ``bye`` (this process ends normally), ``failed ID`` (it ends with an
error), ``lost ID`` (it vanished), ``alive``. A process that misses its ``alive`` may be busy, so
that alone ends nothing; but where JAX or a collective gives up, it tells which peer is why.
Process 0 listens on the coordinator's address alone, on a port that the kernel chooses, and closes
a connection whose first line is not the run's token, which only the processes of the run can read
from JAX's key-value store.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxvlm.parallel import compat
from jaxvlm.parallel.distributed.exit_status import LOST

_KEY = "jaxvlm/liveness"
_MOST_STRANGERS = 64  # connections that have not said who they are
_GRACE_S = 5.0  # after a peer's error, time for this process to fail from the same cause
_BEAT_S = 5.0  # each process says ``alive`` this often
_SILENT_S = 20.0  # a peer without one for this long is named where JAX or a collective fails
_FAILED = "stopped with an error or by Ctrl-C"
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_USER_TIMEOUT_MS = 20_000  # unacknowledged bytes end the connection after this time


_handlers: list[Any] = []  # C holds their addresses


class PeerWatch:
    """Watches the peers of one process, on a daemon thread."""

    def __init__(self, process: int, count: int, timeout_s: float = 60.0):
        """Connect to the other processes; all of them must do so.

        Args:
            process: this process's index.
            count: processes in the run.
            timeout_s: seconds to wait for process 0's address.

        Raises:
            OSError: process 0 can't be reached.
        """
        self._process, self._count = process, count
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, socket.socket] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._ids: dict[socket.socket, int] = {}
        self._left: set[int] = set()  # peers that said bye
        self._heard_at: dict[int, float] = {}
        self._failed: set[int] = set()  # peers that end with an error
        self._leaving = False
        self._lock = threading.Lock()
        if process == 0:
            self._token = secrets.token_hex(16)
            server = _listen(compat.coordinator_host())
            self._selector.register(server, selectors.EVENT_READ, "server")
            compat.put(_KEY, f"{self._token} {server.getsockname()[1]}")
        else:
            self._token, port = compat.get(_KEY, timeout_s).split()
            address = (compat.coordinator_host(), int(port))
            self._add(0, socket.create_connection(address, timeout=timeout_s))
            self._send(0, f"hello {self._token} {process}")
        _catch_abort(self._on_abort)
        threading.Thread(target=self._watch, name="jaxvlm-liveness", daemon=True).start()

    def leave(self, failed: bool) -> None:
        """Tell the peers that this process is about to end; later calls do nothing."""
        with self._lock:
            if self._leaving:
                return
            self._leaving = True
        self._tell_all(f"failed {self._process}" if failed else "bye")

    def die_if_a_peer_failed(self) -> None:
        """End this process if a peer ends with an error or is silent; else do nothing."""
        for peer in sorted(self._failed):
            self._die(peer, _FAILED)
        late = time.monotonic() - _SILENT_S
        for peer in sorted(self._peers):
            if self._heard_at[peer] < late:
                if self._process == 0:
                    self._tell_all(f"lost {peer}", but=peer)
                self._die(peer, "does not answer (stopped, or its machine hangs)")

    def die_if_a_peer_broke(self, error: BaseException) -> None:
        """End this process if ``error`` is a broken collective's, and a peer's failure is why."""
        # Memory may be short here too; every other error of the runtime is a broken collective, and
        # so is Gloo's ValueError, where JAX gathers arrays outside of a compiled function.
        of_gloo = isinstance(error, ValueError) and "Gloo" in str(error)
        is_broken = of_gloo or isinstance(error, jax.errors.JaxRuntimeError)
        if is_broken and "RESOURCE_EXH" not in str(error):
            self.die_if_a_peer_failed()

    def _on_abort(self, _number: int) -> None:
        self.die_if_a_peer_failed()
        time.sleep(6)  # the watch may be about to print its line

    def _watch(self) -> None:
        beat = 0.0
        while True:
            if time.monotonic() >= beat:
                self._tell_all("alive")
                beat = time.monotonic() + _BEAT_S
            for key, _ in self._selector.select(_BEAT_S):
                if key.data == "server":
                    self._accept(key.fileobj)  # type: ignore[arg-type]  # a socket
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]  # a socket

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # whoever it was is gone already
        if len(self._ids) - len(self._peers) >= _MOST_STRANGERS:
            connection.close()
            return
        self._add(-1, connection)

    def _add(self, peer: int, connection: socket.socket) -> None:
        _keep_alive(connection)
        connection.settimeout(10)  # for sending; reading happens when data is available
        self._buffers[connection], self._ids[connection] = b"", peer
        if peer >= 0:
            self._peers[peer], self._heard_at[peer] = connection, time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, "peer")

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._closed(connection)
            return
        self._heard_at[self._ids[connection]] = time.monotonic()
        *lines, rest = (self._buffers[connection] + data).split(b"\n")
        self._buffers[connection] = rest[-4096:]
        for line in lines:
            if connection not in self._ids:
                return  # dropped for the line before
            self._heard(connection, line.decode(errors="replace").split())

    def _heard(self, connection: socket.socket, words: list[str]) -> None:
        peer = self._ids[connection]
        if words[:1] == ["hello"]:
            number = self._named(words)
            if number is None:
                self._drop(connection)
            else:
                self._ids[connection], self._peers[number] = number, connection
                self._heard_at[number] = time.monotonic()
        elif peer < 0:
            self._drop(connection)  # not a process of this run
        elif words == ["bye"]:
            self._left.add(peer)
        elif words[:1] in (["failed"], ["lost"]):
            self._end(int(words[1]), gone=words[0] == "lost")

    def _named(self, words: list[str]) -> int | None:
        """The process that a hello names, with the run's token; ``None``: it is a stranger's."""
        if self._process or len(words) != 3 or not words[2].isascii() or not words[2].isdigit():
            return None
        if not secrets.compare_digest(words[1].encode(), self._token.encode()):
            return None
        number = int(words[2]) if len(words[2]) < 9 else self._count
        return number if 0 < number < self._count and number not in self._peers else None

    def _closed(self, connection: socket.socket) -> None:
        peer = self._ids[connection]
        self._drop(connection)
        # JAX's exit barrier holds every process until all have reached it. A peer that sent bye
        # and vanishes while this process still works was killed while it waited there.
        expected = peer in self._failed or (peer in self._left and self._leaving)
        if peer >= 0 and not expected:
            self._end(peer, gone=True)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._peers.pop(self._ids.pop(connection), None)
        self._buffers.pop(connection)
        connection.close()

    def _end(self, peer: int, gone: bool) -> None:
        """Notify the other peers and end this process; after a grace period on a peer's error."""
        if self._process == 0:
            self._tell_all(f"{'lost' if gone else 'failed'} {peer}", but=peer)
        if not gone:
            self._failed.add(peer)
            timer = threading.Timer(_GRACE_S, self._die, [peer, _FAILED])
            timer.daemon = True  # so that it does not delay this process's own exit
            timer.start()
            return
        self._die(peer, "is gone (killed, crashed, or its machine or network is down)")

    def _die(self, peer: int, what: str) -> None:
        die(
            f"jaxvlm: process {peer} of {self._count} {what}, so process {self._process} stops "
            "too. Its own log says why; the same command resumes from the last checkpoint."
        )

    def _tell_all(self, line: str, but: int = -1) -> None:
        for peer in list(self._peers):
            if peer != but:
                self._send(peer, line)

    def _send(self, peer: int, line: str) -> None:
        try:
            self._peers[peer].sendall(line.encode() + b"\n")
        except (OSError, KeyError):
            return  # the peer is gone; the watch thread will notice


def die(message: str, code: int = LOST) -> None:
    """Print one line on stderr and end the process, without exit handlers that could block."""
    os.write(2, f"{message}\n".encode())
    os._exit(code)


def die_of_absence(
    seconds: float, place: tuple[str, int, int] | None, joined: threading.Event
) -> None:
    """Wait for all to join, and end this process with a line that says which one did not.

    Args:
        seconds: how long to wait.
        place: address of process 0, number of processes, this process's index; ``None``: unknown.
        joined: set once all have joined.
    """
    end = time.monotonic() + seconds
    others = [str(i) for i in range(1, place[1]) if i != place[2]] if place else []
    # Asked on the way too: at the end, process 0 may have given up on the same missing one.
    was_there = False
    while not joined.wait(min(_BEAT_S, seconds / 4)) and time.monotonic() < end:
        was_there = was_there or bool(place and place[2] and _answers(place[0]))
    if joined.is_set():
        return
    if place is None:
        who = "another host of the slice"
    elif not others or (place[2] and not was_there):
        who = f"process 0 at {place[0]}"
    else:
        who = f"process {others[0]}" if len(others) == 1 else f"one of processes {_list(others)}"
    die(
        f"jaxvlm: {who} has not joined within {seconds:g} seconds, so this process stops; check "
        "that it was started, that all agree on JAXVLM_COORDINATOR and JAXVLM_NUM_PROCESSES, and "
        "that no firewall or proxy stands between"
    )


def _list(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 9 else f"{names[0]} to {names[-1]}"


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError):
        return False
    return True


def flush_and_exit(code: int) -> None:
    """Flush stdout and stderr, and end the process at once."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    time.sleep(0.05)  # so that messages to the peers leave the socket
    os._exit(code)


def _catch_abort(handler: Callable[[int], None]) -> None:
    """Call ``handler`` in the thread that aborts, before the abort.

    JAX's C++ client calls abort() where it notices a death, and its callback for Python is broken
    (std::bad_cast in 0.10.2 and 0.12.0). Python's own signal handlers run in the main thread alone,
    which may wait in a collective for ever.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(handler))
    libc.signal(signal.SIGABRT, ctypes.cast(_handlers[-1], ctypes.c_void_p))


def _listen(host: str) -> socket.socket:
    """Listen on the coordinator's address, or on all where it is not one that others reach."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        # Debian's /etc/hosts gives a machine's own name a loopback address, which none else has.
        if _is_loopback(host) or not _is_loopback(str(address[0])):
            return socket.create_server(address[:2], family=family)
    except OSError:  # behind a translated address, or a name that others alone resolve
        pass
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _USER_TIMEOUT_MS)):
        if hasattr(socket, name):  # macOS has other names; its default is two hours
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
