"""Settings of the optimizer and the learning-rate schedule."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Configures AdamW and its learning-rate schedule with linear warm-up."""

    learning_rate: float = 1e-3
    """Sets the peak learning rate, which is reached at the end of warm-up."""
    schedule: str = "cosine"
    """Chooses how the learning rate decays after warm-up. Allowed values: 'cosine', 'linear',
    'constant'."""
    warmup_steps: int | float = 0.05
    """Sets the length of the linear warm-up in steps; a number below 1 is a fraction of all
    steps."""
    min_lr_ratio: float = 0.0
    """Sets the learning rate at the last step as a fraction of ``learning_rate``."""
    b1: float = 0.9
    """Sets the decay rate of Adam's first moment."""
    b2: float = 0.999
    """Sets the decay rate of Adam's second moment."""
    eps: float = 1e-8
    """Sets the epsilon in the denominator of Adam's update."""
    weight_decay: float = 0.0
    """Sets the decoupled weight decay, which applies to matrices but not to norms, biases,
    embeddings and positions."""
    decay: tuple[str, ...] = ()
    """Lists path patterns of parameters that are decayed in addition to the matrices, e.g.
    'decoder/embed/*'."""
    no_decay: tuple[str, ...] = ()
    """Lists path patterns of parameters that are never decayed."""
    max_grad_norm: float = 1.0
    """Clips gradients to this global norm; 0 means no clipping."""
    frozen: tuple[str, ...] = ()
    """Lists path patterns of parameters that are not trained and take no optimizer memory, e.g.
    ('vision/*',)."""
    frozen_dtype: str = "checkpoint"
    """Chooses the dtype in which frozen weights are stored, those under adapters included:
    'checkpoint' keeps each weight as it is in the files that it is read from, which rounds nothing;
    weights that are in no file are float32. Allowed values: 'checkpoint', 'bfloat16',
    'float32'."""
    lr_multipliers: tuple[tuple[str, float], ...] = ()
    """Lists pairs of a path pattern and a factor on the learning rate, e.g. (('vision/*', 0.1),);
    the first pattern that matches a parameter applies to it."""
