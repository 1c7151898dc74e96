"""One run at a time in a folder that hosts share, or in an object store: numbered files.

A bucket has no locks, and that of a network's file system may hold on one host alone; but a file
can be created by one process alone. ``.locks/000001`` belongs to the first run; who takes over
creates the next number, which one alone can do too. A run writes its file again every :data:`BEAT`
seconds. Another one may take over where the file says it is released, its process is gone from this
machine, or it was not written again for :data:`STALE` seconds; the run that it belonged to, should
it go on, sees the next number and stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import secrets
import threading
import time
from typing import Any

from jaxvlm.checkpoint.run_record import write_whole
from jaxvlm.config import ConfigError
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder

BEAT = 10.0
"""Seconds between two writes of a lock's file."""
STALE = 60.0
"""Seconds after which a lock that is not written again is taken over."""
HASTE = 3.0
"""Seconds that Ctrl-C waits for a store."""
LOCKS = ".locks"
"""Folder of the numbered files."""


class Folder:
    """Files of a folder that hosts share: what locks need, as ``RemoteFolder`` has it.

    Args:
        root: the folder.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root

    def names(self, folder: str) -> list[str]:
        """Names in a folder."""
        return os.listdir(self.root / folder) if (self.root / folder).is_dir() else []

    def read(self, name: str) -> bytes:
        """Read a file."""
        return (self.root / name).read_bytes()

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist yet; whether this call did."""
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        try:
            with open(path, "xb") as file:
                file.write(data)
        except OSError:
            if path.exists():  # some file systems say so in other words
                return False
            raise
        return True

    def write(self, name: str, data: bytes) -> None:
        """Write a file, in place of an older one."""
        write_whole(self.root / name, data)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.root / name).unlink(missing_ok=True)


class NumberedLock:
    """The numbered lock of a run's folder; entering waits for it, or says who has it.

    Args:
        files: the folder's.
        folder: its name, for errors.
    """

    def __init__(self, files: RemoteFolder | Folder, folder: str):
        self._files, self._folder = files, folder
        self._me: dict[str, Any] = {
            "host": platform.node(),
            "boot": _boot(),
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "token": secrets.token_hex(8),
            "beat": 0,
            "released": False,
        }
        self._number = 0
        self._lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="run-lock")

    def __enter__(self) -> NumberedLock:
        """Take the lock.

        Raises:
            ConfigError: another run writes to the folder.
            StoreError: the store does not answer.
        """
        seen, since = b"", time.monotonic()
        while True:
            top = self._top()
            found = self._read(top) if top else b""
            if found is None:
                continue  # removed by who took over
            if seen and found != seen and _parsed(found).get("token") == _parsed(seen).get("token"):
                self._refuse(found)
            if found != seen:
                seen, since = found, time.monotonic()
            old = time.monotonic() - since > STALE
            if (not top or old or _is_over(_parsed(found))) and self._take(top + 1):
                break
            time.sleep(min(1.0, BEAT / 4))
        self._thread.start()
        return self

    def _refuse(self, found: bytes) -> None:
        them = _parsed(found)
        if them.get("released"):
            return
        raise ConfigError(
            f"--workdir={self._folder}: another run is writing to it (process {them.get('pid')} of "
            f"{them.get('host')}, since {them.get('started')}); wait until that run ends, or "
            "choose another folder"
        )

    def _top(self) -> int:
        """The highest number; 0 if there is none."""
        return max((int(x) for x in self._files.names(LOCKS) if x.isdigit()), default=0)

    def _read(self, number: int) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._files.read(f"{LOCKS}/{number:06d}")
        return None

    def _take(self, number: int) -> bool:
        if not self._files.create(f"{LOCKS}/{number:06d}", self._text()):
            return False
        self._number = number
        if not self._is_mine():  # another one took a higher number, or the same one
            return False
        if self._files.create(f"{LOCKS}/{number:06d}", b"{}"):
            raise ConfigError(
                f"--workdir={self._folder}: the store writes over a file that was to be created "
                "(it ignores the header If-None-Match), so it can't keep two runs from one folder; "
                "use another store, or a folder that is mounted"
            )
        for name in self._files.names(LOCKS):
            if name.isdigit() and int(name) < number:
                self._files.remove(f"{LOCKS}/{name}")
        return True

    def _is_mine(self) -> bool:
        """Whether the highest number is this lock's, by the token that is in it."""
        found = self._read(self._number) if self._top() == self._number else None
        return found is not None and _parsed(found).get("token") == self._me["token"]

    def _text(self) -> bytes:
        return json.dumps(self._me).encode()

    def _renew(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                if not self._is_mine():
                    self._lost = True
                    return
                self._me["beat"] += 1
                self._files.write(f"{LOCKS}/{self._number:06d}", self._text())
            except (StoreError, OSError):
                continue  # the run's own writes say it, or the next time

    def check(self) -> None:
        """Before something is written.

        Raises:
            StoreError: another run has taken over the folder.
        """
        if not self._lost and self._is_mine():
            return
        self._lost = True
        raise StoreError(
            f"{self._folder}: another run has taken over this folder, since this one had not "
            f"reached the store for {STALE:.0f} s; this one stops"
        )

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Say that the folder is free; where the store does not answer, :data:`STALE` does.

        After Ctrl-C a store that does not answer is waited for :data:`HASTE` seconds.
        """
        self._ended.set()
        release = threading.Thread(target=self._release, daemon=True, name="run-lock-release")
        release.start()
        release.join(HASTE if isinstance(error, KeyboardInterrupt) else None)

    def _release(self) -> None:
        self._thread.join()
        if not self._lost:
            self._me["released"] = True
            with contextlib.suppress(StoreError, OSError):
                self._files.write(f"{LOCKS}/{self._number:06d}", self._text())


def of_folder(workdir: pathlib.Path) -> NumberedLock:
    """The numbered lock of a folder that hosts share."""
    return NumberedLock(Folder(workdir), str(workdir))


def _parsed(text: bytes) -> dict[str, Any]:
    """What a lock says; {} of one that is damaged."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_over(lock: dict[str, Any]) -> bool:
    """Whether a lock is released, or its process was of this machine and is gone."""
    if lock.get("released"):
        return True
    if lock.get("host") != platform.node() or lock.get("boot") != _boot() or not _boot():
        return False
    try:
        os.kill(int(lock["pid"]), 0)
    except ProcessLookupError:
        return True
    except (KeyError, TypeError, ValueError, OSError):
        pass
    return False


def _boot() -> str:
    """Names this start of this machine and who sees whose processes; "" where the system does
    not: containers may have one host's name, and the numbers of others' processes mean nothing.
    """
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""
