"""What sites and coordinator say to each other, as bytes: JSON, and arrays in safetensors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors.numpy

from jaxvlm.config import ConfigError, json_text

PROTOCOL = 1
"""Version of these messages; the two sides must have the same."""
_HEAD = "head"
_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip
_MAX_HEAD = 1 << 26
"""Bytes of a message's JSON; its arrays are as large as the message says, and no larger."""


class MessageError(ConfigError):
    """Bytes that are no message; the text says why."""


class Message(NamedTuple):
    """One message, of a site or of the coordinator."""

    kind: str
    """Of a site: join, fetch or submit. Of the coordinator: welcome, weights, wait, verdict, done
    or refused."""
    head: dict[str, Any]
    """JSON values."""
    arrays: dict[str, np.ndarray]
    """Arrays by name."""


@dataclasses.dataclass(frozen=True)
class Update:
    """What a site has made of a version of the shared parameters."""

    site: str
    number: int
    """Counts the site's updates from 1; one that is sent again has its number again."""
    base: int
    """The version that it started from."""
    tokens: float
    """Tokens that the loss covered; of pairs, examples."""
    steps: int
    """Train steps whose update was applied."""
    token_lag: int
    """The largest lag, in updates of the vision encoder, of visual tokens that were read."""
    loss: float
    """Mean loss of the steps."""
    parts: dict[str, np.ndarray]
    """The change of the parameters, as :func:`jaxvlm.federate.codec.encode` makes it."""


def pack(kind: str, head: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = {}) -> bytes:
    """Pack a message.

    Args:
        kind: see :class:`Message`.
        head: JSON values; numbers are finite.
        arrays: of any dtype that safetensors knows.
    """
    text = json.dumps({"protocol": PROTOCOL, "kind": kind, **head}, allow_nan=False)
    return save(arrays, {_HEAD: text})


def save(arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """Arrays as a safetensors file; numbers without dims stay without."""
    ordered = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    return safetensors.numpy.save(ordered, metadata)


def load(data: bytes) -> dict[str, np.ndarray]:
    """Invert :func:`save`; safetensors' own reader for NumPy has no bfloat16.

    Raises:
        SafetensorError, KeyError, ValueError: cut off, damaged, or of an unknown dtype.
    """
    return {
        name: np.frombuffer(x["data"], _DTYPES[x["dtype"]]).reshape(x["shape"])
        for name, x in safetensors.deserialize(data)
    }


def unpack(data: bytes) -> Message:
    """Unpack a message; nothing in it is run.

    Raises:
        MessageError: cut off, damaged, or of another protocol.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        if size > _MAX_HEAD:
            raise ValueError(f"a head of {size} bytes")
        header = json_text.parse(data[8 : 8 + size].decode())
        text = header["__metadata__"][_HEAD]
        head = json_text.parse(text)
        arrays = load(data)
        kind, protocol = head.pop("kind"), head.pop("protocol")
    except Exception as error:  # whatever a stranger's bytes can raise in these
        raise MessageError(f"no message: {type(error).__name__}: {error}") from None
    if protocol != PROTOCOL:
        raise MessageError(
            f"a message of protocol {protocol!r}, and this is {PROTOCOL}: install the same version "
            "of jaxvlm at all sites and at the coordinator"
        )
    return Message(kind, head, arrays)


def site_of(data: bytes) -> str:
    """The site that a message says it is of, without reading its arrays; "" where it says none."""
    try:
        size = int.from_bytes(data[:8], "little")
        header = json_text.parse(data[8 : 8 + size].decode())
        site = json_text.parse(header["__metadata__"][_HEAD])["site"]
    except Exception:  # whatever a stranger's bytes can raise; unpack says what is wrong
        return ""
    return site if isinstance(site, str) else ""


def pack_update(update: Update, session: str) -> bytes:
    """Pack a site's update; ``session`` is that of its :class:`Message` welcome."""
    head = {f.name: getattr(update, f.name) for f in dataclasses.fields(update)}
    del head["parts"]
    if not np.isfinite(update.loss):  # JSON has no NaN; the coordinator refuses it by name
        head["loss"] = None
    digest = digest_of(update.parts)
    return pack("submit", {**head, "session": session, "digest": digest}, update.parts)


def unpack_update(message: Message) -> Update:
    """Unpack a site's update.

    Raises:
        MessageError: a field is missing or of another type, or bits of its arrays have changed.
    """
    head = dict(message.head)
    fields = {f.name: f for f in dataclasses.fields(Update) if f.name != "parts"}
    kinds: dict[str, Any] = {
        "site": str,
        **dict.fromkeys(("number", "base", "steps", "token_lag"), int),
        **dict.fromkeys(("tokens", "loss"), (int, float)),
    }
    head["loss"] = float("nan") if head.get("loss") is None else head["loss"]
    for name in fields:
        if not isinstance(head.get(name), kinds[name]) or isinstance(head[name], bool):
            raise MessageError(f"an update whose {name} is {head.get(name)!r}")
    if digest_of(message.arrays) != head.get("digest"):
        raise MessageError("an update whose arrays have changed on the way: its digest differs")
    return Update(**{name: head[name] for name in fields}, parts=message.arrays)


def digest_of(arrays: Mapping[str, np.ndarray], names: Iterable[str] | None = None) -> str:
    """Digest of arrays: 32 hexadecimal digits of their names, dtypes, shapes and bits.

    Args:
        arrays: by name.
        names: which of them; ``None``: all.
    """
    sums = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays if names is None else names):
        x = arrays[name]
        sums.update(f"{name}\n{x.dtype} {x.shape}\n".encode())
        sums.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return sums.hexdigest()


def group_digests(params: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Digest of each submodel's parameters, by the first part of their paths."""
    groups = sorted({path.split("/")[0] for path in params})
    return {g: digest_of(params, [p for p in params if p.split("/")[0] == g]) for g in groups}
