"""The manifest of a checkpoint: one JSON file with a checksum.

It holds the step, the caller's extra state, the metrics, and a table of every array: name,
shape, dtype and digest. The table distinguishes a changed configuration (other names or shapes)
from damage (other bits) before any array is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath

from jaxvlm.checkpoint.errors import CheckpointError
from jaxvlm.checkpoint.run_record import is_url
from jaxvlm.config import json_text
from jaxvlm.stores import store_requests
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder

BEST_OF = "best_of"
"""Name in a checkpoint's extra state: metric, mode, and the data that evaluations were on."""
PAUSES = (1.0, 2.0)
"""Seconds before what an object store gave is read again."""
NAMED = 5  # number of leaves that an error message lists


class StructureError(CheckpointError):
    """The checkpoint is intact, but its arrays are not those that the caller wants."""


class Leaf(NamedTuple):
    """An entry of the table: one array of the checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    digest: int


class Manifest(NamedTuple):
    """The content of the JSON file."""

    step: int
    extra: dict[str, Any]
    metrics: dict[str, float]
    leaves: dict[str, Leaf]


def names_of(tree: Any) -> list[str]:
    """Names each leaf of ``tree``, in flattening order, such as ``params/decoder/wq``.

    Raises:
        ValueError: two leaves have the same name.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two leaves of the state are named {name}; rename one")
        seen.add(name)
    return names


def encode(record: Manifest) -> dict[str, Any]:
    """Encodes the record as a JSON object that carries its own checksum.

    Raises:
        TypeError: ``extra`` or ``metrics`` hold a value that JSON can't represent.
    """
    try:
        body = json.loads(json.dumps(record._asdict()))
    except (TypeError, ValueError) as error:
        raise TypeError(f"a checkpoint's extra state must be JSON: {error}") from error
    return {"sha256": _sha256(body), "record": body}


def read(step_folder: epath.Path) -> Manifest:
    """Reads the manifest of one checkpoint and verifies its checksum.

    Raises:
        OSError: the file does not exist or can't be read.
        ValueError: its content is not what was written, or a file of the checkpoint is none.
    """
    _check_regular(step_folder)
    if str(step_folder).startswith("s3://"):  # etils keeps the first connection of a process
        text = RemoteFolder(str(step_folder)).read("record/metadata")
    else:
        text = (step_folder / "record" / "metadata").read_bytes()
    document = json_text.parse(text)
    body = document["record"]
    if _sha256(body) != document["sha256"]:
        raise ValueError("record: the checksum differs")
    leaves = {
        name: Leaf(tuple(shape), dtype, digest)
        for name, (shape, dtype, digest) in body["leaves"].items()
    }
    return Manifest(body["step"], body["extra"], body["metrics"], leaves)


def read_retried(step_folder: epath.Path) -> Manifest:
    """As :func:`read`; an object store that does not answer is no damage.

    Raises:
        StoreError: an object store does not answer.
    """
    if not is_url(step_folder):
        return read(step_folder)
    for pause in (*PAUSES, 0.0):
        try:
            return store_requests.attempt(f"{step_folder} is read", lambda: read(step_folder))
        except StoreError as error:
            if error.passes or error.__cause__ is None or store_requests.refuses(error.__cause__):
                raise
            problem = error.__cause__
        time.sleep(pause)  # a short answer is no damage
    raise problem


def _check_regular(step_folder: epath.Path) -> None:
    """Refuses pipes and devices, which would be read for ever."""
    if "://" in str(step_folder):
        return  # an object store
    for folder, _, files in os.walk(step_folder):
        for name in files:
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                kind = "a pipe, a socket or a device" if os.path.exists(path) else "a dangling link"
                raise ValueError(f"{os.path.relpath(path, step_folder)} is {kind}")


def check_structure(
    saved: Mapping[str, Leaf], wanted: Mapping[str, Any], checkpoint: str, partial: bool = False
) -> None:
    """Checks that a checkpoint holds the wanted arrays.

    Args:
        saved: table of the checkpoint.
        wanted: name -> array or ShapeDtypeStruct.
        checkpoint: name of the checkpoint in the error message.
        partial: whether the checkpoint may hold more arrays than are wanted.

    Raises:
        StructureError: arrays differ; the message names up to five and says what to do.
    """
    wrong = [f"{name} is missing from the checkpoint" for name in wanted if name not in saved]
    if not partial:
        wrong += [f"{name} is only in the checkpoint" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name not in saved:
            continue
        have = f"{saved[name].dtype}{list(saved[name].shape)}"
        want = f"{leaf.dtype}{list(leaf.shape)}"
        if have != want:
            wrong.append(f"{name} is {have} in the checkpoint, {want} in this run")
    if wrong:
        more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        advice = (
            "Use the model settings of its workdir's config.json"
            if partial
            else "The config changed since it was written: use the settings in the workdir's "
            "config.json, or, if the model is the same, a new workdir with "
            "--config.init_from=OLD_WORKDIR to take over its weights"
        )
        raise StructureError(
            f"{checkpoint} does not fit this configuration: {'; '.join(wrong[:NAMED])}{more}. "
            f"{advice}"
        )


def as_saved(saved: Mapping[str, Leaf], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the wanted arrays, floats in the dtype of floats that the checkpoint has them in.

    Args:
        saved: table of the checkpoint.
        wanted: name -> ShapeDtypeStruct.
    """

    def one(name: str, leaf: Any) -> Any:
        dtype = saved[name].dtype if name in saved else str(leaf.dtype)
        floats = all(jnp.issubdtype(x, jnp.floating) for x in (dtype, leaf.dtype))
        return leaf.update(dtype=dtype) if floats and dtype != str(leaf.dtype) else leaf

    return {name: one(name, leaf) for name, leaf in wanted.items()}


def _sha256(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Score(NamedTuple):
    """The metric of a checkpoint that decides which one is the best."""

    value: float
    data: list[Any]
    """What it was measured on; [] where an older checkpoint does not say."""


def scores(folder: epath.Path, steps: Iterable[int], metric: str) -> Iterator[tuple[int, Score]]:
    """(step, its :class:`Score`), for the steps whose manifest has a finite one."""
    for step in steps:
        try:
            saved = read_retried(folder / str(step))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged; reported when it is restored
        yield from score(saved, metric)


def score(saved: Manifest, metric: str) -> Iterator[tuple[int, Score]]:
    """(step, its :class:`Score`), or nothing if there is no finite value."""
    if math.isfinite(value := saved.metrics.get(metric, math.nan)):
        yield saved.step, Score(value, saved.extra.get(BEST_OF, [])[2:])


def comparable(scored: Mapping[int, Score]) -> dict[int, float]:
    """Step -> value, of the scores that were measured on the newest one's evaluation data."""
    newest = scored[max(scored)].data if scored else []
    return {
        step: value
        for step, (value, data) in scored.items()
        if data[: len(newest)] == newest[: len(data)]
    }


def sign(mode: str) -> int:
    """The sign of an improvement: +1 for ``max``, -1 for ``min``.

    Raises:
        ValueError: ``mode`` is neither.
    """
    if mode not in ("max", "min"):
        raise ValueError(f"checkpoint.mode is {mode!r}; use max or min")
    return 1 if mode == "max" else -1
