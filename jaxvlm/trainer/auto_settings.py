"""Which settings a recipe leaves to the planner; needs no planner itself."""

from __future__ import annotations

from jaxvlm.config import Config
from jaxvlm.spmd.gradcache import AUTO as AUTO_CHUNK

AUTO = "auto"


def auto_settings(config: Config) -> list[str]:
    """Names of the settings that a recipe leaves to the planner."""
    is_auto = {
        "strategy.name": config.strategy.name == AUTO,
        "mesh.data": config.mesh.data == 0,
        "model.vision.remat": config.model.vision.remat == AUTO,
        "model.decoder.remat": config.model.decoder.remat == AUTO,
        "dual.vision.remat": config.dual.vision.remat == AUTO,
        "dual.text.remat": config.dual.text.remat == AUTO,
        "microbatches": config.microbatches == 0,
        "grad_cache.query_mini_batch": config.grad_cache.query_mini_batch == AUTO_CHUNK,
        # Refused by the planner, which knows one mesh only.
        "encoder.strategy.name": config.encoder.strategy.name == AUTO,
    }
    return [name for name, auto in is_auto.items() if auto]
