"""Requests to object stores: what their errors mean, and how long a request is tried.

A store's errors are told apart: a file that is not there, an answer that may be another one in a
moment (asked for again, until the deadline), and a refusal.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import math
import os
import pathlib
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxvlm.stores.errors import OtherBytes, StoreError, error_line


class Kind(NamedTuple):
    """What is known of a kind of store."""

    name: str
    package: str
    """Gives fsspec its file system, and is named as the extra's package."""
    extra: str
    credentials: str
    """Where they are looked for, and the role that they need; for errors."""


KINDS = {
    "gs": Kind(
        "Google Cloud Storage",
        "gcsfs",
        "gcs",
        "gcloud auth application-default login, GOOGLE_APPLICATION_CREDENTIALS, or the machine's "
        "service account; their role: Storage Object User of the bucket",
    ),
    "s3": Kind(
        "Amazon S3 and what speaks its protocol",
        "s3fs",
        "s3",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role; "
        "AWS_ENDPOINT_URL for another store than Amazon's; their policy: s3:ListBucket, GetObject, "
        "PutObject, DeleteObject and AbortMultipartUpload",
    ),
}
"""Scheme of a URL -> the store that it is of."""
_WEB = Kind(
    "a web server",
    "aiohttp",
    "http",
    "a name and a password for the host in ~/.netrc",
)
READ_KINDS = KINDS | {"http": _WEB, "https": _WEB}
"""The same of what can be read, and perhaps not written."""
DEADLINE = 120.0
"""Seconds for which a request that fails for a while is tried again; the last try, which may
begin before it, takes up to a minute."""
SILENT = 15.0
"""Seconds after which a line says, again and again, that a store does not answer."""
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between two tries, and so on with the last."""
_PASSES = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|timed? ?out|broken pipe|"
    r"connection (reset|refused|closed|aborted)|(status|response) code:? (408|429|5\d\d)",
    re.IGNORECASE,
)
_REFUSES = re.compile(
    r"UNAUTHENTICATED|PERMISSION_DENIED|(status|response) code:? (401|403)|"
    r"OSError Forbidden|anonymous caller|invalid credentials",
    re.IGNORECASE,
)
"""What TensorStore and gcsfs say, where no type and no code does."""
_NETWORK = ("aiohttp", "requests", "urllib3", "google.auth")
"""Packages whose errors are of the network."""
_BOTO_PASSES = {
    *("HTTPClientError", "ConnectionError", "FlexibleChecksumError", "ResponseParserError"),
}
_BOTO_REFUSES = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "SSOError"),
    *("TokenRetrievalError", "ProfileNotFound", "NoAuthTokenError", "LoginError"),
}
"""Classes of botocore's errors without an answer. Source: botocore/exceptions.py"""
_TOKENS = {
    *("ExpiredToken", "TokenRefreshRequired", "InvalidToken", "RequestExpired"),
    *("InvalidAccessKeyId", "SignatureDoesNotMatch"),
}
_CONFLICTS = {"ConditionalRequestConflict", "OperationAborted"}
"""Amazon's codes that are no HTTP status of their own. Source:
docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html"""
_AT_A_TIME = 16
_LOCAL = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EROFS}
"""Errors of this machine's own disk, of which no store has heard."""
T = TypeVar("T")


def passes(error: BaseException) -> bool:
    """Whether a failure may pass, so that the same request can succeed later."""
    if isinstance(error, (FileNotFoundError, FileExistsError)) or refuses(error):
        return False
    if isinstance(error, (TimeoutError, ConnectionError, OtherBytes)):
        return True
    if isinstance(error, StoreError):
        return error.passes
    status, name = answer_of(error)
    if status:
        return status in (408, 429) or status >= 500 or name in _CONFLICTS
    if type(error).__module__.startswith("botocore"):
        return bool(_classes(error) & _BOTO_PASSES)
    return type(error).__module__.startswith(_NETWORK) or bool(_PASSES.search(_words(error)))


def refuses(error: BaseException) -> bool:
    """Whether a store refuses, as it does without credentials or a role."""
    status, name = answer_of(error)
    if isinstance(error, PermissionError) or status in (401, 403) or name in _TOKENS:
        return True
    return bool(_classes(error) & _BOTO_REFUSES or _REFUSES.search(_words(error)))


def answer_of(error: BaseException) -> tuple[int, str]:
    """HTTP status and name of a store's answer; 0 and "" of an error that has none.

    s3fs raises errors of Python's own, with botocore's as their cause.
    """
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(answer, dict):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return int(status), str(answer.get("Error", {}).get("Code", ""))
    code = getattr(error, "status", None)  # aiohttp warns of its "code"
    code = str(getattr(error, "code", "") if code is None else code)
    return (int(code) if code.isdigit() else 0), ""


