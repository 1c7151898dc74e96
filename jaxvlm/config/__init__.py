"""Settings of a run as frozen dataclasses, and their conversion from and to a ConfigDict."""

from jaxvlm.config.cache import CacheConfig
from jaxvlm.config.convert import ConfigError, by_path, changes, check_choice, to_config_dict
from jaxvlm.config.data import DataConfig, PairDataConfig, TokenizerConfig, VideoConfig
from jaxvlm.config.derived import (
    GRAD_REDUCE_BITS,
    PARAM_GATHER_DTYPES,
    cache_halvings,
    dropout_rates,
    encoder_blocks,
    feature_blocks,
    grad_reduce_bits,
    layer_windows,
    uses_cache,
)
from jaxvlm.config.embed import (
    DualConfig,
    EmbeddingConfig,
    GradCacheConfig,
    PairLossConfig,
    TextConfig,
)
from jaxvlm.config.extension import Extension, LossConfig
from jaxvlm.config.federate import FederateConfig
from jaxvlm.config.mixture import SourceConfig, check_mixture
from jaxvlm.config.model import (
    ConnectorConfig,
    DecoderConfig,
    LoraConfig,
    ModelConfig,
    RelevanceConfig,
    RopeScaling,
    VisionConfig,
)
from jaxvlm.config.optim import OptimConfig
from jaxvlm.config.outer import OuterConfig
from jaxvlm.config.parallel import EncoderConfig, MeshConfig, StrategyConfig
from jaxvlm.config.train import CheckpointConfig, Config, default_config, from_config_dict
from jaxvlm.config.unread import formats_of, refuse_changed, refuse_unread, refuse_unread_by

__all__ = [
    "GRAD_REDUCE_BITS",
    "PARAM_GATHER_DTYPES",
    "CacheConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "ConnectorConfig",
    "DataConfig",
    "DecoderConfig",
    "DualConfig",
    "EmbeddingConfig",
    "EncoderConfig",
    "Extension",
    "FederateConfig",
    "GradCacheConfig",
    "LoraConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "OuterConfig",
    "PairDataConfig",
    "PairLossConfig",
    "RelevanceConfig",
    "RopeScaling",
    "SourceConfig",
    "StrategyConfig",
    "TextConfig",
    "TokenizerConfig",
    "VideoConfig",
    "VisionConfig",
    "by_path",
    "cache_halvings",
    "changes",
    "check_choice",
    "check_mixture",
    "default_config",
    "dropout_rates",
    "encoder_blocks",
    "feature_blocks",
    "formats_of",
    "from_config_dict",
    "grad_reduce_bits",
    "layer_windows",
    "refuse_changed",
    "refuse_unread",
    "refuse_unread_by",
    "to_config_dict",
    "uses_cache",
]
