"""Fetch images and videos that records name by URL, and keep them: ``jaxvlm data fetch``.

A run never asks the network for what it trains on: pages change, and servers fail. Files are
fetched once, from hosts that the user names, whole or not at all, and ``data.fetched`` then names
their folder.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import http.client
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

import jaxvlm
from jaxvlm.data.errors import ImageError
from jaxvlm.data.images import image_files
from jaxvlm.data.sources import fetched
from jaxvlm.data.sources.partial_files import remove_left_over

PAUSES = (1.0, 5.0, 20.0)
"""Seconds before a request is made again that was refused for a while, or cut short."""
_LONGEST_PAUSE = 60.0
"""What a server may ask for, at most, by Retry-After."""
_DEADLINE = 900.0
"""Seconds that one file may take with all its tries, however slowly it comes."""
_MOVES = 5
"""How often a server may send a request on."""
_LARGEST = 100_000_000
"""Pixels of an image, at most."""
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
    wanted = [url for url in urls if not _is_here(fetched.path_of(root, url))]
    failed: dict[str, str] = {}
    with _partial_folder(root) as partial:
        asked = _Asked(limits, partial)

        def get(url: str) -> str:
            try:
                asked.get(url, urls[url], fetched.path_of(root, url))
            except Refused as error:
                return str(error)
            return ""

        for done, (url, reason) in enumerate(_in_order(get, wanted, limits.workers), 1):
            if reason:
                failed[url] = reason
            said(done, len(failed))
    return Fetched(len(wanted) - len(failed), len(urls) - len(wanted), failed)


def _is_here(path: pathlib.Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _in_order(
    get: Callable[[str], str], urls: list[str], workers: int
) -> Iterator[tuple[str, str]]:
    """Call for each URL in threads; after an error, those that wait are not begun."""
    waiting: dict[concurrent.futures.Future[str], str] = {}
    left, pool = iter(urls), concurrent.futures.ThreadPoolExecutor(workers)
    try:
        while True:
            for url in left:
                waiting[pool.submit(get, url)] = url
                if len(waiting) >= 2 * workers:
                    break
            if not waiting:
                return
            done, _ = concurrent.futures.wait(
                waiting, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                yield waiting.pop(future), future.result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Asked:
    """Asks servers for files.

    Args:
        limits: what may be asked for.
        partial: folder of files that are not whole yet.
    """

    def __init__(self, limits: Limits, partial: pathlib.Path):
        self._limits, self._partial = limits, partial
        self._hosts = [pattern.lower().rstrip(".") for pattern in limits.hosts]
        self._opener = urllib.request.build_opener(_Http, _Https, _Moves)

    def get(self, url: str, article: str, path: pathlib.Path) -> None:
        """Keep what a URL gives; raises Refused."""
        end = time.monotonic() + _DEADLINE
        for pause in (*PAUSES, None):
            try:
                data = self._read(url, end)
                break
            except _Busy as error:
                if pause is None or time.monotonic() > end:
                    raise Refused(str(error)) from None
                time.sleep(min(max(pause, error.asked), _LONGEST_PAUSE))
        _check(data, article)
        path.parent.mkdir(exist_ok=True)
        own = self._partial / f"{path.name}-{threading.get_ident()}"
        with open(own, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(own, path)

    def _read(self, url: str, end: float) -> bytes:
        for _ in range(_MOVES + 1):
            try:
                with self._opener.open(self._request(url), timeout=self._limits.timeout) as answer:
                    return self._content(answer, end)
            except (Refused, _Busy):
                raise
            except _Moved as moved:
                url = urllib.parse.urljoin(url, moved.place)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code in (408, 425, 429) or error.code >= 500:
                        asked = _number(error.headers.get("Retry-After"))
                        raise _Busy(f"HTTP {error.code}", asked or 0) from None
                    raise Refused(f"HTTP {error.code}") from None
            except Exception as error:  # names and answers of strangers raise all kinds
                inside = error.reason if isinstance(error, urllib.error.URLError) else error
                raise _of_connection(inside) from None
        raise Refused("sent on too often")

    def _request(self, url: str) -> urllib.request.Request:
        """A request that may be made; raises Refused."""
        try:
            parts = urllib.parse.urlsplit(url.strip())
            host, _ = (parts.hostname or "").rstrip("."), parts.port
            quoted = _quoted(parts)
        except ValueError:
            raise Refused(_NO_URL) from None
        if parts.scheme.lower() not in ("http", "https") or not host or parts.username is not None:
            raise Refused(_NO_URL)
        named = [pattern for pattern in self._hosts if _matches(host, pattern)]
        if not named:
            raise Refused(f"{host} is not in --hosts")
        request = _Request(quoted, headers=_HEADERS)
        if host not in named:
            proxy = urllib.request.getproxies().get(parts.scheme.lower())
            if proxy and not urllib.request.proxy_bypass(host):
                with contextlib.suppress(ValueError):  # a name, whose address the proxy knows
                    _refuse_private(host.strip("[]"), host)
            else:
                request.public = True
        return request

    def _content(self, answer: Any, end: float) -> bytes:
        most, length = self._limits.max_bytes, _number(answer.headers.get("Content-Length"))
        if (length or 0) > most:
            raise Refused(_TOO_LARGE)
        if answer.headers.get_content_type() in ("text/html", "application/xhtml+xml"):
            raise Refused("a web page, and not a file")
        blocks, count = [], 0
        while block := answer.read1(_BLOCK):
            blocks.append(block)
            count += len(block)
            if count > most:
                raise Refused(_TOO_LARGE)
            if time.monotonic() > end:
                raise _Busy(f"not there after {_DEADLINE:.0f} s")
        if length is not None and count != length:
            raise _Busy("an answer that was cut short")
        return b"".join(blocks)


_NO_URL = "not an http:// or https:// URL, or one with a password"
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


class _Request(urllib.request.Request):
    public = False
    """Whether only a public address may be asked."""


class _Moved(Exception):
    """An answer that names another place."""

    def __init__(self, place: str):
        super().__init__(place)
        self.place = place


class _Moves(urllib.request.HTTPRedirectHandler):
    """Leaves it to the caller to follow, who checks where to; the answer's body is not read."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        fp.close()
        place = headers.get("Location")
        if not place:
            raise Refused(f"HTTP {code}")
        raise _Moved(place)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _public_connection(*args: Any, **more: Any) -> socket.socket:
    """A connection that is closed before anything is sent where its address is not public."""
    found = socket.create_connection(*args, **more)
    try:
        _refuse_private(str(found.getpeername()[0]), str(args[0][0]))
    except BaseException:
        found.close()
        raise
    return found


