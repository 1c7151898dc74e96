"""Settings of parallelism: the device mesh, the sharding strategy, a disaggregated encoder."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sets the number of devices along each mesh axis; one axis may be -1, all remaining
    devices."""

    data: int = -1
    """Sets the size of the data axis, over which the batch is split; the default -1 takes all
    remaining devices, and 0 lets the planner choose all axes (docs/planning.md)."""
    fsdp: int = 1
    """Sets the size of the fsdp axis, over which the batch and, per config.strategy, the train
    state are sharded."""
    tensor: int = 1
    """Sets the size of the tensor axis, over which attention heads, MLP widths and the vocabulary
    are split."""
    context: int = 1
    """Sets the size of the context axis, over which the tokens of a sequence are split."""
    expert: int = 1
    """Sets the size of the expert axis, over which the batch and the experts of a mixture are
    split."""
    pipeline: int = 1
    """Sets the size of the pipeline axis: the number of pipeline stages that the decoder's layers
    are divided into (see config.strategy.schedule)."""
    island: int = 1
    """Sets the number of islands: parts of the mesh, each with all its other axes, that train
    parameters of their own on their share of the batch, and exchange nothing but the outer updates
    of config.outer (DiLoCo). For slow links; the default 1 means that gradients are averaged in
    each step."""


@dataclasses.dataclass(frozen=True)
class StrategyConfig:
    """Chooses the batch axes of the mesh (data, fsdp) over which each part of the state is sharded.

    Sequences of a batch are always split over both. The axes of ``all_gathered`` are among those of
    ``params``, and these among those of ``optimizer``.
    """

    name: str = ""
    """Chooses a preset, which sets ``params``, ``all_gathered``, ``gradients`` and ``optimizer``,
    and puts the devices that config.mesh gives to no axis on the preset's own axis; 'auto' lets the
    planner choose all of this, and the default "" uses the fields as they are. Allowed values: '',
    'auto', 'single', 'ddp', 'zero1', 'zero2', 'zero3', 'fsdp', 'fsdp_no_reshard', 'hybrid_shard',
    'hpz'."""
    params: tuple[str, ...] = ("fsdp",)
    """Lists the axes over which parameters are sharded between steps. Allowed values: 'data',
    'fsdp'."""
    all_gathered: tuple[str, ...] = ("fsdp",)
    """Lists the axes over which parameters stay sharded within a step: axes of ``params`` that are
    not listed are all-gathered when the step begins, and the listed ones layer by layer, in the
    forward pass and again in the backward pass. Allowed values: 'data', 'fsdp'."""
    gradients: tuple[str, ...] = ("fsdp",)
    """Lists the axes over which the sum of the microbatches' gradients is sharded. Allowed values:
    'data', 'fsdp'."""
    optimizer: tuple[str, ...] = ("fsdp",)
    """Lists the axes over which the optimizer's moments and the update are sharded. Allowed values:
    'data', 'fsdp'."""
    replicated: tuple[str, ...] = ()
    """Lists submodels whose parameters are replicated on every device, e.g. 'vision'."""
    context: str = "gather"
    """Chooses how attention works across the context axis: keys and values are all-gathered
    ('gather') or passed around a ring ('ring'), or heads are split instead of tokens ('ulysses').
    Allowed values: 'gather', 'ring', 'ulysses'."""
    param_gather_dtype: str = "float32"
    """Chooses the dtype in which parameters are sent in the all-gather from ``params`` to
    ``all_gathered`` when a step begins; 'int8' sends a float32 scale with each block of values.
    Allowed values: 'float32', 'int8'."""
    offload: tuple[str, ...] = ()
    """Lists what is kept in host memory between steps; 'optimizer' means the moments. Allowed
    values: 'optimizer'."""
    grad_reduce_dtype: str = "float32"
    """Chooses the dtype in which gradients are sent in the reduction over the batch axes that are
    not in ``all_gathered``, or over all of them where all are in it; 'int8' and 'int4' send a
    float32 scale with each block of values.
    Allowed values: 'float32', 'bfloat16', 'int8', 'int4'."""
    error_feedback: bool = False
    """Adds the rounding error of ``grad_reduce_dtype`` to the next step's gradient."""
    sequence_parallel: bool = False
    """Splits norms and the residual stream over the tensor axis too, by tokens."""
    schedule: str = "1f1b"
    """Chooses the pipeline schedule over the mesh's pipeline axis. Allowed values: '1f1b',
    'interleaved', 'gpipe', 'zero_bubble'."""
    virtual_stages: int = 1
    """Sets the number of layer groups that each pipeline stage holds: 2 or more with
    ``schedule='interleaved'``, otherwise 1."""


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Puts the vision encoder on devices of its own (disaggregated), with a mesh and a strategy."""

    devices: int = 0
    """Sets how many of the run's devices the vision encoder has to itself: the first ones, or as
    many of each process's. The default 0 keeps it on config.mesh with the rest of the model; -1
    assigns devices in proportion to the encoder's share of a step's FLOPs, counted on the run's
    first batch."""
    mesh: MeshConfig = MeshConfig()
    """Groups the sizes of the mesh of the vision encoder's devices."""
    strategy: StrategyConfig = StrategyConfig()
    """Groups the sharding settings of the vision encoder on its own devices."""
    microbatches_in_flight: int = 0
    """Sets how many microbatches a trained vision encoder encodes before they enter the pipeline
    together; it needs config.mesh.pipeline above 1 and must divide config.microbatches. The default
    0 takes the number that is fastest if the encoder takes as long as the pipeline stages."""
