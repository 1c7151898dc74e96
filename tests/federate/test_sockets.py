"""Unix sockets: frames come as they went, strangers are refused by name and change nothing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from jaxvlm.config import ConfigError
from jaxvlm.federate import mailbox, sockets
from jaxvlm.federate.client import Stopped
from jaxvlm.federate.mailbox import Mailbox, SiteSocket
from jaxvlm.federate.sockets import CutOffError, Frame, Listener, SocketError


@pytest.fixture
def folder():
    """A short path: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="jf-") as name:
        yield pathlib.Path(name)


def echo(frame):
    return Frame({"was": frame.head}, frame.body[::-1])


FIRST = Frame({"a": 1})


def ask(path, frame=FIRST, timeout_s=10.0):
    return sockets.ask(path, frame, timeout_s)


def raw(path, data):
    """Send bytes to a socket, and wait until it is closed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # closed with the rest unread
            while connection.recv(2**16):
                pass


@pytest.mark.parametrize("size", [0, 1, 3 * 2**20 + 5])
def test_a_frame_comes_as_it_went(folder, size):
    body = os.urandom(size)
    with Listener(folder / "s", echo):
        answer = ask(folder / "s", Frame({"id": "ü", "n": 1.5}, body))
    assert answer == Frame({"was": {"id": "ü", "n": 1.5}}, body[::-1])


def test_only_the_user_can_connect(folder):
    with Listener(folder / "new" / "s", echo) as listener:
        assert stat.S_IMODE(listener.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(listener.path.parent.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to its folder"):
        Listener(folder / "s", echo)


FRAME = sockets._MAGIC + (2).to_bytes(8, "little") + (0).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n________", "no frame of jaxvlm"),
        (sockets._MAGIC + b"\xff" * 16, "no frame of jaxvlm"),
        (b"short", "cut off after 5 of 24"),
        (FRAME + b"{", "cut off after 1 of 2"),
        (FRAME + b"[]", "no object"),
        (FRAME + b"{{", "can't be read"),
    ],
)
def test_a_strangers_bytes_are_refused_by_name(folder, data, why):
    said = []
    with Listener(folder / "s", echo, said.append) as listener:
        raw(listener.path, data)
        assert ask(listener.path).head == {"was": {"a": 1}}
        assert listener.failure is None
    assert len(said) == 1 and why in said[0] and str(listener.path) in said[0]


def test_a_strangers_bytes_reach_no_site(folder):
    """Neither bytes nor frames with an answer that nobody asked for."""
    said = []
    site = SiteSocket(folder / "s", log=said.append)
    with site as box:
        thread = threading.Thread(target=lambda: answers.append(box.call(b"question")))
        answers = []
        thread.start()
        raw(folder / "s", b"x" * 100)
        with pytest.raises(SocketError, match="no id and wait_s"):
            ask(folder / "s", Frame({"id": 3}))
        name = ask(folder / "s", Frame({"id": "another", "wait_s": 5}, b"wrong")).head["id"]
        assert not answers
        ask(folder / "s", Frame({"id": name, "wait_s": 0}, b"right"))
        thread.join()
    assert answers == [b"right"] and len(said) == 2


def test_a_site_that_nobody_asks_says_so_once(folder, monkeypatch):
    monkeypatch.setattr(mailbox, "_SILENT_S", 0.0)
    said, answers = [], []
    with SiteSocket(folder / "s", log=said.append) as box:
        thread = threading.Thread(target=lambda: answers.append(box.call(b"question")))
        thread.start()
        while not said:
            time.sleep(0.01)
        name = ask(folder / "s", Frame({"id": "", "wait_s": 5})).head["id"]
        ask(folder / "s", Frame({"id": name, "wait_s": 0}, b"right"))
        thread.join()
    assert answers == [b"right"] and str(folder / "s") in said[0]
    assert "flower-supernode" in said[0] and len(said) <= 2


def test_a_second_process_on_a_socket_is_refused_by_name(folder):
    code = f"""
import pathlib
from jaxvlm.config import ConfigError
from jaxvlm.federate.mailbox import SiteSocket
try:
    SiteSocket(pathlib.Path({str(folder / "s")!r}))
except ConfigError as error:
    print(error)
"""
    with SiteSocket(folder / "s"):
        with pytest.raises(ConfigError, match="another process listens there"):
            SiteSocket(folder / "s")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "another process listens there" in done.stdout, done.stderr
        assert ask(folder / "s", Frame({"id": "", "wait_s": 0})).head == {"id": ""}


def test_a_socket_of_a_killed_process_is_taken_over(folder):
    code = f"""
import os, pathlib
from jaxvlm.federate.mailbox import SiteSocket
SiteSocket(pathlib.Path({str(folder / "s")!r}))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code])
    assert (folder / "s").is_socket()
    with pytest.raises(OSError):
        ask(folder / "s")
    with Listener(folder / "s", echo):
        assert ask(folder / "s").head == {"was": {"a": 1}}


def test_a_path_that_can_not_be_used_is_refused(folder):
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        Listener(folder / ("x" * 120), echo)
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        Listener(folder / "file", echo)


def test_a_process_that_can_not_go_on_says_so_and_answers_nothing(folder):
    def broken(frame):
        raise RuntimeError("the disk is full")

    with Listener(folder / "s", broken) as listener:
        with pytest.raises(CutOffError):
            ask(listener.path)
        assert isinstance(listener.failure, RuntimeError)


def test_a_site_that_is_asked_to_stop_waits_no_longer():
    mailbox = Mailbox(lambda: True)
    with pytest.raises(Stopped):
        mailbox.call(b"question")
    assert mailbox.exchange(Frame({"id": "", "wait_s": 0})).head == {"id": ""}
