"""Checkpoints in S3: written to local files that are then sent, and fetched before they are read.

Orbax writes to file systems and to Google Cloud Storage alone. For S3 each process writes its part
of a checkpoint to a local folder, with a file for each chunk of an array, so that nothing has to be
merged, and sends it in the background. Process 0 sends the file that says that a checkpoint is
complete, once all have said that theirs is there. A process that restores fetches the chunks that
its own devices need.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
from etils import epath

from jaxvlm.checkpoint import local_copies
from jaxvlm.checkpoint.run_record import COMMITTED
from jaxvlm.parallel.distributed.processes import from_first_process
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder
from jaxvlm.stores.store_requests import each, local_disk, temporary_folder

SCHEMES = ("s3",)
"""Of stores whose checkpoints are staged."""
DEADLINE = 3600.0
"""Seconds for which process 0 waits for the others, which may have more to send."""
_MERGED = "manifest.ocdbt"
"""File of a checkpoint that Orbax wrote to a store or a disk by itself."""
_CHUNK = re.compile(r"\d+(\.\d+)*")
"""Name of the file of an array's chunk: its place on the grid of chunks."""
_SHAPE = ".zarray"
_USELESS = (
    "[process=%s][thread=%s] Skipping merge of OCDBT",
    "Global object size logging disabled",
)
"""Beginnings of what Orbax warns of at each save because of how it is called here."""


def is_staged(folder: str | os.PathLike[str]) -> bool:
    """Whether checkpoints of a folder are written to local files, and then sent."""
    return str(folder).partition("://")[0] in SCHEMES


class Staging:
    """Sends the checkpoints that Orbax writes to a local folder.

    Args:
        remote: folder of the checkpoints.
        before_commit: raises where another run has taken over.
    """

    def __init__(self, remote: RemoteFolder, before_commit: Callable[[], None]):
        self._remote, self._before_commit = remote, before_commit
        self.folder = _make_folder(passes=False)
        """Where Orbax writes, on this process's machine."""
        self._sent: concurrent.futures.Future[None] | None = None
        several = jax.process_count() > 1
        self._token = from_first_process(lambda: secrets.token_hex(4)) if several else ""
        logging.getLogger("absl").addFilter(_says_something)

    def remove_partial(self) -> None:
        """Remove what a run that was killed sent of checkpoints that are not complete."""
        for step in self._remote.names(""):
            if step.isdigit() and not self._remote.exists(f"{step}/{COMMITTED}"):
                self._remote.remove_folder(step)

    def send(self, step: int, written: Callable[[], None]) -> None:
        """Send a checkpoint in the background, once ``written`` returns."""
        sent = self._sent = concurrent.futures.Future[None]()

        def run() -> None:
            try:
                self._send(step, written)
                sent.set_result(None)
            except BaseException as error:
                sent.set_exception(error)

        # Not waited for at an exit after an error: the others may never send their parts.
        threading.Thread(target=run, daemon=True, name="checkpoint-upload").start()

    def wait(self) -> None:
        """Wait until no checkpoint is being sent.

        Raises:
            StoreError: the store, or another process, has not done its part.
        """
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.result()

    def close(self) -> None:
        """Remove the local folder; nothing may be written to it any more."""
        local_copies.remove(self.folder)

    def _send(self, step: int, written: Callable[[], None]) -> None:
        written()
        local = self.folder / str(step)
        process = jax.process_index()
        names = [p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file()]
        if process:  # what is no chunk is the same in all of them
            names = [name for name in names if _CHUNK.fullmatch(name.rpartition("/")[2])]
        names = [name for name in names if name != COMMITTED]
        each(lambda name: self._remote.upload(local / name, f"{step}/{name}"), names)
        if process:
            self._remote.write(self._mark(step, process), json.dumps(names).encode())
        else:
            self._commit(step, names)
        shutil.rmtree(local, ignore_errors=True)

    def _commit(self, step: int, names: list[str]) -> None:
        """Say that a checkpoint is complete, once all processes' files are there."""
        marks = [self._mark(step, other) for other in range(1, jax.process_count())]
        self._await(marks)
        wanted = set(names).union(*(json.loads(self._remote.read(mark)) for mark in marks))
        missing = {f"{step}/{name}" for name in wanted} - self._remote.files(str(step)).keys()
        if missing:
            raise StoreError(
                f"{self._remote.url}: {len(missing)} files that were sent are not there, such as "
                f"{min(missing)}; does another run write to this folder?"
            )
        # At each try: another run may take over while the store does not answer.
        text = b"all files are here"
        self._remote.write(f"{step}/{COMMITTED}", text, check=self._before_commit)
        each(self._remote.remove, marks)

    def _mark(self, step: int, process: int) -> str:
        """The file by which a process says that its part was sent, in this start of the run."""
        return f"{step}/.sent-{process}-{self._token}"

    def _await(self, marks: list[str]) -> None:
        begun, pause = time.monotonic(), 0.1
        for mark in marks:
            while not self._remote.exists(mark):
                if time.monotonic() - begun > DEADLINE:
                    process = mark.rpartition("sent-")[2].partition("-")[0]
                    raise StoreError(
                        f"process {process} has not sent its part of {self._remote.url}/"
                        f"{mark.partition('/')[0]} {DEADLINE:.0f} s after process 0 has; the same "
                        "command goes on from the last complete checkpoint",
                        passes=True,
                    )
                time.sleep(pause)
                pause = min(2.0, 1.5 * pause)


