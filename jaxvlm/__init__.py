"""jaxvlm: train, fine-tune and embed with vision-language models in JAX, on any mesh."""

import importlib
from typing import Any

__version__ = "0.1.0"
_WHERE = {
    "Callback": "jaxvlm.train.callbacks",
    "Config": "jaxvlm.config",
    "Trainer": "jaxvlm.trainer.trainer",
    "load": "jaxvlm.inference.load",
    "video": "jaxvlm.inference.prompts",
}
__all__ = ["Callback", "Config", "Trainer", "load", "video"]


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: ``--help`` needs no JAX."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'jaxvlm' has no attribute {name!r}")
