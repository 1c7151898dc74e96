"""What follows from settings alone, for rooms that do not import each other."""

from __future__ import annotations

from jaxvlm.config.schema import DecoderConfig


def layer_windows(config: DecoderConfig) -> list[int]:
    """Positions that each layer's queries see, layer by layer; 0 is all."""
    pattern = config.window_pattern
    return [config.window if pattern[i % len(pattern)] else 0 for i in range(config.depth)]
