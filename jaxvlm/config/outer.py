"""Settings of outer updates, which combine what workers have trained apart for some steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """Configures outer updates: islands of a mesh (config.mesh.island) or sites of a federation
    train apart for some steps, and then an outer optimizer updates the parameters that they share
    by the mean of their changes (FedAvg, FedOpt, DiLoCo)."""

    steps: int = 100
    """Sets the number of train steps between two outer updates; at least 1."""
    optimizer: str = "sgd"
    """Chooses the outer optimizer, whose gradient is minus the mean change: 'sgd' with learning
    rate 1 is FedAvg, with a momentum FedAvgM, and 'nesterov' is DiLoCo's. Allowed values: 'sgd',
    'nesterov', 'adam', 'yogi', 'adagrad'."""
    learning_rate: float = 1.0
    """Sets the learning rate of the outer optimizer."""
    momentum: float = 0.0
    """Sets the momentum of the outer optimizers 'sgd' and 'nesterov'; 0 means none."""
    b1: float = 0.9
    """Sets the decay rate of the first moment of the outer optimizers 'adam' and 'yogi'."""
    b2: float = 0.99
    """Sets the decay rate of the second moment of the outer optimizers 'adam' and 'yogi'."""
    eps: float = 1e-3
    """Sets the epsilon in the denominator of the outer optimizers 'adam', 'yogi' and 'adagrad'."""
    fragments: int = 1
    """Divides the trained parameters of islands into this many fragments of about equal size, each
    with outer updates of its own every ``steps`` steps, in turn (streaming DiLoCo)."""
    overlap_steps: int = 0
    """Sets how many train steps after an outer update of islands its result is mixed into their
    parameters; the default 0 sets them to it at once."""
    mixing: float = 0.5
    """Sets the share that an island keeps of its own parameters where ``overlap_steps`` mixes the
    shared ones into them; 0 to below 1."""
    delta_dtype: str = "float32"
    """Chooses the dtype in which changes of parameters are sent; 'int8' and 'int4' send a float32
    scale with each block of values. Allowed values: 'float32', 'bfloat16', 'int8', 'int4'."""
    error_feedback: bool = True
    """Adds the rounding error of ``delta_dtype`` to the next change that is sent."""
    moments: str = "keep"
    """Chooses what becomes of the moments of the training optimizer at an outer update: 'keep' goes
    on with them, 'reset' sets them to zero. Allowed values: 'keep', 'reset'."""
