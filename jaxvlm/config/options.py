"""Settings that a class of the user's own defines: a mapping that can be compared and hashed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Options(dict[str, Any]):
    """Settings of an extension by name, with lists as tuples and nested groups as ``Options``."""

    def __init__(self, values: Any = ()):
        super().__init__({str(key): _frozen(value) for key, value in dict(values).items()})

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none; settings never change
        return hash(frozenset(self.items()))


NO_OPTIONS = Options()


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return Options(value)
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
