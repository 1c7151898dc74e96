"""Unix sockets between a long-lived process and the short-lived one that carries its messages.

A connection carries one frame there and one back: a head of JSON and a body of bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import stat
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, json_text

_MAGIC = b"jaxvlm01"
_MAX_HEAD, _MAX_BODY = 2**16, 2**40
_STEP = 2**20
"""Bytes read at a time: what a stranger announces is not allocated before it comes."""
_MAX_PATH = 107
"""Bytes of a unix socket's path on Linux."""
_FRAME_S = 60.0
"""Seconds within which the other side has to send the next part of a frame."""


class SocketError(ConfigError):
    """A frame that could not be sent or read; the text says why."""


class CutOffError(SocketError, ConnectionError):
    """The other side has gone in the middle of a frame, or before it."""


class Frame(NamedTuple):
    """What a connection carries in one direction."""

    head: dict[str, Any]
    """JSON values."""
    body: bytes = b""


Answer = Callable[[Frame], Frame]


class Listener:
    """Answers frames on a unix socket, each connection in a thread of its own.

    One process listens on a path: a lock next to it is held until the process ends. Only the
    user's own processes can connect.

    Args:
        path: of the socket, in a folder that only the user can write to; it is made where missing.
        answer: is called in several threads at once. What it raises, other than
            :class:`ConfigError`, ends up in :attr:`failure`.
        log: takes lines for people.

    Raises:
        ConfigError: another process listens there, or the path can't be used.
    """

    def __init__(self, path: pathlib.Path, answer: Answer, log: Callable[[str], None] = print):
        self.path, self._answer, self._log = path, answer, log
        self.failure: BaseException | None = None
        """What ``answer`` raised that says nothing about the frame: the process should end."""
        _check_path(path)
        self._lock = _lock(path)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of a process that was killed: no other holds the lock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_FRAME_S)
            try:
                _send(connection, self._answered(connection))
            except OSError:
                return  # who asked has gone, and will ask again

    def _answered(self, connection: socket.socket) -> Frame:
        try:
            frame = _receive(connection)
            try:
                return self._answer(frame)
            except ConfigError:
                raise
            except BaseException as error:
                self.failure = error
                raise ConnectionAbortedError from None
        except ConfigError as error:
            self._log(f"{self.path}: refused: {error}")
            return Frame({"refused": str(error)})


def ask(path: pathlib.Path, frame: Frame, timeout_s: float) -> Frame:
    """Send a frame to the process that listens on a path, and return its answer.

    Args:
        path: of the socket.
        frame: to send.
        timeout_s: seconds to wait for each part of the answer.

    Raises:
        SocketError: it is refused, or the answer is none.
        OSError: nobody listens there, or has gone before it answered.
    """
    _check_owner(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_FRAME_S)
        connection.connect(str(path))
        _send(connection, frame)
        connection.settimeout(timeout_s)
        answer = _receive(connection)
    if "refused" in answer.head:
        raise SocketError(f"{path}: {answer.head['refused']}")
    return answer


def _send(connection: socket.socket, frame: Frame) -> None:
    head = json.dumps(frame.head).encode()
    sizes = len(head).to_bytes(8, "little") + len(frame.body).to_bytes(8, "little")
    connection.sendall(_MAGIC + sizes + head)
    if frame.body:
        connection.sendall(frame.body)


def _receive(connection: socket.socket) -> Frame:
    start = _read(connection, 24)
    head_size, body_size = (int.from_bytes(start[i : i + 8], "little") for i in (8, 16))
    if start[:8] != _MAGIC or head_size > _MAX_HEAD or body_size > _MAX_BODY:
        raise SocketError("bytes that are no frame of jaxvlm")
    try:
        head = json_text.parse(_read(connection, head_size))
    except ValueError as error:
        raise SocketError(f"a frame whose head can't be read: {error}") from None
    if not isinstance(head, dict):
        raise SocketError("a frame whose head is no object")
    return Frame(head, _read(connection, body_size))


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(_STEP, size - len(data)))
        if not part:
            raise CutOffError(f"a frame that was cut off after {len(data)} of {size} bytes")
        data += part
    return bytes(data)


def _check_path(path: pathlib.Path) -> None:
    """Make the socket's folder, and refuse one where other users could replace the socket."""
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ConfigError(
            f"--socket={path}: a socket's path has at most {_MAX_PATH} bytes; use a shorter one"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if stat.S_IMODE(path.parent.stat().st_mode) & 0o022:
        raise ConfigError(
            f"--socket={path}: others can write to its folder, and could take the socket's place; "
            f"name one in a folder of your own, or chmod go-w {path.parent}"
        )
    if path.exists() and not path.is_socket():
        raise ConfigError(f"--socket={path} is a file; name a path where none is")


def _check_owner(path: pathlib.Path) -> None:
    if path.stat().st_uid != os.getuid():
        raise SocketError(f"{path} belongs to another user")


def _lock(path: pathlib.Path) -> int:
    lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"--socket={path}: another process listens there; stop it, or name another socket"
        ) from None
    return lock
