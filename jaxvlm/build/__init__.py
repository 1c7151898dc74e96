"""The composition root: settings to objects. The only place that may import everything."""

from jaxvlm.build.encoder import Encoder
from jaxvlm.build.loaded import Loaded, load
from jaxvlm.build.run import Run

__all__ = ["Encoder", "Loaded", "Run", "load"]
