"""Frames as the contents of Flower's messages."""

from __future__ import annotations

import json
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from jaxvlm.config import json_text
from jaxvlm.federate.sockets import Frame

PART = 2**26
"""Bytes of an array of a message at most; Flower sends arrays in chunks of its own."""


def pack(frame: Frame) -> RecordDict:
    """Make a message's content of a frame."""
    body = frame.body
    parts = [body[i : i + PART] for i in range(0, len(body), PART)]
    arrays = {
        f"{i:06d}": Array(dtype="uint8", shape=(len(part),), stype="bytes", data=part)
        for i, part in enumerate(parts)
    }
    head = ConfigRecord({"frame": json.dumps(frame.head), "parts": len(parts)})
    return RecordDict({"head": head, "body": ArrayRecord(arrays)})


def unpack(content: Any) -> Frame:
    """Read a message's content.

    Raises:
        ValueError: it is none of :func:`pack`.
    """
    try:
        head, body = content["head"], content["body"]
        parts = [body[f"{i:06d}"].data for i in range(int(head["parts"]))]
        frame = Frame(json_text.parse(head["frame"]), b"".join(parts))
        if not isinstance(frame.head["id"], str):
            raise TypeError("its id is no text")
    except Exception as error:  # whatever another app's content can raise
        raise ValueError(f"no frame of jaxvlm: {type(error).__name__}: {error}") from None
    return frame
