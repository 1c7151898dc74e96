"""Settings of embedding models: dual encoders, embedding heads, losses of pairs, GradCache."""

from __future__ import annotations

import dataclasses

from jaxvlm.config.model import LoraConfig, VisionConfig


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Describes a text encoder with learned positions, which gives one embedding per text."""

    vocab_size: int = 0
    """Sets the number of token ids; the default 0 means the tokenizer's vocabulary."""
    width: int = 64
    """Sets the width of the hidden states."""
    depth: int = 2
    """Sets the number of transformer blocks."""
    num_heads: int = 4
    """Sets the number of attention heads, which must divide ``width``."""
    mlp_dim: int = 256
    """Sets the width of the hidden layer of each MLP."""
    max_length: int = 64
    """Sets the number of positions in the table of position embeddings, and so the longest text in
    tokens."""
    num_types: int = 0
    """Sets the number of token types in the table of type embeddings; the default 0 leaves the
    table out."""
    activation: str = "gelu"
    """Chooses the activation of the MLPs. Allowed values: 'gelu', 'gelu_tanh', 'quick_gelu',
    'silu', 'relu'."""
    causal: bool = False
    """Limits the attention of a token to itself and the tokens before it; with False it attends to
    the whole text."""
    norm_after: bool = False
    """Applies norms as BERT does, after the embeddings and after each residual addition, with none
    at the end; with False the blocks are pre-norm."""
    norm_eps: float = 1e-6
    """Sets the epsilon that the norms add to the variance."""
    pool: str = "mean"
    """Chooses the hidden state that becomes the embedding: the mean of the real tokens, the first
    token ('class'), the last, the one with the largest id ('largest'), the first one that is
    ``eos_id`` ('eos'), the first after a linear layer and tanh ('pooler'), or the last position of
    the sequence, padding or not ('end'). Allowed values: 'mean', 'class', 'last', 'largest', 'eos',
    'pooler', 'end'."""
    eos_id: int = -1
    """Sets the token id that ``pool='eos'`` looks for; the default -1 names none."""
    pooler: bool = False
    """Gives the encoder BERT's linear layer on the first token, whether or not ``pool`` uses it."""
    dropout: float = 0.0
    """Sets the dropout rate on the embeddings and on the output of attention and of the MLP in each
    block, in training only."""
    attention_dropout: float = 0.0
    """Sets the dropout rate on attention weights, in training only."""
    remat: str = "dots"
    """Chooses which activations are recomputed in the backward pass: 'none' recomputes nothing,
    'dots' saves the outputs of matmuls with weights and of attention kernels, 'full' saves only the
    inputs of blocks, 'offload' saves these in host memory, and 'auto' lets the planner choose.
    'dots' is as fast as 'none' or faster, in a third of the memory. Allowed values: 'none', 'dots',
    'full', 'offload', 'auto'."""


@dataclasses.dataclass(frozen=True)
class DualConfig:
    """Describes a dual encoder of images and texts in one embedding space, or one tower alone."""

    towers: tuple[str, ...] = ("vision", "text")
    """Lists the towers that the model has. Allowed values: 'vision', 'text'."""
    vision: VisionConfig = VisionConfig(pool="attention")
    """Groups the settings of the vision encoder."""
    text: TextConfig = TextConfig()
    """Groups the settings of the text encoder."""
    embed_dim: int = 64
    """Sets the width of the embeddings."""
    project: tuple[str, ...] = ("vision", "text")
    """Lists the towers whose output a linear map brings to ``embed_dim``; a tower that is not
    listed must have that width already. Allowed values: 'vision', 'text'."""
    project_bias: bool = False
    """Adds a bias to the linear maps of ``project``."""
    normalize: bool = True
    """Scales embeddings to length 1."""
    scale: float = 2.6592
    """Sets the initial value of the learned log-temperature: logits are exp(scale) times the
    similarity."""
    bias: float = 0.0
    """Sets the initial value of the bias of the logits that ``has_bias`` adds."""
    has_bias: bool = False
    """Gives the logits a learned bias, as SigLIP does."""
    dtype: str = "float32"
    """Chooses the dtype of the computation; trained parameters and the optimizer's moments are
    always float32, and config.optim.frozen_dtype is the dtype of frozen ones. Allowed values:
    'float32', 'bfloat16'."""
    attention: str = "auto"
    """Chooses the attention backend; 'auto' takes cuDNN or flash on GPU, flash on TPU and XLA
    elsewhere. Allowed values: 'auto', 'xla', 'cudnn', 'flash'."""
    checkpoint: str = ""
    """Names a Hugging Face folder or hub id from which the whole model is loaded; the default ""
    starts from random weights."""
    vision_checkpoint: str = ""
    """Names the folder or hub id of a CLIP or SigLIP model, or the workdir of a run that trained
    its vision encoder from scratch, from which the vision encoder is loaded; the default "" names
    none."""
    text_checkpoint: str = ""
    """Names the folder or hub id of a CLIP, SigLIP or BERT model from which the text encoder is
    loaded; the default "" names none."""
    lora: LoraConfig = LoraConfig()
    """Groups the settings of low-rank adapters."""


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """Describes how a vision-language model turns its hidden states into embeddings."""

    pool: str = "last"
    """Chooses which hidden states of the real tokens become the embedding: the last one ('last'),
    their mean ('mean'), the first one ('first'), or one embedding per token for late interaction
    ('tokens'). Allowed values: 'last', 'mean', 'first', 'tokens'."""
    dim: int = 0
    """Sets the output width of a linear map after pooling; the default 0 leaves the map out."""
    normalize: bool = True
    """Scales embeddings to length 1."""
    learn_scale: bool = False
    """Learns the scale that cosine similarities are multiplied by."""
    scale: float = 3.0
    """Sets the initial value of the logarithm of the scale that ``learn_scale`` learns."""
    learn_bias: bool = False
    """Learns a bias that is added to the logits, for SigLIP's sigmoid loss."""
    bias: float = 0.0
    """Sets the initial value of the bias that ``learn_bias`` learns."""


