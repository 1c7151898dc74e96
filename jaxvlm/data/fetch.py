"""Fetch images and videos that records name by URL, and keep them: ``jaxvlm data fetch``.

A run never asks the network for what it trains on: pages change, and servers fail. Files are
fetched once, from hosts that the user names, whole or not at all, and ``data.fetched`` then names
their folder.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import io
import ipaddress
import os
import pathlib
import re
import shutil
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from PIL import Image

import jaxvlm
from jaxvlm.data.sources import fetched

PAUSES = (1.0, 5.0, 20.0)
"""Seconds before a request is made again that was refused for a while, or cut short."""
_LONGEST_PAUSE = 60.0
"""What a server may ask for, at most, by Retry-After."""
_DEADLINE = 900.0
"""Seconds that one file may take, however slowly it comes."""
_BLOCK = 2**18


class Limits(NamedTuple):
    """What may be asked for."""

    hosts: tuple[str, ...]
    """Names of hosts; ``*.NAME`` are those below one, ``*`` all that have public addresses."""
    max_bytes: int
    """Of a file."""
    timeout: float = 30.0
    """Seconds without an answer."""
    workers: int = 16
    """Requests at a time."""


class Refused(Exception):
    """A file that is not fetched; the text is the reason, the same for all with one fault."""


class Fetched(NamedTuple):
    """What became of some URLs."""

    new: int
    """Files that were fetched."""
    kept: int
    """Files that were there."""
    failed: Mapping[str, str]
    """URL -> reason."""


def hosts_of(urls: Iterable[str]) -> dict[str, int]:
    """Count URLs by host, most frequent first."""
    counts: dict[str, int] = {}
    for url in urls:
        host = _host(url) or "(no host)"
        counts[host] = counts.get(host, 0) + 1
    return dict(sorted(counts.items(), key=lambda x: (-x[1], x[0])))


def fetch(
    urls: Mapping[str, str],
    folder: str | os.PathLike[str],
    limits: Limits,
    said: Callable[[int, int], None] = lambda done, failed: None,
) -> Fetched:
    """Fetch files that a folder does not have yet.

    Args:
        urls: URL -> ``an image`` or ``a video``.
        folder: where they are kept; created if it does not exist. Several processes may share it.
        limits: what may be asked for.
        said: called after each file with the numbers of those done and failed.

    Raises:
        OSError: the disk refuses.
    """
    root = pathlib.Path(folder).expanduser()
    wanted = [url for url in urls if not fetched.path_of(root, url).is_file()]
    failed: dict[str, str] = {}
    with _partial_folder(root) as partial:
        asked = _Asked(limits, partial)

        def get(url: str) -> str:
            try:
                asked.get(url, urls[url], fetched.path_of(root, url))
            except Refused as error:
                return str(error)
            return ""

        # Few are handed over at a time, so that an interruption is not waited for.
        with concurrent.futures.ThreadPoolExecutor(limits.workers) as pool:
            for done, (url, reason) in enumerate(_in_order(pool, get, wanted), 1):
                if reason:
                    failed[url] = reason
                said(done, len(failed))
    return Fetched(len(wanted) - len(failed), len(urls) - len(wanted), failed)


def _in_order(
    pool: concurrent.futures.Executor, get: Callable[[str], str], urls: list[str]
) -> Iterator[tuple[str, str]]:
    waiting: dict[concurrent.futures.Future[str], str] = {}
    left = iter(urls)
    while True:
        for url in left:
            waiting[pool.submit(get, url)] = url
            if len(waiting) >= 64:
                break
        if not waiting:
            return
        done, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            yield waiting.pop(future), future.result()


class _Asked:
    """Asks servers for files.

    Args:
        limits: what may be asked for.
        partial: folder of files that are not whole yet.
    """

    def __init__(self, limits: Limits, partial: pathlib.Path):
        self._limits, self._partial = limits, partial
        self._public: dict[str, bool] = {}
        self._opener = urllib.request.build_opener(_Redirects(self.check))

    def check(self, url: str) -> None:
        """Raise Refused for what is not to be asked for."""
        host = _host(url)
        scheme = url.partition(":")[0].lower()
        if scheme not in ("http", "https") or not host:
            raise Refused("not an http:// or https:// URL")
        named = [pattern for pattern in self._limits.hosts if _matches(host, pattern)]
        if not named:
            raise Refused(f"{host} is not in --hosts")
        if host not in named and not self._is_public(host):
            raise Refused(f"{host} has no public address; --hosts has to name it as it is")

    def _is_public(self, host: str) -> bool:
        if urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
            return True  # a proxy asks, and knows addresses that this machine does not
        if host not in self._public:
            try:
                found = socket.getaddrinfo(host, None)
            except OSError:
                raise Refused("a host that is not known") from None
            addresses = [ipaddress.ip_address(str(x[4][0]).partition("%")[0]) for x in found]
            self._public[host] = all(address.is_global for address in addresses)
        return self._public[host]

    def get(self, url: str, article: str, path: pathlib.Path) -> None:
        """Keep what a URL gives; raises Refused."""
        for pause in (*PAUSES, None):
            try:
                self.check(url)
                data = self._read(url)
                break
            except _Busy as error:
                if pause is None:
                    raise Refused(str(error)) from None
                time.sleep(min(max(pause, error.asked), _LONGEST_PAUSE))
        if article == "an image":
            _check_image(data)
        path.parent.mkdir(exist_ok=True)
        own = self._partial / f"{path.name}-{threading.get_ident()}"
        with open(own, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(own, path)

    def _read(self, url: str) -> bytes:
        most = self._limits.max_bytes
        request = urllib.request.Request(_quoted(url), headers=_HEADERS)
        end = time.monotonic() + _DEADLINE
        try:
            with self._opener.open(request, timeout=self._limits.timeout) as answer:
                size = answer.headers.get("Content-Length", "")
                length = int(size) if size.isdigit() else None
                if (length or 0) > most:
                    raise Refused(_TOO_LARGE)
                if answer.headers.get_content_type() in ("text/html", "application/xhtml+xml"):
                    raise Refused("a web page, and not a file")
                blocks, count = [], 0
                while block := answer.read(_BLOCK):
                    blocks.append(block)
                    count += len(block)
                    if count > most:
                        raise Refused(_TOO_LARGE)
                    if time.monotonic() > end:
                        raise _Busy(f"not there after {_DEADLINE:.0f} s")
                if length is not None and count != length:
                    raise _Busy("an answer that was cut short")
                return b"".join(blocks)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (408, 425, 429) or error.code >= 500:
                    asked = str(error.headers.get("Retry-After") or "")
                    raise _Busy(
                        f"HTTP {error.code}", int(asked) if asked.isdigit() else 0
                    ) from None
                raise Refused(f"HTTP {error.code}") from None
        except urllib.error.URLError as error:
            raise _of_connection(error.reason) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _of_connection(error) from None


_TOO_LARGE = "larger than --max_mb"
_HEADERS = {
    "User-Agent": f"jaxvlm/{jaxvlm.__version__} (data fetch)",
    "Accept": "*/*",
    "Accept-Encoding": "identity",
}


class _Busy(Exception):
    """A request that may be answered later.

    Args:
        text: reason.
        asked: seconds that the server asks for.
    """

    def __init__(self, text: str, asked: int = 0):
        super().__init__(text)
        self.asked = asked


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to hosts that may be asked."""

    def __init__(self, check: Callable[[str], None]):
        self._check = check

    def redirect_request(self, *args: Any) -> urllib.request.Request | None:
        self._check(args[-1])
        return super().redirect_request(*args)


