"""Settings: dataclasses inside, a ConfigDict at the door."""

from jaxvlm.config.convert import ConfigError, default_config, from_config_dict, to_config_dict
from jaxvlm.config.derived import feature_blocks, layer_windows
from jaxvlm.config.schema import (
    CacheConfig,
    CheckpointConfig,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    DualConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RelevanceConfig,
    RopeScaling,
    StrategyConfig,
    TextConfig,
    TokenizerConfig,
    TowerConfig,
    TrainConfig,
    VisionConfig,
)
from jaxvlm.config.unread import refuse_unread

__all__ = [
    "CacheConfig",
    "CheckpointConfig",
    "ConfigError",
    "ConnectorConfig",
    "DataConfig",
    "DecoderConfig",
    "DualConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "RelevanceConfig",
    "RopeScaling",
    "StrategyConfig",
    "TextConfig",
    "TokenizerConfig",
    "TowerConfig",
    "TrainConfig",
    "VisionConfig",
    "default_config",
    "feature_blocks",
    "from_config_dict",
    "layer_windows",
    "refuse_unread",
    "to_config_dict",
]
