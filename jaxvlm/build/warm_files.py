"""Rows in host memory, written beside a run's checkpoints and read again."""

from __future__ import annotations

import hashlib
import io
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.cache import files
from jaxvlm.cache.store import Store
from jaxvlm.types import Age

_INDEX = "index.npz"
_FLUSH = 2**27
"""Bytes of tokens that wait for the disk at most; a store drops what comes faster than it writes,
from twice as many on."""

Place = tuple[int, int]
"""A virtual shard of the data, and a page there."""


class Row(NamedTuple):
    """A picture's tokens; never written to."""

    key: bytes
    """The picture's."""
    tokens: np.ndarray
    """[P, D]."""
    age: Age
    """Of numbers."""


class Rows(NamedTuple):
    """What is known of pictures."""

    seen: dict[Place, Row]
    """By the next step."""
    next: dict[Place, Row]
    """By the one after it, in the place of those."""


def write(folder: pathlib.Path, rows: Rows, run: int, say: Callable[[str], None]) -> None:
    """Write rows; what can't be is said, and the run goes on.

    Args:
        folder: what is there is replaced.
        rows: to be written.
        run: number of the run, that :func:`read` asks for.
        say: takes lines for people, from any thread.
    """
    every = [(at, row, late) for late, part in enumerate(rows) for at, row in part.items()]
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was at this step before
        with Store(folder, {"run": run}, on_warning=say, may_prune=False) as store:
            waiting = 0
            for at, row, late in every:
                if (waiting := waiting + row.tokens.nbytes) > _FLUSH:
                    store.flush()
                    waiting = row.tokens.nbytes
                store.put(_name(at, late), row.tokens)
            store.flush()
            lost = sum(not store.has(_name(at, late)) for at, _, late in every)
        index: dict[str, Any] = {
            "at": np.asarray([at for at, *_ in every], np.int64).reshape(-1, 2),
            "key": np.asarray([np.frombuffer(row.key, np.uint8) for _, row, _ in every], np.uint8),
            "length": np.asarray([len(row.tokens) for _, row, _ in every], np.int64),
            "late": np.asarray([late for *_, late in every], bool),
        }
        for i, name in enumerate(Age._fields):
            index[name] = np.asarray([row.age[i] for _, row, _ in every])
        file = io.BytesIO()
        np.savez(file, **index)
        files.write_whole(folder / _INDEX, file.getvalue())  # last: nothing follows it
        why = f"{lost} of {len(every)} are" if lost else ""
    except Exception as error:  # whatever it is, the run goes on
        why = f"{files.reason(error)}; they are"
    if why:
        say(
            f"{folder}: visual tokens in host memory are not saved whole: {why} made again by a "
            "run that goes on from here, whose losses then differ from this one's."
        )


def read(
    folder: pathlib.Path, run: int, wanted: Callable[[Place, int], bool], say: Callable[[str], None]
) -> tuple[Rows, int]:
    """What :func:`write` wrote.

    Args:
        folder: that was written to.
        run: number of the run that did.
        wanted: whether a row of so many tokens is asked for at its place.
        say: takes lines for people.

    Returns:
        The rows, and how many are damaged or gone.

    Raises:
        ValueError: nothing can be read; the message says why.
    """
    try:
        with np.load(io.BytesIO((folder / _INDEX).read_bytes())) as index:
            every = list(_listed(dict(index)))
    except Exception as error:  # whatever a damaged file makes of NumPy and zip
        raise ValueError(files.reason(error)) from error
    rows, lost = Rows({}, {}), 0
    store = Store(folder, {"run": run}, on_warning=say, may_prune=False)
    for at, key, length, late, age in every:
        if not wanted(at, length):
            continue
        tokens = store.get(_name(at, late))
        if tokens is None:
            lost += 1
        else:
            rows[late][at] = Row(key, tokens, age)
    return rows, lost


def _listed(of: dict[str, np.ndarray]) -> Iterator[tuple[Place, bytes, int, bool, Age]]:
    ages = [of[name].tolist() for name in Age._fields]
    keys, lengths, late = (of[name].tolist() for name in ("key", "length", "late"))
    for i, (shard, page) in enumerate(of["at"].tolist()):
        yield (shard, page), bytes(keys[i]), lengths[i], late[i], Age(*(x[i] for x in ages))


def prune(folder: pathlib.Path, step: int, kept: Collection[int]) -> None:
    """Drop what no checkpoint goes with any more.

    Args:
        folder: of folders by step.
        step: that is about to be written.
        kept: steps whose checkpoints there are; those after the latest may be under way.
    """
    latest = max((x for x in kept if x <= step), default=0)
    needed = {*kept, *range(latest, step + 1)}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.isdecimal() and int(path.name) not in needed:
            shutil.rmtree(path, ignore_errors=True)


def _name(at: Place, late: int) -> bytes:
    """A row's key in the store."""
    text = repr((at, int(late))).encode()
    return hashlib.blake2b(text, digest_size=16, person=b"warm").digest()
