"""Published embedding models on a node or a small pod, 8,192 pairs per step by gradient caching.

    jaxvlm train --config=configs/embedding.py:clip-b32 --config.data.train=FILE --workdir=DIR
    jaxvlm train --config=configs/embedding.py:qwen3-2b,FOLDER …   # weights in a local folder

The models are clip-b32 and siglip2-so400m (all weights trained), qwen3-2b and qwen3-8b (LoRA). All
four are compiled for 8 H200 and for 16 v5p; docs/embedding.md has their memory
(``python -m benchmarks.embedding_pods``).
"""

from jaxvlm.config import (
    Config,
    ConfigError,
    DataConfig,
    DecoderConfig,
    DualConfig,
    EmbeddingConfig,
    GradCacheConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PairDataConfig,
    PairLossConfig,
    StrategyConfig,
    TextConfig,
    VisionConfig,
)

CHECKPOINTS = {
    "clip-b32": "openai/clip-vit-base-patch32",
    "siglip2-so400m": "google/siglip2-so400m-patch14-384",
    "qwen3-2b": "Qwen/Qwen3-VL-Embedding-2B",
    "qwen3-8b": "Qwen/Qwen3-VL-Embedding-8B",
}
BATCH_SIZE = 8192
# A step runs many mini-batches: weights are all-gathered once, not for each of them.
STRATEGY = StrategyConfig(name="fsdp_no_reshard")
BOTH_WAYS = PairLossConfig(
    temperature=0.0,  # learned
    directions=("query_to_document", "document_to_query"),
    softmax_scope="each",
)


def get_config(arg: str = "clip-b32") -> Config:
    """``arg``: which model; ``,FOLDER``: of its weights, instead of the hub's."""
    name, _, folder = arg.partition(",")
    if name not in CHECKPOINTS:
        known = ", ".join(CHECKPOINTS)
        raise ConfigError(f"--config=configs/embedding.py:{name}: known: {known}")
    checkpoint = folder or CHECKPOINTS[name]
    if name == "clip-b32":
        return _clip(checkpoint)
    if name == "siglip2-so400m":
        return _siglip(checkpoint)
    return _vlm(checkpoint, name)


def _optim(learning_rate: float) -> OptimConfig:
    return OptimConfig(learning_rate=learning_rate, weight_decay=0.1, warmup_steps=0.05)


def _clip(checkpoint: str) -> Config:
    return Config(
        embedder="dual",
        dual=DualConfig(checkpoint=checkpoint, dtype="bfloat16"),
        loss=LossConfig(name="info_nce"),
        pair_loss=BOTH_WAYS,
        grad_cache=GradCacheConfig(query_mini_batch=256, document_mini_batch=256),
        data=DataConfig(batch_size=BATCH_SIZE, max_length=77, buckets=1),
        strategy=STRATEGY,
        optim=_optim(1e-5),
        epochs=1.0,
    )


def _siglip(checkpoint: str) -> Config:
    return Config(
        embedder="dual",
        # 729 patches an image: of a mini-batch only the inputs of blocks are saved.
        dual=DualConfig(
            checkpoint=checkpoint,
            dtype="bfloat16",
            vision=VisionConfig(pool="attention", remat="full"),
            text=TextConfig(remat="full"),
        ),
        loss=LossConfig(name="sigmoid"),
        grad_cache=GradCacheConfig(query_mini_batch=32, document_mini_batch=256),
        data=DataConfig(batch_size=BATCH_SIZE, max_length=64, buckets=1),
        strategy=STRATEGY,
        optim=_optim(1e-5),
        epochs=1.0,
    )


def _vlm(checkpoint: str, name: str) -> Config:
    small = name == "qwen3-2b"
    return Config(
        model=ModelConfig(
            checkpoint=checkpoint,
            dtype="bfloat16",
            vision=VisionConfig(remat="full"),
            decoder=DecoderConfig(remat="full"),
            lora=LoraConfig(rank=16, alpha=32.0) if small else LoraConfig(rank=32, alpha=64.0),
        ),
        embedding=EmbeddingConfig(learn_scale=True),
        loss=LossConfig(name="info_nce"),
        pair_loss=BOTH_WAYS,
        grad_cache=GradCacheConfig(
            query_mini_batch=64 if small else 32, document_mini_batch=8 if small else 4
        ),
        data=DataConfig(
            batch_size=BATCH_SIZE,
            max_length=1024,
            max_images_per_sequence=1,
            max_patches_per_sequence=3072,  # 768 tokens: a page of about 900 x 900 pixels
            image_pixels_range=(0, 768 * 32 * 32),
            pairs=PairDataConfig(max_query_length=128),
        ),
        strategy=STRATEGY,
        optim=_optim(1e-4),
        epochs=1.0,
    )
