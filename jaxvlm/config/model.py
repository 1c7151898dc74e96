"""Settings of a vision-language model: vision encoder, connector, decoder and adapters."""

from __future__ import annotations

import dataclasses

from jaxvlm.config.extension import Extension


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Describes the vision encoder, a pre-norm ViT."""

    image_size: int = 64
    """Sets the side of the square input image in pixels; with ``packed`` it is the side of the
    square that the table of learned positions was made for."""
    patch_size: int = 16
    """Sets the side of a square patch in pixels."""
    crop_rest: bool = False
    """Drops the pixels at the right and bottom edges that do not fill a patch; with False, an
    ``image_size`` that is not a multiple of ``patch_size`` is refused."""
    width: int = 64
    """Sets the width of the hidden states."""
    depth: int = 2
    """Sets the number of transformer blocks."""
    frozen_blocks: int = 0
    """Freezes the first n blocks and everything before them, whose parameters are then
    ``vision/*``; the parameters of the blocks after them are ``vision_top/*``. The default 0
    freezes nothing, and all parameters are ``vision/*``."""
    num_heads: int = 4
    """Sets the number of attention heads, which must divide ``width``."""
    mlp_dim: int = 256
    """Sets the width of the hidden layer of each MLP."""
    stem: str = "linear"
    """Chooses how pixels become patch embeddings: by one matmul per patch ('linear'), or by 3x3
    convolutions of stride 2 ('conv'). Allowed values: 'linear', 'conv'."""
    position: str = "learned"
    """Chooses the position embedding that is added to the patches: a learned table, fixed sines and
    cosines of row and column, or none. Allowed values: 'learned', 'sincos2d', 'none'."""
    activation: str = "gelu"
    """Chooses the activation of the MLPs. Allowed values: 'gelu', 'gelu_tanh', 'quick_gelu',
    'silu', 'relu'."""
    gated: bool = False
    """Gates the MLPs: they compute (act(x W_gate) * x W_in) W_out instead of act(x W_in) W_out."""
    class_token: bool = False
    """Prepends a learned class token, which is dropped again before the connector unless
    ``keep_class_token`` is set."""
    keep_class_token: bool = False
    """Passes the class token on to the connector as one more visual token; needs
    ``class_token=True``."""
    patch_bias: bool = True
    """Adds a bias to the patch embedding."""
    qkv_bias: bool = True
    """Adds a bias to the query, key and value projections of attention."""
    qk_norm_all: bool = False
    """Applies one RMSNorm over all heads of the queries together and another one over all heads of
    the keys."""
    layer_scale: float = 0.0
    """Sets the initial value of the learned factor on the output of attention and MLP in each block
    (LayerScale); the default 0 leaves the factor out."""
    pre_norm: bool = False
    """Applies a LayerNorm before the first block, as CLIP does."""
    feature_layer: int = -1
    """Chooses the layer whose output becomes the visual tokens, counted from the end: -1 is the
    output of the last block, -2 that of the block before it, and -depth - 1 the input of the first
    block."""
    feature_layers: tuple[int, ...] = ()
    """Lists several layers, counted as in ``feature_layer``, whose outputs are concatenated in each
    visual token; the default () uses ``feature_layer`` alone."""
    post_norm: bool = True
    """Gives the encoder a LayerNorm after the last block."""
    final_norm: bool = True
    """Applies the LayerNorm of ``post_norm`` to the visual tokens where they are taken after the
    last block (``feature_layer=-1``)."""
    pool: str = "none"
    """Chooses how one embedding per image is computed: 'none' computes none, 'class' takes the
    normalized class token, and 'attention' is SigLIP's attention pooling. Allowed values: 'none',
    'class', 'attention'."""
    norm: str = "layer"
    """Chooses the norm in the blocks: LayerNorm or RMSNorm. Allowed values: 'layer', 'rms'."""
    norm_eps: float = 1e-6
    """Sets the epsilon that the norms add to the variance."""
    packed: bool = False
    """Packs the patches of images of any size into one sequence; with False, images are squares of
    one size."""
    patch_layout: str = "hwc"
    """Chooses the order of the values in a packed patch: height, width, channel ('hwc'), or
    channel, time, height, width ('cthw'). Allowed values: 'hwc', 'cthw'."""
    frames: int = 1
    """Sets how many frames of a video are joined in one packed patch (the temporal patch size)."""
    merge_block: int = 1
    """Sets the side m of the blocks of m x m neighbouring patches in which packed patches are
    ordered; the blocks follow each other row by row."""
    position_resize: str = "corners"
    """Chooses how the table of learned positions is resampled to an image's grid of packed patches:
    with aligned corners ('corners'), or with antialiasing ('antialias'). Allowed values: 'corners',
    'antialias'."""
    rope_theta: float = 0.0
    """Sets the base of the 2D rotary positions (row, column); the default 0 uses none."""
    window: int = 0
    """Limits the attention of packed images to windows of this side in pixels; the default 0 means
    that each patch attends to its whole image."""
    full_layers: tuple[int, ...] = ()
    """Lists the blocks, counted from 0, that attend to the whole image even if ``window`` is
    set."""
    pixel_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Sets the mean of red, green and blue that is subtracted from pixels in 0..1."""
    pixel_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Sets the standard deviation of red, green and blue by which pixels are divided after the mean
    is subtracted."""
    dropout: float = 0.0
    """Sets the dropout rate on the output of attention and of the MLP in each block, in training
    only."""
    remat: str = "dots"
    """Chooses which activations are recomputed in the backward pass: 'none' recomputes nothing,
    'dots' saves the outputs of matmuls with weights and of attention kernels, 'full' saves only the
    inputs of blocks, 'offload' saves these in host memory, and 'auto' lets the planner choose.
    'dots' is as fast as 'none' or faster, in a third of the memory. Allowed values: 'none', 'dots',
    'full', 'offload', 'auto'."""


@dataclasses.dataclass(frozen=True)
class RelevanceConfig:
    """Pools an image's patches into fewer tokens, with more of them where the question looks.

    See docs/relevance.md.
    """

    budget: int = 0
    """Sets the number of visual tokens per image, e.g. 64, 100, 256 or 400; the default 0 makes
    every patch a token."""
    levels: int = 2
    """Limits the size of a pooled region to 2^levels patches a side; a region is split at most this
    many times."""
    width: int = 32
    """Sets the number of dims in which patches are scored."""
    query: bool = True
    """Lets the scores depend on the question; with False they depend on the image alone, so that
    several questions can share its tokens."""


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """Describes the connector, which maps the width of the vision encoder to the decoder's."""

    kind: str = "mlp"
    """Chooses the connector: linear map, activation, linear map ('mlp'), or one linear map
    ('linear'). Allowed values: 'mlp', 'linear'."""
    hidden: int = 0
    """Sets the width of the MLP's hidden layer; the default 0 means the decoder's width."""
    merge: int = 1
    """Merges m x m neighbouring patches into one visual token; the default 1 leaves each patch a
    token of its own."""
    pool: str = "concat"
    """Chooses how patches are merged: they are concatenated ('concat'), or their mean is taken
    ('mean'). Allowed values: 'concat', 'mean'."""
    norm: str = "none"
    """Chooses the norm of the visual tokens; 'rms_plus_one' multiplies by 1 + scale. Allowed
    values: 'none', 'layer', 'rms', 'rms_plus_one'."""
    norm_merged: bool = False
    """Applies the norm after patches are merged instead of before."""
    norm_eps: float = 1e-6
    """Sets the epsilon that the norm adds to the variance."""
    bias: bool = True
    """Adds a bias to the connector's linear maps."""
    newline: bool = False
    """Ends each row of patches of a tiled image with a learned token."""
    video_pool: int = 0
    """Adds a token for the mean of each p x p neighbouring patches, of which videos are made; the
    default 0 makes them of the same tokens as images."""
    deepstack_levels: int = 0
    """Sets how many of the vision encoder's ``feature_layers`` get a connector of their own and are
    added in the decoder's first layers (DeepStack); the default 0 means none."""
    activation: str = "gelu"
    """Chooses the activation of the connector's MLP. Allowed values: 'gelu', 'gelu_tanh',
    'quick_gelu', 'silu', 'relu'."""
    relevance: RelevanceConfig = RelevanceConfig()
    """Groups the settings of pooling by relevance to the question."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretches rotary wavelengths beyond the length that a model was trained on."""

    kind: str = "default"
    """Chooses how rotary wavelengths are stretched; 'default' does not stretch them. Allowed
    values: 'default', 'linear', 'dynamic', 'llama3', 'yarn'."""
    factor: float = 1.0
    """Sets the factor by which wavelengths are stretched; every kind but 'default' uses it."""
    original_length: int = 0
    """Sets the length in tokens that the model was trained on; it is used by 'dynamic', 'llama3'
    and 'yarn'."""
    low_factor: float = 1.0
    """Stretches wavelengths above original_length / low_factor by the full factor, with kind
    'llama3'."""
    high_factor: float = 4.0
    """Leaves wavelengths below original_length / high_factor unchanged, with kind 'llama3'."""
    beta_fast: float = 32.0
    """Sets the number of rotations within ``original_length`` from which on a dimension is not
    stretched, with kind 'yarn'."""
    beta_slow: float = 1.0
    """Sets the number of rotations within ``original_length`` below which a dimension is stretched
    by the full factor, with kind 'yarn'."""
    whole_dims: bool = True
    """Rounds the two borders between stretched and unstretched dimensions to whole dimensions, with
    kind 'yarn'."""
    magnitude: float = 1.0
    """Multiplies cosine and sine by this factor; the default 1 leaves them unchanged."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Describes the causal pre-norm decoder: RMSNorm, rotary positions, grouped queries, SwiGLU."""

    vocab_size: int = 0
    """Sets the number of token ids; the default 0 means the tokenizer's vocabulary, rounded up to a
    multiple of 64."""
    width: int = 64
    """Sets the width of the hidden states."""
    depth: int = 2
    """Sets the number of layers."""
    num_heads: int = 4
    """Sets the number of query heads."""
    num_kv_heads: int = 4
    """Sets the number of key and value heads, which must divide ``num_heads``."""
    head_dim: int = 16
    """Sets the width of one attention head, an even number."""
    mlp_dim: int = 192
    """Sets the width of the hidden layer of each MLP, and of each expert."""
    rope_theta: float = 10_000.0
    """Sets the base of the rotary wavelengths."""
    rope_scaling: RopeScaling = RopeScaling()
    """Groups the settings that stretch rotary wavelengths for longer sequences."""
    rope_sections: tuple[int, ...] = ()
    """Lists how many rotary wavelengths use each of the position ids time, height and width
    (M-RoPE); the default () uses one position id per token."""
    rope_interleaved: bool = False
    """Interleaves the sections of ``rope_sections`` instead of concatenating them."""
    activation: str = "silu"
    """Chooses the activation of the gated MLPs. Allowed values: 'gelu', 'gelu_tanh', 'quick_gelu',
    'silu', 'relu'."""
    norm: str = "rms"
    """Chooses the norm; 'rms_plus_one' multiplies by 1 + weight. Allowed values: 'rms',
    'rms_plus_one'."""
    norm_eps: float = 1e-6
    """Sets the epsilon that the norms add to the mean square."""
    qk_norm: bool = False
    """Applies a norm to queries and keys, head by head, before they are rotated."""
    post_norms: bool = False
    """Applies a norm to the output of attention and of the MLP too, before it is added to the
    residual stream."""
    qkv_bias: bool = False
    """Adds a bias to the query, key and value projections of attention."""
    out_bias: bool = False
    """Adds a bias to the output projection of attention."""
    mlp_bias: bool = False
    """Adds a bias to the linear maps of the MLPs."""
    query_scale: float = 0.0
    """Sets the factor on attention scores; the default 0 means head_dim ** -0.5."""
    attention_cap: float = 0.0
    """Caps attention scores softly at cap * tanh(score / cap); the default 0 means no cap."""
    logit_cap: float = 0.0
    """Caps logits softly at cap * tanh(logit / cap); the default 0 means no cap."""
    embed_scale: float = 1.0
    """Multiplies the token embeddings by this factor."""
    window: int = 0
    """Limits the attention of a local layer to this many positions, the query's own included; the
    default 0 makes all layers global."""
    window_pattern: tuple[bool, ...] = (True,)
    """Says which layers are local (True) and which are global (False); the pattern repeats over the
    depth and needs ``window``."""
    local_rope_theta: float = 0.0
    """Sets the base of the rotary wavelengths in local layers, to which ``rope_scaling`` is then
    not applied; the default 0 gives local layers the wavelengths of the global ones."""
    num_experts: int = 0
    """Sets the number of experts of a mixture, each an MLP of ``mlp_dim``; the default 0 uses one
    MLP for all tokens."""
    experts_per_token: int = 0
    """Sets how many experts the router chooses for each token, from 1 to ``num_experts``."""
    normalize_experts: bool = True
    """Normalizes the router's weights of a token's chosen experts so that they sum to 1."""
    expert_matmul: str = "auto"
    """Chooses the grouped matmul of the experts: 'auto' takes a Triton kernel on GPU and XLA's
    elsewhere, 'xla' takes XLA's everywhere. Allowed values: 'auto', 'xla'."""
    tied_embeddings: bool = True
    """Shares the token embeddings with the output matrix."""
    head: bool = True
    """Gives the decoder an output matrix; with False it returns hidden states only, as embedding
    models do, and ``tied_embeddings`` must be False."""
    visual_mask: str = "causal"
    """Chooses the attention mask: each token attends to those before it ('causal'), the tokens of
    one image also attend to each other in both directions ('prefix'), or everything before the
    first answer does ('prompt'). Allowed values: 'causal', 'prefix', 'prompt'."""
    dropout: float = 0.0
    """Sets the dropout rate on the output of attention and of the MLP in each block, in training
    only."""
    remat: str = "dots"
    """Chooses which activations are recomputed in the backward pass: 'none' recomputes nothing,
    'dots' saves the outputs of matmuls with weights and of attention kernels, 'full' saves only the
    inputs of blocks, 'offload' saves these in host memory, and 'auto' lets the planner choose.
    'dots' is as fast as 'none' or faster, in a third of the memory. Allowed values: 'none', 'dots',
    'full', 'offload', 'auto'."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Adds low-rank adapters to linear maps, and trains the adapters alone (docs/training.md)."""

    rank: int = 0
    """Sets the rank r of the update x A B; the default 0 adds no adapters."""
    alpha: float = 16.0
    """Scales the update: x A B is multiplied by alpha / rank."""
    rslora: bool = False
    """Scales the update by alpha / sqrt(rank) instead of alpha / rank (rank-stabilized LoRA)."""
    dora: bool = False
    """Learns the length of each output column separately from its direction (DoRA)."""
    targets: tuple[str, ...] = ("all-linear",)
    """Lists path patterns of the linear maps that get an adapter, e.g. 'decoder/*/wq', read in
    order; a pattern after '-', e.g. '-vision/*', removes maps from those before it, and
    'all-linear' names all maps but the output matrix."""
    base: str = ""
    """Chooses how the frozen linear maps are quantized: 'int8' stores each weight in eight bits;
    the default "" quantizes none, and config.optim.frozen_dtype is their dtype. Allowed values: '',
    'int8'."""
    init: str = "uniform"
    """Chooses the initial distribution of A ('uniform' is PEFT's default), while B starts at zero.
    Allowed values: 'uniform', 'gaussian'."""
    dropout: float = 0.0
    """Sets the dropout rate on the input of each adapter, in training only; the default 0 takes the
    rate from the folder of ``checkpoint``, if there is one."""
    checkpoint: str = ""
    """Names a PEFT adapter folder to start from, which also sets ``rank``, ``alpha``, ``rslora``,
    ``dora`` and ``targets``; the default "" starts from new adapters."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Describes a vision-language model."""

    vision: VisionConfig = VisionConfig()
    """Groups the settings of the vision encoder."""
    connector: ConnectorConfig = ConnectorConfig()
    """Groups the settings of the connector between vision encoder and decoder."""
    decoder: DecoderConfig = DecoderConfig()
    """Groups the settings of the decoder."""
    dtype: str = "float32"
    """Chooses the dtype of the computation; trained parameters and the optimizer's moments are
    always float32, and config.optim.frozen_dtype is the dtype of frozen ones. Allowed values:
    'float32', 'bfloat16'."""
    attention: str = "auto"
    """Chooses the attention backend; 'auto' takes cuDNN or flash on GPU, flash on TPU and XLA
    elsewhere. Allowed values: 'auto', 'xla', 'cudnn', 'flash'."""
    checkpoint: str = ""
    """Names a Hugging Face folder or hub id whose architecture, weights, tokenizer and image
    processor are used; the default "" starts from random weights."""
    lora: LoraConfig = LoraConfig()
    """Groups the settings of low-rank adapters."""
    family: Extension = Extension()
    """Groups the settings of a model family of the user's own, which reads ``checkpoint``."""
