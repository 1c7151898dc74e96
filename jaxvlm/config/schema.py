"""Every setting, its type and its default, in one place. Data only, no logic.

No field defaults to ``None``, so the command line can override each one; an empty string,
an empty tuple or 0 says "not set" where the comment says so.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """A pre-norm ViT."""

    image_size: int = 64  # pixels a side; packed: of the square that ``position`` is a table for
    patch_size: int = 16  # pixels a side
    crop_rest: bool = False  # pixels right and below that fill no patch are left out
    width: int = 64
    depth: int = 2
    trunk: int = 0  # the first n blocks and all before them are frozen, in vision/*; those behind
    # are in top/*; 0: all are in vision/*
    num_heads: int = 4
    mlp_dim: int = 256
    stem: str = "linear"  # linear: one matmul a patch; conv: 3x3 stride-2 convolutions
    position: str = "learned"  # learned | sincos2d | none
    activation: str = "gelu"  # gelu | gelu_tanh | quick_gelu | silu | relu
    gated: bool = False  # (act(x W_gate) * x W_in) W_out in the MLP
    class_token: bool = False  # prepended, and dropped again before the connector
    keep_class_token: bool = False  # it is a visual token too
    patch_bias: bool = True
    qkv_bias: bool = True
    qk_norm_all: bool = False  # RMSNorm over all heads of the queries, another of the keys
    layer_scale: float = 0.0  # first value of a learned factor on what blocks add; 0: none
    pre_norm: bool = False  # CLIP's LayerNorm before the first block
    feature_layer: int = -1  # -1: after the last block; -2: before it, and so on; -depth - 1: first
    feature_layers: tuple[int, ...] = ()  # several, side by side in each token; (): feature_layer
    post_norm: bool = True  # a LayerNorm lies behind the last block
    final_norm: bool = True  # it is used, where feature_layer is -1
    pool: str = "none"  # one vector a picture: none | class (token, normed) | attention (SigLIP's)
    norm: str = "layer"  # of the blocks: layer | rms
    norm_eps: float = 1e-6
    packed: bool = False  # patches of pictures of any size in a row, instead of square pictures
    patch_layout: str = "hwc"  # of a packed patch: hwc | cthw
    frames: int = 1  # of a video in one packed patch (t)
    block: int = 1  # packed patches come in blocks of m x m neighbours, blocks row by row
    position_resize: str = "corners"  # packed: corners | antialias, how the table meets a grid
    rope_theta: float = 0.0  # of rotary positions (row, column); 0: none
    window: int = 0  # packed: pixels a side that attention stays in; 0: the whole picture
    full_layers: tuple[int, ...] = ()  # blocks, from 0, that see the whole picture all the same
    pixel_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)  # of pixels in 0..1, red green blue
    pixel_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    dropout: float = 0.0  # of what a block's halves add, in training
    remat: str = "none"  # none | dots | full | offload | auto (the planner's choice)


@dataclasses.dataclass(frozen=True)
class RelevanceConfig:
    """Patches as fewer tokens, more of them where the question looks (docs/relevance.md)."""

    budget: int = 0  # tokens of a picture: 64, 100, 256, 400 …; 0: every patch is one
    levels: int = 2  # pieces have 2^levels patches a side, or are halved, at most so often
    width: int = 32  # of what patches are scored in
    query: bool = True  # the question has a say; else pictures alone, which questions may share


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """What maps the ViT's width to the decoder's."""

    kind: str = "mlp"  # mlp: linear, activation, linear | linear
    hidden: int = 0  # 0: the decoder's width
    merge: int = 1  # m x m neighbouring patches become one visual token
    pool: str = "concat"  # what a merge does: concat | mean
    norm: str = "none"  # none | layer | rms | rms_plus_one (the factor is 1 + scale)
    norm_merged: bool = False  # the norm lies behind the merge, not before
    norm_eps: float = 1e-6
    bias: bool = True
    newline: bool = False  # a learned token ends each row of a tiled picture's patches
    levels: int = 0  # DeepStack: how many of the ViT's feature_layers have a connector of their own
    activation: str = "gelu"
    relevance: RelevanceConfig = RelevanceConfig()


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary wavelengths are stretched beyond the length that a model was trained on."""

    kind: str = "default"  # default: not at all | linear | dynamic | llama3 | yarn
    factor: float = 1.0
    original_length: int = 0  # tokens trained on: dynamic, llama3, yarn
    low_factor: float = 1.0  # llama3: wavelengths above original_length / low_factor are stretched
    high_factor: float = 4.0  # llama3: those below original_length / high_factor are not
    beta_fast: float = 32.0  # yarn: turns in original_length from which on nothing is stretched
    beta_slow: float = 1.0  # yarn: turns below which all is
    whole_dims: bool = True  # yarn: round the two borders to whole dims
    magnitude: float = 1.0  # of cosine and sine


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A causal, pre-norm decoder (RMSNorm, rotary positions, grouped queries, SwiGLU)."""

    vocab_size: int = 0  # 0: the tokenizer's
    width: int = 64
    depth: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    mlp_dim: int = 192
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    rope_sections: tuple[int, ...] = ()  # wavelengths a position row (time, height, width); (): one
    rope_interleaved: bool = False  # sections take turns instead of lying one behind the other
    activation: str = "silu"
    norm: str = "rms"  # rms | rms_plus_one: the factor is 1 + weight
    norm_eps: float = 1e-6
    qk_norm: bool = False  # queries and keys are normed, head by head, before they are rotated
    post_norms: bool = False  # what attention and MLP add to the stream is normed too
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's last projection
    mlp_bias: bool = False
    query_scale: float = 0.0  # of attention's scores; 0: head_dim ** -0.5
    attention_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they don't
    logit_cap: float = 0.0  # logits likewise
    embed_scale: float = 1.0  # of the tokens' embeddings
    window: int = 0  # positions that a local layer's query sees, its own counted; 0: all
    window_pattern: tuple[bool, ...] = (True,)  # which layers are local; repeated over the depth
    local_rope_theta: float = 0.0  # of local layers, unscaled; 0: as the others
    num_experts: int = 0  # each an MLP of mlp_dim; 0: one MLP for every token
    experts_per_token: int = 0
    normalize_experts: bool = True  # the shares of a token's experts add up to 1
    expert_matmul: str = "auto"  # auto (on GPU a Triton kernel) | xla
    tied_embeddings: bool = True
    head: bool = True  # False: no output matrix, hidden states alone (a model that embeds)
    visual_mask: str = "causal"  # causal | prefix: a picture's tokens see each other both ways |
    # prompt: all before the first answer does
    dropout: float = 0.0  # of what a block's halves add, in training
    remat: str = "none"  # none | dots | full | offload | auto (the planner's choice)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside linear maps; they alone are trained (docs/training.md)."""

    rank: int = 0  # r of x A B; 0: no adapters
    alpha: float = 16.0  # x A B is multiplied by alpha / rank
    rslora: bool = False  # by alpha / sqrt(rank) instead
    dora: bool = False  # the length of each output column is learned apart from its direction
    targets: tuple[str, ...] = ("all-linear",)  # path patterns of linear maps, "decoder/*/wq";
    # "-vision/*" takes away from those before it
    base: str = "float32"  # how linear maps are kept beside adapters: float32 | int8
    init: str = "uniform"  # of A, B is zero: uniform (PEFT's default) | gaussian
    dropout: float = 0.0  # of an adapter's input, in training; 0: what checkpoint's folder says
    checkpoint: str = ""  # PEFT adapter folder to start from; it says rank to targets


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A vision-language model."""

    vision: VisionConfig = VisionConfig()
    connector: ConnectorConfig = ConnectorConfig()
    decoder: DecoderConfig = DecoderConfig()
    dtype: str = "float32"  # compute: float32 | bfloat16; parameters are float32
    attention: str = "auto"  # auto | xla | cudnn | splash | triton
    checkpoint: str = ""  # Hugging Face folder or hub id: its dims, weights, tokenizer, processor
    lora: LoraConfig = LoraConfig()


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """A text encoder with learned positions: a vector a text."""

    vocab_size: int = 0
    width: int = 64
    depth: int = 2
    num_heads: int = 4
    mlp_dim: int = 256
    max_length: int = 64  # rows of the table of positions
    num_types: int = 0  # rows of the table of token types; 0: none
    activation: str = "gelu"  # gelu | gelu_tanh | quick_gelu | silu | relu
    causal: bool = False  # a token sees those before it, not all
    norm_after: bool = False  # BERT's: a norm behind embeddings and each addition, none at the end
    norm_eps: float = 1e-6
    pool: str = "mean"  # of real tokens: mean | class (first) | last | largest (id) | eos (first
    # eos_id) | pooler (class, linear, tanh); end: the row's last place, padding or not
    eos_id: int = -1  # read where pool is eos
    pooler: bool = False  # BERT's linear layer behind the first token is there, used or not
    dropout: float = 0.0  # of embeddings and of what a block's halves add, in training
    attention_dropout: float = 0.0  # of the shares with which a token attends, in training
    remat: str = "none"  # none | dots | full | offload | auto (the planner's choice)


@dataclasses.dataclass(frozen=True)
class DualConfig:
    """A dual encoder: pictures and texts to vectors of one space. Or one of its towers alone."""

    towers: tuple[str, ...] = ("vision", "text")  # those that it has
    vision: VisionConfig = VisionConfig(pool="attention")
    text: TextConfig = TextConfig()
    embed_dim: int = 64  # of the vectors
    project: tuple[str, ...] = ("vision", "text")  # towers with a linear map to embed_dim; the
    # vector of another one has that width already
    project_bias: bool = False  # of those maps
    normalize: bool = True  # vectors have length 1
    scale: float = 2.6592  # first value of the learned log-temperature
    bias: float = 0.0  # first value of the logits' learned bias
    has_bias: bool = False  # logits have one (SigLIP)
    dtype: str = "float32"  # compute: float32 | bfloat16; parameters are float32
    attention: str = "auto"  # auto | xla | cudnn | splash | triton
    checkpoint: str = ""  # Hugging Face folder or hub id that it came from
    vision_checkpoint: str = ""  # the vision tower is of this one's (CLIP, SigLIP), or of a
    # workdir's, whose run made it from scratch
    text_checkpoint: str = ""  # the text tower is of this one's (CLIP, SigLIP, BERT)
    lora: LoraConfig = LoraConfig()


@dataclasses.dataclass(frozen=True)
class VectorConfig:
    """How the rows of a vision-language model become vectors, where it embeds."""

    pool: str = "last"  # of a row's real tokens: last | mean | first; tokens: a vector each, for
    # late interaction
    dim: int = 0  # of a linear map behind it; 0: there is none
    normalize: bool = True  # vectors have length 1
    learn_scale: bool = False  # what cosines are multiplied by is learned
    scale: float = 3.0  # first value of its logarithm
    learn_bias: bool = False  # logits have a learned bias (SigLIP's loss)
    bias: float = 0.0  # first value of it


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1: all that are left."""

    data: int = -1  # 0: the planner's choice, of all axes (docs/planning.md)
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    stage: int = 1  # the decoder's layers, cut into so many parts; see StrategyConfig.schedule


