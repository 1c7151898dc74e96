"""Settings of a run: every group, its length, evaluations, checkpoints and logs."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_collections

from jaxvlm.config.cache import CacheConfig
from jaxvlm.config.convert import check_ranges, checked_fields, to_config_dict
from jaxvlm.config.data import DataConfig, TokenizerConfig
from jaxvlm.config.embed import DualConfig, EmbeddingConfig, GradCacheConfig, PairLossConfig
from jaxvlm.config.extension import LossConfig
from jaxvlm.config.federate import FederateConfig
from jaxvlm.config.model import ModelConfig
from jaxvlm.config.optim import OptimConfig
from jaxvlm.config.outer import OuterConfig
from jaxvlm.config.parallel import EncoderConfig, MeshConfig, StrategyConfig


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Configures when checkpoints are written and which of them are kept."""

    every: int = 500
    """Sets the number of steps between checkpoints; 0 writes them only at evaluations, at the end
    and on SIGTERM."""
    keep: int = 2
    """Sets how many of the newest checkpoints are kept, in addition to the best one."""
    metric: str = ""
    """Names the evaluation metric that decides which checkpoint is the best; the default "" means
    exact_match, or recall@1 for embeddings."""
    mode: str = "max"
    """Chooses whether a higher or a lower ``metric`` is better. Allowed values: 'max', 'min'."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Configures one training run."""

    model: ModelConfig = ModelConfig()
    """Groups the settings of the vision-language model."""
    mesh: MeshConfig = MeshConfig()
    """Groups the sizes of the device mesh."""
    strategy: StrategyConfig = StrategyConfig()
    """Groups the settings of sharding and parallelism."""
    encoder: EncoderConfig = EncoderConfig()
    """Groups the settings of a vision encoder on devices of its own."""
    cache: CacheConfig = CacheConfig()
    """Groups the settings of the visual-token cache."""
    optim: OptimConfig = OptimConfig()
    """Groups the settings of the optimizer."""
    outer: OuterConfig = OuterConfig()
    """Groups the settings of outer updates, of islands and of federated training."""
    federate: FederateConfig = FederateConfig()
    """Groups the settings of federated training."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Groups the settings of the tokenizer."""
    data: DataConfig = DataConfig()
    """Groups the settings of the data."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Groups the settings of checkpoints."""
    seed: int = 0
    """Seeds initial weights, data order, augmentation and dropout."""
    steps: int = 0
    """Sets the length of the run in steps; exactly one of ``steps`` and ``epochs`` is above 0."""
    epochs: float = 0.0
    """Sets the length of the run in epochs, fractions included; exactly one of ``steps`` and
    ``epochs`` is above 0."""
    microbatches: int = 1
    """Splits each batch into this many microbatches whose gradients are accumulated; 0 lets the
    planner choose. With pairs, use ``grad_cache`` instead."""
    loss: LossConfig = LossConfig()
    """Groups the settings of the training loss."""
    embedder: str = "vlm"
    """Chooses the model that computes embeddings, with a loss of pairs: 'vlm' is the
    vision-language model of config.model and config.embedding, 'dual' the dual encoder of
    config.dual. Allowed values: 'vlm', 'dual'."""
    dual: DualConfig = DualConfig()
    """Groups the settings of a dual encoder."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    """Groups the settings that make a vision-language model compute embeddings."""
    pair_loss: PairLossConfig = PairLossConfig()
    """Groups the settings of the losses of pairs."""
    grad_cache: GradCacheConfig = GradCacheConfig()
    """Groups the settings of gradient caching for losses of pairs."""
    loss_chunk: int = 0
    """Sets the number of entries of the vocabulary whose logits are in memory at once, in losses
    over tokens; the default 0 chooses it by the sequence length."""
    moe_aux_loss_weight: float = 0.0
    """Sets the weight of the load-balancing loss of a mixture of experts. Each microbatch is
    balanced by itself, and the loss is their mean, weighted by tokens; so it depends on
    ``microbatches``."""
    init_from: str = ""
    """Names the workdir of another run whose weights this run starts from, with a new optimizer and
    at step 0; the default "" names none."""
    log_every: int = 20
    """Sets the number of steps between log lines; at least 1."""
    eval_every: int = 0
    """Sets the number of steps between evaluations; the default 0 evaluates only at the end."""
    eval_records: int = 0
    """Limits the records that an evaluation uses, always the same ones; the default 0 uses all."""
    early_stop: int = 0
    """Ends the run after this many evaluations in a row without a better metric; the default 0
    never ends it early."""
    max_bad_steps: int = 10
    """Stops the run after this many steps in a row with a loss or gradient that is not finite; at
    least 1."""
    profile_steps: tuple[int, int] = (0, 0)
    """Records a profiler trace from the first of these steps up to, but not including, the second;
    the default (0, 0) records none."""
    memory_estimate: bool = False
    """Logs the planner's estimate of memory and step time at the start of the run."""
    compile_cache: str = "auto"
    """Names the folder of compiled programs; 'auto' means the user's cache folder and "" turns it
    off."""
    tensorboard: bool = True
    """Writes metrics as TensorBoard events too."""
    wandb_project: str = ""
    """Names the Weights & Biases project that metrics are sent to; the default "" sends none."""
    mlflow_experiment: str = ""
    """Names the MLflow experiment that metrics are sent to, on the server of the variable
    MLFLOW_TRACKING_URI; the default "" sends none."""
    trackio_project: str = ""
    """Names the Trackio project that metrics are sent to; the default "" sends none."""
    prometheus_port: int = 0
    """Sets the port of process 0's machine on which Prometheus finds the latest metrics, as can
    anybody who reaches it; the default 0 opens none."""

    @property
    def network(self) -> ModelConfig | DualConfig:
        """The model of the run."""
        return self.dual if self.embedder == "dual" else self.model


def default_config() -> ml_collections.ConfigDict:
    """All defaults of a training run as a ConfigDict, for a recipe to change."""
    return to_config_dict(Config())


def from_config_dict(values: Any) -> Config:
    """Convert a ConfigDict, or check a Config; see :func:`jaxvlm.config.convert.checked_fields`.

    Raises:
        ConfigError: an unknown key, a value of a wrong type, or a number that is out of range.
    """
    config = Config(**checked_fields(values, Config, "config"))
    check_ranges(config, "config")
    return config
