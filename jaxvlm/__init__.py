"""jaxvlm: train, fine-tune and embed with vision-language models in JAX, on any mesh."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "load"]


def __getattr__(name: str) -> Any:
    """``jaxvlm.Run`` and ``jaxvlm.load``, imported when asked for: ``--help`` needs no JAX."""
    if name in __all__:
        from jaxvlm import build

        return getattr(build, name)
    raise AttributeError(f"module 'jaxvlm' has no attribute {name!r}")