@dataclasses.dataclass(frozen=True)
class StrategyConfig:
    """Which batch axes of the mesh (data, fsdp) each part of the state is split over.

    Rows of a batch are split over both always. The axes of ``gathered`` are among those of
    ``params``, and these among those of ``optimizer``.
    """

    name: str = ""  # preset (docs/strategies.md) that says the mesh's axis and all fields below;
    # auto: the planner's choice, of the mesh too (docs/planning.md)
    params: tuple[str, ...] = ("fsdp",)  # parameters, between steps
    gathered: tuple[str, ...] = ("fsdp",)  # parameters, from a step's begin on: what is left is
    # gathered layer by layer, in the forward pass and again in the backward pass
    gradients: tuple[str, ...] = ("fsdp",)  # their sum over microbatches
    optimizer: tuple[str, ...] = ("fsdp",)  # moments, and the update
    whole: tuple[str, ...] = ()  # towers whose parameters are whole on every device: "vision"
    context: str = "gather"  # how rows split over the mesh's context attend: gather (keys and
    # values to all) | ring (they go round) | ulysses (rows are whole, heads are split instead)
    gather_bits: int = 32  # of parameters on their way from params to gathered: 32 | 8
    offload: tuple[str, ...] = ()  # "optimizer": moments lie in host memory between steps
    reduce_bits: int = 32  # of gradients that are added over batch axes outside of gathered:
    # 32 | 16 (bfloat16) | 8 | 4
    error_feedback: bool = False  # what rounding to reduce_bits takes away is added a step later
    sequence: bool = False  # norms and the residual stream are split over tensor too, by tokens
    schedule: str = "1f1b"  # over the mesh's stage: 1f1b | interleaved | gpipe | zero_bubble
    chunks: int = 1  # of layers that each stage has when interleaved, 2 or more


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """A vision tower on devices of its own: how many, and what is split over them."""

    devices: int = 0  # the first so many of the run; 0: it is on config.mesh with all the rest;
    # -1: as many as its share of a step's FLOPs, counted on the run's first batch
    mesh: MeshConfig = MeshConfig()
    strategy: StrategyConfig = StrategyConfig()
    wave: int = 0  # microbatches that enter a pipeline at once when the tower learns; 0: as many as
    # suit a tower that takes as long as the stages


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Visual tokens that are kept from step to step (docs/cache.md)."""

    policy: str = "off"  # off | strict (no update behind) | lazy | hybrid | adaptive
    bound: int = 1  # lazy hybrid adaptive: updates of the tower that tokens may be behind at most
    ahead: int = 0  # hybrid: updates behind which they are made anew where a chunk has room
    tolerance: float = 0.1  # adaptive: change of a picture's tokens at which they are due
    refresh: float = 0.0  # share of the pictures found that is drawn and encoded all the same;
    # adaptive: by how much it matters; their gradients are divided by the probability
    at_once: int = 0  # draw all pictures of so many steps in a row, and none of the others;
    # 0: some of each step
    alarm: float = 0.0  # a warning where tokens that are made anew have changed by more than this;
    # 0: by 0.001 where the tower is frozen, else never
    store: str = ""  # folder where a frozen tower's tokens are kept from run to run; "": nowhere
    codec: str = "exact"  # of the store: exact | int8 | fp8 | int4
    order: str = ""  # of a picture's tokens as they are kept: row_major | morton | merge2x2 |
    # tiled(m); "": as the model reads them
    trust: str = "all"  # the store's tokens of the same weights and pictures made on the same kind
    # of device by the same versions, dtype, layout and chunk; weights: on any, by any
    memory_mb: int = 0  # of a process's host memory for tokens; of a tower that learns: of pictures
    # beyond ``pictures``
    pictures: int = 0  # kept at most, or tiles of pictures, over all devices; 0: all of data.train
    halvings: int = 0  # a frozen tower's pages: how often they may be halved where a step is short
    # of memory, whose smaller steps are compiled at the start
    spare_evaluations: bool = False  # they are given back for each evaluation
    chunk: int = 0  # pictures that a data shard encodes at once; 0: 8, or fewer where its rows have
    # fewer; without a policy, 0: all


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with a warm-up."""

    learning_rate: float = 1e-3
    schedule: str = "cosine"  # cosine | linear | constant
    warmup_steps: int | float = 0.05  # below 1: the share of all steps
    final_share: float = 0.0  # of learning_rate, at the last step
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: tuple[str, ...] = ()  # extra path patterns to decay; matrices are, all else is not
    no_decay: tuple[str, ...] = ()  # path patterns never to decay
    clip_norm: float = 1.0  # 0: no clipping
    frozen: tuple[str, ...] = ()  # path patterns, e.g. ("vision/*",)
    learning_rate_scale: tuple[tuple[str, float], ...] = ()  # (pattern, factor); first match


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """A folder with ``tokenizer.json``, or one built from the training text."""

    path: str = ""  # folder of an existing tokenizer; "" builds one
    kind: str = "word"  # word | bpe, when built
    vocab_size: int = 8192  # at most, when built


