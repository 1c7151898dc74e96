"""The composition root: settings to objects. The only place that may import everything."""

from jaxvlm.build.loaded import Loaded, load
from jaxvlm.build.run import Run

__all__ = ["Loaded", "Run", "load"]
