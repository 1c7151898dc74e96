"""What follows from settings alone, for rooms that do not import each other."""

from __future__ import annotations

from jaxvlm.config.schema import DecoderConfig, VisionConfig


def layer_windows(config: DecoderConfig) -> list[int]:
    """Positions that each layer's queries see, layer by layer; 0 is all."""
    pattern = config.window_pattern
    return [config.window if pattern[i % len(pattern)] else 0 for i in range(config.depth)]


def feature_blocks(config: VisionConfig) -> tuple[int, ...]:
    """Blocks that are run before each feature layer is taken, in the order of the layers."""
    layers = config.feature_layers or (config.feature_layer,)
    return tuple(config.depth + 1 + layer for layer in layers)


def tower_blocks(config: VisionConfig) -> tuple[int, ...]:
    """Blocks that are run before each of the streams that lie side by side in ``vision``'s output.

    These are the feature layers; of a trunk its end, which is last, and the feature layers below.
    """
    taps = feature_blocks(config)
    if not config.trunk:
        return taps
    return (*sorted({n for n in taps if n < config.trunk}), config.trunk)
