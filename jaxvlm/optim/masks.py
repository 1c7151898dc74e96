"""Path patterns of parameters, and the weight-decay mask."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from jaxvlm.config import ConfigError
from jaxvlm.types import Logical


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether ``path`` matches one of the shell-like ``patterns`` (``*`` crosses slashes)."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def check_patterns(field: str, patterns: Sequence[str], paths: Iterable[str]) -> None:
    """Refuse a pattern that no parameter matches: it would silently have no effect.

    Raises:
        ConfigError: names the pattern, and the parameters' top-level names.
    """
    paths = list(paths)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            known = sorted({path.split("/")[0] + "/*" for path in paths})
            raise ConfigError(f"{field}: no parameter matches {pattern!r}; try {', '.join(known)}")


def decayed(
    logical: dict[str, Logical], decay: Sequence[str], no_decay: Sequence[str]
) -> dict[str, bool]:
    """Return the weight-decay mask: matrices, and what ``decay`` adds.

    Norms, biases, embeddings and positions are not decayed by default.

    Args:
        logical: path -> logical axes.
        decay: patterns of further parameters to decay.
        no_decay: patterns of parameters never to decay.
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
    """Whether the axes are those of a bias of split heads, which has two dims but no input."""
    return tuple(words) in (("heads", "head_dim"), ("kv_heads", "head_dim"))
