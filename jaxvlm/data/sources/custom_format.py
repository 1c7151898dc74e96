"""Data in a format of the user's own: what ``config.data.format`` names reads a file's records."""

from __future__ import annotations

import os
from typing import Any

from jaxvlm.config import ConfigError, DataConfig, Extension, extension, refuse_unread_by
from jaxvlm.data.errors import DataError, Problem

PATH = "config.data.format"
BUILT_IN = Extension()
"""Files are in one of the formats that jaxvlm reads."""


def read_items(config: DataConfig, spec: str, kind: type) -> list[tuple[str, Any]]:
    """Records of a file, as the user's own reader gives them.

    Args:
        config: data settings, whose ``format`` names a function of a file's name, or a frozen
            dataclass with ``__call__``. It gives, for each record, a dict in a built-in format or a
            ``kind``, or a Problem where it can't be read.
        spec: the file, as ``config.data.train`` or ``config.data.eval`` names it.
        kind: what the run trains on: Record or Example.

    Returns:
        ``[("file[index]", record)]``.

    Raises:
        ConfigError: the extension can't be used, or a setting has no effect on what it gives.
        DataError: reading the file failed.
    """
    data_format = config.format
    reader, what = extension.make(data_format, PATH), f"{PATH}.target={data_format.target!r}"
    if not callable(reader):
        raise ConfigError(f"{what} is no function of a file's name, and has no __call__")
    try:
        given = reader(spec)
        if isinstance(given, str | bytes | dict) or not hasattr(given, "__iter__"):
            shown = "None" if given is None else f"an object of type {type(given).__name__}"
            raise DataError(f"{spec}: {what} returned {shown}; it must give an iterable of records")
        items = list(given)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # whatever a user's reader may raise
        source = data_format.target.partition(":")[0]
        raise DataError(f"{spec}: {what} failed {extension.failure(error, source)}") from error
    for item in items:
        if not isinstance(item, dict | Problem | kind):
            raise DataError(
                f"{spec}: {what} gave a {type(item).__name__}; it must give a dict, a "
                f"{kind.__name__} or a Problem for each record"
            )
    if not items:
        raise DataError(f"{spec}: {what} gave no record")
    given = {
        kind.__name__ if isinstance(item, kind) else "dict"
        for item in items
        if not isinstance(item, Problem)
    }
    if given:
        refuse_unread_by(config, given)
    name = os.path.basename(spec)
    return [(f"{name}[{i}]", _named(item, f"{name}[{i}]", name)) for i, item in enumerate(items)]


def _named(item: Any, where: str, file: str) -> Any:
    """A Problem with an id that names its file."""
    if not isinstance(item, Problem) or file in item.id:
        return item
    return item._replace(id=f"{file}: {item.id}" if item.id else where)
