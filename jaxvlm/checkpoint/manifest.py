"""The manifest of a checkpoint: one JSON file with a checksum.

It holds the step, the caller's extra state, the metrics, and a table of every array: name,
shape, dtype and digest. The table distinguishes a changed configuration (other names or shapes)
from damage (other bits) before any array is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath

from jaxvlm.checkpoint.errors import CheckpointError
from jaxvlm.checkpoint.object_store import RemoteFolder
from jaxvlm.config import json_text

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
