"""The composition root: settings to objects. The only place that may import everything."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxvlm.build.encoder import Encoder
    from jaxvlm.build.loaded import Loaded, load
    from jaxvlm.build.run import Run

__all__ = ["Encoder", "Loaded", "Run", "load"]
_WHERE = {"Encoder": "encoder", "Loaded": "loaded", "load": "loaded", "Run": "run"}


def __getattr__(name: str) -> Any:
    """Imported when asked for: a plan needs none of checkpoints, data and tokenizers."""
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(f"jaxvlm.build.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'jaxvlm.build' has no attribute {name!r}")