@contextlib.contextmanager
def fetched(folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[epath.Path]:
    """A local folder that holds what this process's devices need of a checkpoint's arrays.

    Args:
        folder: of the arrays; if it is not :func:`is_staged`, it is yielded itself.
        wanted: name -> shape and sharding.

    Raises:
        StoreError: the store does not answer, or this machine's disk is full.
    """
    if not is_staged(folder):
        yield folder
        return
    remote = RemoteFolder(str(folder))
    sizes = {name: info["size"] for name, info in remote.files().items()}
    local = _make_folder()

    def fetch(name: str) -> None:
        remote.download(name, local / name, sizes[name])

    def fetch_all(names: Iterable[str]) -> None:
        names = [name for name in names if ".." not in name.split("/")]
        with local_disk(local):
            for name in names:
                (local / name).parent.mkdir(parents=True, exist_ok=True)
        each(fetch, names)

    try:
        if _MERGED in sizes:  # written to another store, and copied: its files are of all arrays
            fetch_all(sizes)
            yield epath.Path(local)
            return
        arrays = {name.rpartition("/")[0] for name in sizes} & wanted.keys()
        shapes = {f"{name}/{_SHAPE}" for name in arrays}
        fetch_all(name for name in sizes if "/" not in name or name in shapes)
        needed = set().union(*(_chunks(local, name, wanted[name]) for name in arrays))
        fetch_all(needed & sizes.keys())
        yield epath.Path(local)
    finally:
        local_copies.remove(local)


def check_names(arrays: Mapping[str, jax.Array]) -> None:
    """Refuse arrays that can't be staged.

    Args:
        arrays: name -> array.

    Raises:
        ValueError: an array has no elements, or its name is that of a folder of another one.
    """
    for name, x in arrays.items():
        if not x.size:
            raise ValueError(f"{name} has no elements, and can't be saved to an object store so")
        parts = name.split("/")
        above = ("/".join(parts[:i]) for i in range(1, len(parts)))
        if other := next((path for path in above if path in arrays), ""):
            raise ValueError(f"{name} would lie in the folder of {other}; rename one")


def _chunks(local: pathlib.Path, name: str, leaf: jax.ShapeDtypeStruct) -> set[str]:
    """Files of the chunks of an array that this process's devices hold a part of."""
    path = local / name / _SHAPE
    sizes = json.loads(path.read_text())["chunks"] if path.is_file() else list(leaf.shape)
    if leaf.sharding is None or len(sizes) != len(leaf.shape):
        return set()  # it will be said to be damaged
    found: set[str] = set()
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    boxes = {tuple(x.indices(n)[:2] for x, n in zip(i or (), leaf.shape)) for i in indices}
    for spans in boxes:
        grid = [range(a // c, -(-b // c)) for (a, b), c in zip(spans, sizes)]
        found |= {f"{name}/{'.'.join(map(str, at)) or '0'}" for at in itertools.product(*grid)}
    return found


def _make_folder(passes: bool = True) -> pathlib.Path:
    """A folder for files that are sent or were fetched.

    Args:
        passes: whether an error of it may pass.

    Raises:
        StoreError: there is no folder for temporary files, or it is full.
    """
    where = os.environ.get("TMPDIR", "")
    try:
        return local_copies.make("checkpoint", temporary_folder())
    except OSError as error:
        raise StoreError(
            f"TMPDIR={where}: no checkpoint can be written there "
            f"({error.strerror}); set it to a folder with room for one",
            passes,
        ) from error


def _says_something(record: logging.LogRecord) -> bool:
    """A filter of logging that leaves out :data:`_USELESS`."""
    return not str(record.msg).startswith(_USELESS)
