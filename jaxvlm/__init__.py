"""jaxvlm: train, fine-tune and embed with vision-language models in JAX, on any mesh."""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "load"]
_WHERE = {"Run": "jaxvlm.build.run", "load": "jaxvlm.build.loaded"}


def __getattr__(name: str) -> Any:
    """``jaxvlm.Run`` and ``jaxvlm.load``, imported when asked for: ``--help`` needs no JAX."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'jaxvlm' has no attribute {name!r}")