def _of_connection(error: Any) -> Exception:
    """What a failed connection means; the text has no address, so that one fault is one reason."""
    if isinstance(error, TimeoutError):
        return _Busy("no answer in --timeout_s")
    if isinstance(error, socket.gaierror):
        return Refused("a host that is not known")
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refused("a certificate that is not valid")
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return Refused("not an http:// or https:// URL")
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return _Busy(str(text)[:80])


def _host(url: str) -> str:
    try:
        return (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _matches(host: str, pattern: str) -> bool:
    pattern = pattern.lower().rstrip(".")
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _quoted(url: str) -> str:
    """A URL whose characters beyond ASCII, and spaces, are escaped, as browsers do it."""
    parts = urllib.parse.urlsplit(url.strip())
    host = parts.netloc
    if not host.isascii():
        host = host.encode("idna").decode()
    safe = "%/:=&?~#+!$,;'@()*[]"
    path, query = (urllib.parse.quote(x, safe) for x in (parts.path, parts.query))
    return urllib.parse.urlunsplit((parts.scheme, host, path, query, ""))


def _check_image(data: bytes) -> None:
    """Refuse bytes that begin as no image does; a damaged one is found when it is decoded."""
    try:
        with Image.open(io.BytesIO(data)):
            pass
    except Image.DecompressionBombError:
        pass  # data.max_pixels is about it
    except (OSError, ValueError, SyntaxError):
        raise Refused("not an image") from None


@contextlib.contextmanager
def _partial_folder(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder in another, for files that are not whole yet; those of dead processes go."""
    host = socket.gethostname()
    of_host = re.compile(re.escape(f"partial-{host}-") + r"(\d+)")
    own = root / f"partial-{host}-{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        found = of_host.fullmatch(path.name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            shutil.rmtree(path, ignore_errors=True)
    own.mkdir(exist_ok=True)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