def _classes(error: BaseException) -> set[str]:
    """Names of an error's class and of those that it is derived from."""
    return {kind.__name__ for kind in type(error).__mro__}


def _words(error: BaseException) -> str:
    """An error's text without names of files, in which anything may be."""
    text = f"{type(error).__name__} {' '.join(str(error).split())}"
    return re.sub(r"\S*/\S*", "", text)


def attempt(what: str, call: Callable[[], T]) -> T:
    """Call until it succeeds, for :data:`DEADLINE`.

    Args:
        what: is done, in the error's words, which begin with a URL:
            ``gs://bucket/run/config.json is read``.
        call: raises what its library does.

    Raises:
        FileNotFoundError, FileExistsError: raised by ``call``.
        StoreError: it failed for good, or for as long as the deadline.
    """
    begun, tries, said = time.monotonic(), 0, -math.inf
    while True:
        try:
            return call()
        except (FileNotFoundError, FileExistsError, StoreError):
            raise
        except Exception as error:  # of several libraries
            if refuses(error):
                kind = READ_KINDS.get(what.partition("://")[0])
                raise StoreError(
                    f"{what}: the store refuses ({error_line(error, whole=True)}); check the "
                    f"credentials{f' ({kind.credentials})' if kind else ''}"
                ) from error
            if not passes(error):
                raise StoreError(f"{what}: {error_line(error)}") from error
            pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
            if time.monotonic() + pause - begun > DEADLINE:
                raise StoreError(
                    f"{what}: the store has not done it for {DEADLINE:.0f} s "
                    f"({error_line(error)}); start the same command again when it does: a run goes "
                    "on from its last complete checkpoint",
                    passes=True,
                ) from error
            if begun <= time.monotonic() - SILENT > said:
                said = time.monotonic()
                text = f"{what}: the store has not done it yet ({error_line(error)}); trying on"
                print(f"jaxvlm: {text}", file=sys.stderr, flush=True)
        tries += 1
        time.sleep(pause)


class GivenUp(StoreError):
    """A write is not waited for any more."""


def within(seconds: float, call: Callable[[], None], otherwise: str) -> None:
    """Call, and give up waiting for it after ``seconds``.

    Args:
        seconds: how long to wait.
        call: waits for a store.
        otherwise: what is said to be the case then, ``a checkpoint is not written``.

    Raises:
        GivenUp: it has not ended.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="store-wait")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise GivenUp(
            f"{otherwise} after {seconds:.0f} s: the store does not answer. When "
            "it does, the same command goes on from the last complete checkpoint",
            passes=True,
        )
    if failed:
        raise failed[0]


def concurrently(call: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """What ``call`` returns for each item, in their order; see :func:`each`."""
    found: dict[int, T] = {}
    each(lambda i: found.setdefault(i, call(items[i])), range(len(items)))
    return [found[i] for i in range(len(items))]


def each(call: Callable[[Any], Any], names: Iterable[Any]) -> None:
    """Call for each name, several at a time; the first error is raised, once the others' calls end.

    In threads that no exit of the interpreter waits for.
    """
    left, failed = collections.deque(names), list[BaseException]()

    def work() -> None:
        while not failed:
            try:
                name = left.popleft()
            except IndexError:
                return
            try:
                call(name)
            except BaseException as error:
                failed.append(error)

    threads = [
        threading.Thread(target=work, daemon=True) for _ in range(min(len(left), _AT_A_TIME))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def temporary_folder() -> str:
    """The folder for temporary files.

    Raises:
        OSError: there is none, or TMPDIR names one in whose place Python takes another.
    """
    found, asked = tempfile.gettempdir(), os.environ.get("TMPDIR", "")
    if asked and not os.path.samefile(asked, found):
        raise OSError(errno.ENOSPC, "it can't be written, or is full")
    return found


@contextlib.contextmanager
def local_disk(
    folder: pathlib.Path, advice: str = "set TMPDIR to a folder with room for a checkpoint"
) -> Iterator[None]:
    """Tells what this machine's disk refuses from what a store does.

    Args:
        folder: that is written to.
        advice: what to do where there is no room, in the error's words.

    Raises:
        StoreError: the disk is full, or can't be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _LOCAL:
            raise
        raise StoreError(
            f"{folder} of this machine: {error.strerror}; make room, or {advice}", passes=True
        ) from error
