"""Which parameters are frozen, decayed, or learn at another rate: path patterns."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from jaxvlm.config import ConfigError
from jaxvlm.types import Logical


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether ``path`` matches one of the shell-like ``patterns`` (``*`` crosses slashes)."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def check_patterns(field: str, patterns: Sequence[str], paths: Iterable[str]) -> None:
    """Refuse a pattern that no parameter matches: it would silently do nothing.

    Raises:
        ConfigError: the pattern, and the parameters' leading names.
    """
    paths = list(paths)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            known = sorted({path.split("/")[0] + "/*" for path in paths})
            raise ConfigError(f"{field}: no parameter matches {pattern!r}; try {', '.join(known)}")


def decayed(
    logical: dict[str, Logical], decay: Sequence[str], no_decay: Sequence[str]
) -> dict[str, bool]:
    """Which parameters weight decay applies to: matrices between widths, and what is asked for.

    Norms, biases, embeddings and positions are left alone.

    Args:
        logical: path -> words.
        decay: patterns to decay besides.
        no_decay: patterns never to decay.
    """

    def is_matrix(path: str, words: Logical) -> bool:
        inner = [word for word in words if word != "layers"]
        embedding = path.endswith("embed/table")
        return len(inner) > 1 and "position" not in inner and not embedding and not _bias(inner)

    return {
        path: (is_matrix(path, words) or matches(path, decay)) and not matches(path, no_decay)
        for path, words in logical.items()
    }


def _bias(words: Sequence[str]) -> bool:
    """A bias of split heads has two dims and no input."""
    return tuple(words) in (("heads", "head_dim"), ("kv_heads", "head_dim"))
