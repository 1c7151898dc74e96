"""easy-VQA with images of 16 x 16 visual tokens, to answer from a compressed KV cache.

    jaxvlm train --config=configs/kv_cache.py --workdir=runs/kv_cache
    jaxvlm eval --checkpoint=runs/kv_cache --kv=vl_cache --kv_budget=0.1 --kv_queries=4

The quickstart's images are 16 tokens, of which there is little to leave out. Its prompts end a few
tokens after the image: so few queries are observed (``--kv_queries``).
"""

import dataclasses

from jaxvlm.config import (
    CheckpointConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    ModelConfig,
    OptimConfig,
    VisionConfig,
)


def get_config(arg: str = "") -> Config:
    """``arg``: "" takes a quarter of an hour on two idle cores; "smoke" takes 10 steps."""
    config = Config(
        data=DataConfig(
            train="easy-vqa:train",
            eval="easy-vqa:test",
            batch_size=16,
            max_length=384,
            max_images_per_sequence=1,
            flip=True,
            max_shift=4,
        ),
        model=ModelConfig(
            vision=VisionConfig(
                image_size=64,
                patch_size=4,
                stem="conv",
                pixel_mean=(0.9, 0.9, 0.9),
                pixel_std=(0.2, 0.2, 0.2),
                width=64,
                depth=1,
                num_heads=4,
                mlp_dim=256,
            ),
            connector=ConnectorConfig(merge=1),
            decoder=DecoderConfig(
                width=64, depth=4, mlp_dim=192, num_heads=4, num_kv_heads=4, head_dim=16
            ),
        ),
        optim=OptimConfig(learning_rate=1e-3, b2=0.99, warmup_steps=100),
        epochs=0.0,
        steps=1500,
        log_every=50,
        eval_every=0,
        checkpoint=CheckpointConfig(every=0),
    )
    if arg == "smoke":
        optim = dataclasses.replace(config.optim, warmup_steps=5)
        return dataclasses.replace(config, steps=10, optim=optim, log_every=5, eval_records=20)
    if arg:
        raise ValueError(f"kv_cache takes no argument {arg!r}; known: smoke")
    return config
