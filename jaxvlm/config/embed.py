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
    """Sets the number of token types in the table of type embeddings; the default 0 means that
    there is no such table."""
    activation: str = "gelu"
    """Chooses the activation of the MLPs. Allowed values: 'gelu', 'gelu_tanh', 'quick_gelu',
    'silu', 'relu'."""
    causal: bool = False
    """Limits the attention of a token to the tokens before it; with False it sees all of the
    text."""
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
    """Gives the encoder BERT's linear layer after the first token, whether ``pool`` uses it or
    not."""
    dropout: float = 0.0
    """Sets the dropout rate on the embeddings and on the output of attention and of the MLP in each
    block, in training only."""
    attention_dropout: float = 0.0
    """Sets the dropout rate on attention weights, in training only."""
    remat: str = "none"
    """Chooses what activations are recomputed in the backward pass: nothing is recomputed, products
    with weights are saved ('dots'), only the inputs of blocks are saved ('full'), these are saved
    in host memory ('offload'), or the planner chooses ('auto'). Allowed values: 'none', 'dots',
    'full', 'offload', 'auto'."""


@dataclasses.dataclass(frozen=True)
class DualConfig:
    """Describes a dual encoder of images and texts in one embedding space, or one of its towers."""

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
    """Sets the initial value of the learned bias of the logits, where ``has_bias`` is set."""
    has_bias: bool = False
    """Gives the logits a learned bias, as SigLIP does."""
    dtype: str = "float32"
    """Chooses the dtype of the computation; parameters are always float32. Allowed values:
    'float32', 'bfloat16'."""
    attention: str = "auto"
    """Chooses the attention backend; 'auto' takes cuDNN on GPU, splash on TPU and XLA elsewhere.
    Allowed values: 'auto', 'xla', 'cudnn', 'splash', 'triton'."""
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
    """Chooses which hidden states of the real tokens become the embedding: the last one, their
    mean, the first one, or one embedding per token for late interaction. Allowed values: 'last',
    'mean', 'first', 'tokens'."""
    dim: int = 0
    """Sets the output width of a linear map after pooling; the default 0 means that there is no
    map."""
    normalize: bool = True
    """Scales embeddings to length 1."""
    learn_scale: bool = False
    """Learns the factor by which cosine similarities are multiplied."""
    scale: float = 3.0
    """Sets the initial value of the logarithm of that factor, where ``learn_scale`` is set."""
    learn_bias: bool = False
    """Learns a bias of the logits, for SigLIP's loss."""
    bias: float = 0.0
    """Sets the initial value of that bias, where ``learn_bias`` is set."""


@dataclasses.dataclass(frozen=True)
class PairLossConfig:
    """Configures the losses that train embeddings on pairs (docs/embedding.md)."""

    temperature: float = 0.05
    """Divides similarities by this number; 0 means the model's learned scale."""
    max_scale: float = 100.0
    """Limits the factor that may be learned instead of ``temperature``; 0 means no limit."""
    similarity: str = "cosine"
    """Chooses the similarity of two embeddings. Allowed values: 'cosine', 'dot'."""
    directions: tuple[str, ...] = ("query_to_document",)
    """Lists the comparisons that info_nce makes; 'query_to_document' must be among them. Allowed
    values: 'query_to_document', 'document_to_query', 'query_to_query', 'document_to_document'."""
    softmax_scope: str = "joint"
    """Chooses whether info_nce takes one softmax over all directions or one for each. Allowed
    values: 'joint', 'each'."""
    negatives_from: str = "batch"
    """Chooses where info_nce takes a query's negatives from: the global batch, the examples on its
    own device, or its own explicit hard negatives. Allowed values: 'batch', 'shard', 'own'."""
    false_negative_filter: str = "none"
    """Chooses which likely positives info_nce removes from the negatives: none, those with a
    similarity above the positive's plus ``margin``, or above it plus ``margin`` times its absolute
    value. Allowed values: 'none', 'absolute', 'relative'."""
    margin: float = 0.0
    """Sets the margin of ``false_negative_filter`` and of the triplet loss."""
    distance: str = "cosine"
    """Chooses the distance of the triplet loss. Allowed values: 'cosine', 'euclidean'."""
    teacher_temperature: float = 1.0
    """Divides the teacher's scores by this number, in the distill loss."""
    tile_size: int = 0
    """Sets the number of examples on each side of a tile of similarities that exists at once; the
    default 0 chooses it by memory."""
    matryoshka_dims: tuple[int, ...] = ()
    """Lists the lengths of embedding prefixes that are trained too (Matryoshka); the default ()
    means none."""
    matryoshka_weights: tuple[float, ...] = ()
    """Lists the weight of the loss for each of ``matryoshka_dims``; the default () means 1 each."""
    precisions: tuple[str, ...] = ()
    """Lists the precisions in which embeddings are trained to be stored and are evaluated; the
    default () means float32. Allowed values: 'float32', 'int8', 'binary'."""


@dataclasses.dataclass(frozen=True)
class GradCacheConfig:
    """Computes embeddings and their exact gradients in mini-batches (GradCache)."""

    query_mini_batch: int = 0
    """Limits how many query sequences a data shard runs at once; on a pipeline
    (config.mesh.pipeline) such a mini-batch is a microbatch. The default 0 means all at once, and
    -1 lets the planner choose this setting and ``document_mini_batch``."""
    document_mini_batch: int = 0
    """Limits how many document sequences (positives and negatives) a data shard runs at once; the
    default 0 means all at once."""
    max_tokens: int = 0
    """Limits the token positions in the sequences of a mini-batch, padding included; the default 0
    means no limit."""