@dataclasses.dataclass(frozen=True)
class PairsConfig:
    """Queries, positives and negatives of an embedding model (docs/embedding_data.md)."""

    column_mapping: tuple[tuple[str, str], ...] = ()  # (column of the file, our field)
    max_query_length: int = 0  # tokens; longer texts are cut. 0: data.max_length
    max_document_length: int = 0  # likewise
    query_instruction: str = ""  # of queries that have none of their own; before a text encoder's
    # text it stands as it is, so end it with a space
    document_instruction: str = ""  # of positives and negatives likewise
    max_negatives: int = -1  # hard negatives an example, drawn anew each pass; -1: all it has
    require_negatives: bool = False  # an example without a hard negative is a bad record
    batch_sampler: str = "no_duplicates"  # no query or positive twice in a batch | random
    tasks: str = "mixed"  # mixed | homogeneous: all examples of a batch are of one task
    task_alpha: float = 1.0  # homogeneous: a task's batches are as its examples to this power


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What a run reads, and how its records become rows."""

    train: str = ""  # FILE.json, FILE.jsonl, or easy-vqa:train (docs/data.md)
    eval: str = ""  # likewise; "" evaluates nothing
    image_root: str = ""  # "": the folder of the data file
    batch_size: int = 32  # rows a step, over all devices
    max_length: int = 256  # tokens a row
    max_images: int = 2  # pictures a row, or tiles where a picture is cut in tiles
    max_patches: int = 0  # patches a row of pictures of any size; 0: all that the row can need
    picture_pixels: tuple[int, int] = (0, 0)  # least and most pixels that pictures of any size are
    # scaled to; 0: as the checkpoint's processor says
    packing: bool = True  # several records a row; off: one record a row
    share_pictures: bool = True  # records with the same leading pictures encode them once
    buckets: int = 4  # row lengths that are compiled when packing is off
    virtual_shards: int = 256  # data order and placement are functions of it, not of devices
    on_long: str = "refuse"  # refuse | skip a record longer than max_length
    on_bad: str = "skip"  # refuse | skip a record that can't be read
    max_skip_share: float = 0.01  # of all records; more stops the run
    max_pixels: int = 50_000_000  # larger pictures are bad records (decompression bombs)
    resize: str = "auto"  # the checkpoint's processor, or squash | pad | crop to the model's size
    flip: bool = False  # random horizontal flips
    shift: int = 0  # random shifts, pixels each way
    workers: int = 1  # threads that read ahead
    prefetch: int = 4  # batches ready ahead of the step
    image_cache_mb: int = 512  # decoded pictures kept in host memory
    pairs: PairsConfig = PairsConfig()


@dataclasses.dataclass(frozen=True)
class PairLossConfig:
    """What vectors are trained on: the settings of the losses of pairs (docs/embedding.md)."""

    temperature: float = 0.05  # similarities are divided by it; 0: the model's learned scale
    max_scale: float = 100.0  # the largest factor that may be learned; 0: no bound
    similarity: str = "cosine"  # cosine | dot
    directions: tuple[str, ...] = ("query_to_document",)  # info_nce; and document_to_query,
    # query_to_query, document_to_document
    partition: str = "joint"  # info_nce: all directions in one softmax; each: one a direction
    negatives: str = "batch"  # info_nce: of the global batch | shard (a device's) | own (explicit)
    mask: str = "none"  # info_nce: what may be a positive is left out: none | absolute | relative
    margin: float = 0.0  # of the mask; of triplet
    distance: str = "cosine"  # triplet: cosine | euclidean
    teacher_temperature: float = 1.0  # distill
    chunk: int = 0  # examples on a side of a tile of similarities; 0: chosen
    dims: tuple[int, ...] = ()  # prefixes of the vectors that are trained too (Matryoshka)
    dim_weights: tuple[float, ...] = ()  # a factor each; (): 1
    precisions: tuple[str, ...] = ()  # that vectors are trained to be kept in, and measured:
    # float32 | int8 | binary; (): float32


@dataclasses.dataclass(frozen=True)
class GradCacheConfig:
    """Vectors are made, and their gradients taken back, a chunk of rows at a time; exact."""

    query: int = 0  # rows of queries that a data shard runs at once, at most; 0: all; -1: the
    # planner's choice, of document too. On a pipeline (config.mesh.stage) these are a microbatch
    document: int = 0  # of positives and negatives
    tokens: int = 0  # places in the rows of a chunk at most, padding counted; 0: any


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: int = 500  # steps; 0: only at the end and on SIGTERM
    keep: int = 2  # newest kept, the best one besides
    metric: str = ""  # of the evaluation; names the best checkpoint. "": exact_match, or recall@1
    # of vectors
    mode: str = "max"  # max | min


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run."""

    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    strategy: StrategyConfig = StrategyConfig()
    tower: TowerConfig = TowerConfig()
    cache: CacheConfig = CacheConfig()
    optim: OptimConfig = OptimConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    seed: int = 0
    steps: int = 0  # one of steps and epochs is set
    epochs: float = 0.0
    microbatches: int = 1  # parts that a batch's gradient is summed over; of pairs, see grad_cache;
    # 0: the planner's choice
    loss: str = "next_token"  # or of vectors: info_nce | sigmoid | triplet | cosine | cosent |
    # margin_mse | distill
    encoder: str = "vlm"  # what vectors are of: vlm (config.model, config.vectors) | dual
    # (config.dual)
    dual: DualConfig = DualConfig()
    vectors: VectorConfig = VectorConfig()
    pair_loss: PairLossConfig = PairLossConfig()
    grad_cache: GradCacheConfig = GradCacheConfig()
    loss_chunk: int = 0  # columns of the vocabulary whose logits exist at once; 0: chosen by length
    router_loss: float = 0.0  # factor of the load-balancing loss of a mixture of experts
    init_from: str = ""  # workdir whose weights (alone) this run starts from
    log_every: int = 20  # steps
    eval_every: int = 0  # steps; 0: only at the end
    eval_records: int = 0  # 0: all
    early_stop: int = 0  # evaluations without a better metric that end the run; 0: never
    max_bad_steps: int = 10  # non-finite steps in a row that stop the run
    profile_steps: tuple[int, int] = (0, 0)  # [first, last) step of a profiler trace
    compile_cache: str = "auto"  # folder of compiled programs; auto: the user's cache; "" off
    tensorboard: bool = True
    wandb_project: str = ""  # "": off

    @property
    def network(self) -> ModelConfig | DualConfig:
        """The model of the run."""
        return self.dual if self.encoder == "dual" else self.model
