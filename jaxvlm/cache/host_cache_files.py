"""Files of the host cache, written with a run's checkpoints and read when it resumes."""

from __future__ import annotations

import hashlib
import io
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.cache.store import segment_files
from jaxvlm.cache.store.rows import Store
from jaxvlm.checkpoint.run_record import write_whole
from jaxvlm.types import Age

_INDEX = "index.npz"
_FLUSH = 2**27
"""Bytes of tokens that may wait for the disk before a flush; with more than twice as many waiting,
a store would drop tokens."""

HostPage = tuple[int, int]
"""A row of the batch, and the number of a page in its part of host memory."""


class HostTokens(NamedTuple):
    """One image's cached tokens; the array is never written to."""

    key: bytes
    """16 bytes: the image's key."""
    tokens: np.ndarray
    """[P, D]."""
    age: Age
    """With Python numbers as fields."""


class HostEntries(NamedTuple):
    """The host cache's entries by page, for the coming two steps."""

    current: dict[HostPage, HostTokens]
    """That the next step is given."""
    next: dict[HostPage, HostTokens]
    """That replace those of ``current`` for the step after it."""


def write(folder: pathlib.Path, entries: HostEntries, run: int, log: Callable[[str], None]) -> None:
    """Write the host cache's entries. A failure is logged, and the run goes on.

    Args:
        folder: its contents are replaced.
        entries: to be written.
        run: number of the run, which :func:`read` must be given.
        log: takes a line for the log, from any thread.
    """
    every = [(at, entry, late) for late, part in enumerate(entries) for at, entry in part.items()]
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was at this step before
        with Store(folder, {"run": run}, on_warning=log, may_prune=False) as store:
            waiting = 0
            for at, entry, late in every:
                if (waiting := waiting + entry.tokens.nbytes) > _FLUSH:
                    store.flush()
                    waiting = entry.tokens.nbytes
                store.put(_name(at, late), entry.tokens)
            store.flush()
            lost = sum(not store.has(_name(at, late)) for at, _, late in every)
        index: dict[str, Any] = {
            "at": np.asarray([at for at, *_ in every], np.int64).reshape(-1, 2),
            "key": np.asarray([np.frombuffer(x.key, np.uint8) for _, x, _ in every], np.uint8),
            "length": np.asarray([len(x.tokens) for _, x, _ in every], np.int64),
            "late": np.asarray([late for *_, late in every], bool),
        }
        for i, name in enumerate(Age._fields):
            index[name] = np.asarray([x.age[i] for _, x, _ in every])
        file = io.BytesIO()
        np.savez(file, **index)
        write_whole(folder / _INDEX, file.getvalue())  # last: marks it complete
        why = f"{lost} of {len(every)} are" if lost else ""
    except Exception as error:  # whatever it is, training goes on
        why = f"{segment_files.reason(error)}; they are"
    if why:
        log(
            f"{folder}: the host cache is not saved completely: {why} recomputed by a run that "
            "resumes from this checkpoint, whose losses then differ from this one's."
        )


def read(
    folder: pathlib.Path,
    run: int,
    wanted: Callable[[HostPage, int], bool],
    log: Callable[[str], None],
) -> tuple[HostEntries, int]:
    """Read the entries that :func:`write` wrote.

    Args:
        folder: as given to :func:`write`.
        run: number of the run that wrote it.
        wanted: (page, tokens) -> whether to read the entry.
        log: takes a line for the log.

    Returns:
        The entries, and how many wanted ones are damaged or missing.

    Raises:
        ValueError: nothing can be read; the message says why.
    """
    try:
        with np.load(io.BytesIO((folder / _INDEX).read_bytes())) as index:
            every = list(_listed(dict(index)))
    except Exception as error:  # whatever NumPy and zip raise for a damaged file
        raise ValueError(segment_files.reason(error)) from error
    entries, lost = HostEntries({}, {}), 0
    store = Store(folder, {"run": run}, on_warning=log, may_prune=False)
    for at, key, length, late, age in every:
        if not wanted(at, length):
            continue
        tokens = store.get(_name(at, late))
        if tokens is None:
            lost += 1
        else:
            entries[late][at] = HostTokens(key, tokens, age)
    return entries, lost


def _listed(of: dict[str, np.ndarray]) -> Iterator[tuple[HostPage, bytes, int, bool, Age]]:
    """Yield the index's entries: page, image key, number of tokens, whether of ``next``, age."""
    ages = [of[name].tolist() for name in Age._fields]
    keys, lengths, late = (of[name].tolist() for name in ("key", "length", "late"))
    for i, (shard, page) in enumerate(of["at"].tolist()):
        yield (shard, page), bytes(keys[i]), lengths[i], late[i], Age(*(x[i] for x in ages))


def prune(folder: pathlib.Path, step: int, kept: Collection[int]) -> None:
    """Remove saves of the host cache whose checkpoints are gone.

    Args:
        folder: with a sub-folder for each saved step.
        step: that is about to be saved.
        kept: steps that have checkpoints; checkpoints after the latest may still be being written.
    """
    latest = max((x for x in kept if x <= step), default=0)
    needed = {*kept, *range(latest, step + 1)}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.isdecimal() and int(path.name) not in needed:
            shutil.rmtree(path, ignore_errors=True)


def _name(at: HostPage, late: int) -> bytes:
    """Return an entry's key in the store."""
    text = repr((at, int(late))).encode()
    return hashlib.blake2b(text, digest_size=16, person=b"host_cache").digest()
