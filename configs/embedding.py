"""Published embedding models on a node or a small pod, 8,192 pairs a step by gradient caching.

    jaxvlm train --config=configs/embedding.py:clip-b32 --config.data.train=FILE --workdir=DIR
    jaxvlm train --config=configs/embedding.py:qwen3-2b,FOLDER …   # weights that lie in a folder

Which: clip-b32, siglip2-so400m (whole towers), qwen3-2b, qwen3-8b (LoRA). All four are compiled
for 8 H200 and for 16 v5p; docs/embedding.md has their memory
(``python -m benchmarks.embedding_pods``).
"""

from jaxvlm.config import ConfigError, default_config

CHECKPOINTS = {
    "clip-b32": "openai/clip-vit-base-patch32",
    "siglip2-so400m": "google/siglip2-so400m-patch14-384",
    "qwen3-2b": "Qwen/Qwen3-VL-Embedding-2B",
    "qwen3-8b": "Qwen/Qwen3-VL-Embedding-8B",
}


def get_config(arg: str = "clip-b32"):
    """``arg``: which model; ``,FOLDER``: of its weights, instead of the hub's."""
    name, _, folder = arg.partition(",")
    if name not in CHECKPOINTS:
        known = ", ".join(CHECKPOINTS)
        raise ConfigError(f"--config=configs/embedding.py:{name}: known: {known}")
    config = default_config()
    config.data.batch_size = 8192
    if name == "siglip2-so400m":
        config.loss = "sigmoid"
    else:
        config.loss, config.pair_loss.temperature = "info_nce", 0.0  # learned
        config.pair_loss.directions = ("query_to_document", "document_to_query")
        config.pair_loss.partition = "each"
    # A step runs many chunks: weights are gathered once, not for each of them.
    config.strategy.name = "fsdp_no_reshard"
    config.optim.weight_decay, config.optim.warmup_steps = 0.1, 0.05
    config.epochs = 1.0
    if name in ("clip-b32", "siglip2-so400m"):
        _towers(config, name)
        config.dual.checkpoint = folder or CHECKPOINTS[name]
    else:
        _vlm(config, name)
        config.model.checkpoint = folder or CHECKPOINTS[name]
    return config


def _towers(config, name):
    config.encoder, config.dual.dtype = "dual", "bfloat16"
    config.optim.learning_rate = 1e-5
    config.data.max_length, config.data.buckets = (77, 1) if name == "clip-b32" else (64, 1)
    if name == "clip-b32":
        config.grad_cache.query = config.grad_cache.document = 256
        return
    # 729 patches a picture: a block's states, and no more, are kept of a chunk.
    config.dual.vision.remat = config.dual.text.remat = "full"
    config.grad_cache.query, config.grad_cache.document = 32, 256


def _vlm(config, name):
    config.model.dtype = "bfloat16"
    config.data.max_length, config.data.max_images = 1024, 1
    config.data.max_patches = 3072  # 768 tokens: a page of about 900 x 900 pixels
    config.data.picture_pixels = (0, 768 * 32 * 32)
    config.data.pairs.max_query_length = 128
    config.vectors.learn_scale = True
    config.model.vision.remat = config.model.decoder.remat = "full"
    config.optim.learning_rate = 1e-4
    lora = config.model.lora
    lora.rank, lora.alpha = (16, 32.0) if name == "qwen3-2b" else (32, 64.0)
    config.grad_cache.query = 64 if name == "qwen3-2b" else 32
    config.grad_cache.document = 8 if name == "qwen3-2b" else 4