@dataclasses.dataclass(frozen=True)
class PairLossConfig:
    """Configures the losses that train embeddings on pairs (docs/embedding.md)."""

    temperature: float = 0.05
    """Divides similarities by this number; 0 uses the model's learned scale instead."""
    max_scale: float = 100.0
    """Limits the scale that is learned where ``temperature`` is 0; 0 means no limit."""
    similarity: str = "cosine"
    """Chooses the similarity of two embeddings: their cosine or their dot product. Allowed values:
    'cosine', 'dot'."""
    directions: tuple[str, ...] = ("query_to_document",)
    """Lists the comparisons that info_nce makes; 'query_to_document' must be among them. Allowed
    values: 'query_to_document', 'document_to_query', 'query_to_query', 'document_to_document'."""
    softmax_scope: str = "joint"
    """Chooses whether info_nce takes one softmax over all ``directions`` ('joint') or one for each
    of them ('each'). Allowed values: 'joint', 'each'."""
    negatives_from: str = "batch"
    """Chooses where info_nce takes a query's negatives from: the global batch ('batch'), the
    examples on its own device ('shard'), or its own explicit hard negatives ('own'). Allowed
    values: 'batch', 'shard', 'own'."""
    false_negative_filter: str = "none"
    """Chooses which likely positives info_nce removes from the negatives: none, those with a
    similarity above the positive's plus ``margin`` ('absolute'), or above the positive's plus
    ``margin`` times its absolute value ('relative'). Allowed values: 'none', 'absolute',
    'relative'."""
    margin: float = 0.0
    """Sets the margin of ``false_negative_filter`` and of the triplet loss."""
    distance: str = "cosine"
    """Chooses the distance of the triplet loss. Allowed values: 'cosine', 'euclidean'."""
    teacher_temperature: float = 1.0
    """Divides the teacher's scores by this number, in the distill loss."""
    tile_size: int = 0
    """Sets the number of examples on each side of a tile of similarities; one tile is in memory at
    a time. The default 0 chooses the number by memory."""
    matryoshka_dims: tuple[int, ...] = ()
    """Lists the lengths of embedding prefixes that are trained too (Matryoshka); the default ()
    means none."""
    matryoshka_weights: tuple[float, ...] = ()
    """Lists the weight of the loss for each of ``matryoshka_dims``; the default () means 1 each."""
    precisions: tuple[str, ...] = ()
    """Lists the precisions of stored embeddings that the loss trains for and that evaluations
    report; the default () means float32 alone. Allowed values: 'float32', 'int8', 'binary'."""


@dataclasses.dataclass(frozen=True)
class GradCacheConfig:
    """Computes embeddings and their exact gradients in mini-batches (GradCache)."""

    query_mini_batch: int = 0
    """Limits how many query sequences a data shard runs at once; on a pipeline
    (config.mesh.pipeline) such a mini-batch is a microbatch. The default 0 means all at once; -1
    lets the planner choose this setting and ``document_mini_batch``, and needs the other settings
    of the group to be 0."""
    document_mini_batch: int = 0
    """Limits how many document sequences (positives and negatives) a data shard runs at once; the
    default 0 means all at once."""
    max_tokens: int = 0
    """Limits the token positions in the sequences of a mini-batch, padding included; the default 0
    means no limit."""
