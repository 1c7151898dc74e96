"""16 tokens for 256 patches, chosen by the question: generated images, minutes on two CPU cores.

    python -m benchmarks.relevance --data=FOLDER
    jaxvlm train --config=configs/relevance.py:FOLDER --workdir=runs/relevance

The vision encoder has random weights and is frozen. Its tokens are cached from the first epoch on,
whatever question is asked about them later.
"""

from jaxvlm.config import (
    CacheConfig,
    CheckpointConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    ModelConfig,
    OptimConfig,
    RelevanceConfig,
    VisionConfig,
)


def get_config(folder: str) -> Config:
    """``folder``: of train.jsonl and eval.jsonl."""
    return Config(
        data=DataConfig(
            train=f"{folder}/train.jsonl",
            eval=f"{folder}/eval.jsonl",
            batch_size=16,
            max_length=96,
            max_images_per_sequence=4,
            share_images=False,  # each question has tokens of its own
        ),
        model=ModelConfig(
            vision=VisionConfig(
                image_size=64, patch_size=4, width=64, depth=1, num_heads=4, mlp_dim=128
            ),
            # Four cells of 8 x 8 patches, one of which is split four times.
            connector=ConnectorConfig(relevance=RelevanceConfig(budget=16, levels=3)),
            decoder=DecoderConfig(
                width=64, depth=2, mlp_dim=192, num_heads=2, num_kv_heads=2, head_dim=32
            ),
        ),
        cache=CacheConfig(policy="strict"),
        optim=OptimConfig(learning_rate=2e-3, b2=0.99, warmup_steps=50, frozen=("vision/*",)),
        steps=400,
        log_every=100,
        checkpoint=CheckpointConfig(every=0),
    )