def _connection(kind: type[Any], public: bool, *args: Any, **more: Any) -> Any:
    made = kind(*args, **more)
    if public:
        made._create_connection = _public_connection
    return made


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: Any) -> Any:
        return self.do_open(
            functools.partial(_connection, http.client.HTTPConnection, req.public), req
        )


class _Https(urllib.request.HTTPSHandler):
    def __init__(self) -> None:
        self._own = ssl.create_default_context()  # once: it reads all certificates
        super().__init__(context=self._own)

    def https_open(self, req: Any) -> Any:
        make = functools.partial(_connection, http.client.HTTPSConnection, req.public)
        return self.do_open(make, req, context=self._own)


_WITH_IPV4 = [
    ipaddress.ip_network(x) for x in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "::/96")
]
"""Addresses of IPv6 that lead to one of IPv4: NAT64, 6to4, and the compatible ones."""


def _refuse_private(address: str, host: str) -> None:
    """Raise Refused for an address that is not a public one; ValueError where it is none."""
    found = ipaddress.ip_address(address.partition("%")[0])
    inside = getattr(found, "ipv4_mapped", None)
    found = inside or found
    if not found.is_global or found.is_multicast or any(found in x for x in _WITH_IPV4):
        raise Refused(f"{host} has no public address; --hosts has to name it as it is")


def _number(text: Any) -> int | None:
    """A header's number; ``None`` for anything else."""
    text = str(text)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _of_connection(error: Any) -> Exception:
    """What a failed connection means; the text has no address, so that one fault is one reason."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, TimeoutError):
        return _Busy("no answer in --timeout_s")
    if isinstance(error, socket.gaierror):
        late = error.errno == socket.EAI_AGAIN
        return (_Busy if late else Refused)("a host that is not known")
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refused("a certificate that is not valid")
    if isinstance(error, ssl.SSLError):
        return Refused("a server without TLS, or with another kind")
    if isinstance(error, http.client.IncompleteRead):
        return _Busy("an answer that was cut short")
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
        return _Busy("an answer that is not HTTP")
    if isinstance(error, http.client.InvalidURL | UnicodeError):
        return Refused(_NO_URL)
    text = getattr(error, "strerror", None) or type(error).__name__
    return _Busy(str(text)[:80])


def _host(url: str) -> str:
    try:
        return (urllib.parse.urlsplit(url.strip()).hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_pattern(text: str) -> bool:
    """Whether a text can be one of ``Limits.hosts``."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return re.fullmatch(r"\*|(\*\.)?[^*/:@\s]+", text) is not None


def _matches(host: str, pattern: str) -> bool:
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _quoted(parts: urllib.parse.SplitResult) -> str:
    """A URL whose characters beyond ASCII, and spaces, are escaped, as browsers do it."""
    host = parts.netloc
    if not host.isascii():
        host = host.encode("idna").decode()
    safe = "%/:=&?~#+!$,;'@()*[]"
    path, query = (urllib.parse.quote(x, safe) for x in (parts.path, parts.query))
    return urllib.parse.urlunsplit((parts.scheme, host, path, query, ""))


_TINY = image_files.squares(8)


def _check(data: bytes, article: str) -> None:
    """Refuse what is no image, or is damaged; of videos, what is empty or a text."""
    if not data:
        raise Refused("an empty file")
    if article == "an image":
        try:
            image_files.decode(data, _TINY, _LARGEST)
        except ImageError as error:
            raise Refused(str(error)) from None
    elif data.lstrip()[:1] in (b"<", b"{"):
        raise Refused("a text, and not a video")


@contextlib.contextmanager
def _partial_folder(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder in another, for files that are not whole yet; those of dead processes go."""
    prefix = f"partial-{socket.gethostname()}-"
    own = root / f"{prefix}{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    remove_left_over(root, prefix)
    own.mkdir(exist_ok=True)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
