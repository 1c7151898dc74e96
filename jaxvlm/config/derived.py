"""Values that follow from settings alone, for rooms that do not import each other."""

from __future__ import annotations

import math
from typing import Any

from jaxvlm.config.cache import CacheConfig
from jaxvlm.config.convert import ConfigError
from jaxvlm.config.model import DecoderConfig, VisionConfig
from jaxvlm.config.parallel import StrategyConfig

GRAD_REDUCE_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
"""``strategy.grad_reduce_dtype`` -> bits of a gradient's value on the wire, scales left out."""
PARAM_GATHER_DTYPES = ("float32", "int8")
"""Values of ``strategy.param_gather_dtype``."""


def grad_reduce_bits(config: StrategyConfig) -> int:
    """Number of bits in which a gradient's value is sent: 32, 16, 8 or 4."""
    return GRAD_REDUCE_BITS[config.grad_reduce_dtype]


def uses_cache(config: CacheConfig) -> bool:
    """Whether a step encodes its images separately, in encode batches, before its forward pass."""
    return config.policy != "off" or config.encode_batch > 0


def cache_halvings(config: CacheConfig) -> int:
    """Number of times that the cache's pages may be halved, from ``min_pages_fraction``.

    Raises:
        ConfigError: the fraction is not 1, 1/2, 1/4 and so on.
    """
    fraction = config.min_pages_fraction
    mantissa, exponent = math.frexp(fraction)  # mantissa in [0.5, 1)
    if 0 < fraction <= 1 and mantissa == 0.5:
        return 1 - exponent
    text = f"config.cache.min_pages_fraction={fraction:g}: 1.0, 0.5, 0.25, ... (1/2^n) are allowed"
    if not 0 < fraction < math.inf:
        raise ConfigError(text)
    near = 1.0
    if fraction < 1:
        near = min((2.0 ** (exponent - 1), 2.0**exponent), key=lambda x: abs(x - fraction))
    raise ConfigError(f"{text}; the nearest is {near:g}")


def dropout_rates(config: Any) -> dict[str, float]:
    """``submodel.field`` -> dropout rate, for a model's rates above 0; adapters not included."""
    rates = {
        f"{tower}.{field}": getattr(getattr(config, tower, None), field, 0.0)
        for tower in ("vision", "decoder", "text")
        for field in ("dropout", "attention_dropout")
    }
    return {name: rate for name, rate in rates.items() if rate}


def layer_windows(config: DecoderConfig) -> list[int]:
    """Number of positions that a query of each layer attends to, by layer; 0 means all."""
    pattern = config.window_pattern
    return [config.window if pattern[i % len(pattern)] else 0 for i in range(config.depth)]


def feature_blocks(config: VisionConfig) -> tuple[int, ...]:
    """Number of blocks that run before each feature layer is taken, in the order of the layers."""
    layers = config.feature_layers or (config.feature_layer,)
    return tuple(config.depth + 1 + layer for layer in layers)


def encoder_blocks(config: VisionConfig) -> tuple[int, ...]:
    """Number of blocks that run before each hidden state in the output of ``vision`` is taken.

    The hidden states are concatenated in this order. They are the feature layers; where the first
    blocks are frozen (``frozen_blocks``), they are the feature layers below the last frozen block
    and, at the end, the output of that block.
    """
    taps = feature_blocks(config)
    if not config.frozen_blocks:
        return taps
    return (*sorted({n for n in taps if n < config.frozen_blocks}), config.frozen_blocks)
