"""Sixteen tokens for 256 patches, chosen by the question: made pictures, minutes on two CPU cores.

    python -m benchmarks.relevance --data=FOLDER
    jaxvlm train --config=configs/relevance.py:FOLDER --workdir=runs/relevance

The tower is random and stays so. Its tokens are kept from the first pass over the data on, whatever
is asked of them later.
"""

from jaxvlm.config import default_config


def get_config(folder: str):
    """``folder``: of train.jsonl and eval.jsonl."""
    config = default_config()

    config.data.train, config.data.eval = f"{folder}/train.jsonl", f"{folder}/eval.jsonl"
    config.data.batch_size, config.data.max_length, config.data.max_images = 16, 96, 4
    config.data.share_pictures = False  # each question has tokens of its own

    vision = config.model.vision
    vision.image_size, vision.patch_size = 64, 4
    vision.width, vision.depth, vision.num_heads, vision.mlp_dim = 64, 1, 4, 128
    relevance = config.model.connector.relevance
    relevance.budget, relevance.levels = 16, 3  # 4 cells of 8 x 8 patches, 4 times one is split
    decoder = config.model.decoder
    decoder.width, decoder.depth, decoder.mlp_dim = 64, 2, 192
    decoder.num_heads, decoder.num_kv_heads, decoder.head_dim = 2, 2, 32

    config.optim.frozen = ("vision/*",)
    config.cache.policy = "strict"
    config.optim.learning_rate = 2e-3
    config.optim.b2 = 0.99
    config.optim.warmup_steps = 50
    config.steps = 400
    config.log_every = 100
    config.checkpoint.every = 0
    return config
