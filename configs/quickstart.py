"""A VLM from scratch on easy-VQA's real question-image pairs: minutes on two CPU cores.

    jaxvlm train --config=configs/quickstart.py --workdir=runs/quickstart

The model has 0.2 M parameters. About ten questions share an image: they are packed into one
sequence, each of them attends to the image, none attends to another question, and the image is
encoded once.
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
    """``arg``: "" is the full recipe; "smoke" takes 30 steps."""
    config = Config(
        data=DataConfig(
            train="easy-vqa:train",
            eval="easy-vqa:test",
            batch_size=16,
            max_length=144,
            max_images_per_sequence=1,
            flip=True,
            max_shift=4,
        ),
        model=ModelConfig(
            vision=VisionConfig(
                image_size=64,
                patch_size=8,
                stem="conv",
                # The training images' own, as their backgrounds are nearly white. With a mean of
                # 0.5 the background is most of every input, and some seeds learn shapes too late.
                pixel_mean=(0.9, 0.9, 0.9),
                pixel_std=(0.2, 0.2, 0.2),
                width=64,
                depth=1,
                num_heads=4,
                mlp_dim=256,
            ),
            connector=ConnectorConfig(merge=2),  # 64 patches become 16 tokens
            # Four heads of 16, here and above, learn shapes in fewer steps than two of 32.
            decoder=DecoderConfig(
                width=64, depth=2, mlp_dim=192, num_heads=4, num_kv_heads=4, head_dim=16
            ),
        ),
        optim=OptimConfig(learning_rate=1e-3, b2=0.99, warmup_steps=100),
        epochs=12.0,
        log_every=50,
        eval_every=0,
        checkpoint=CheckpointConfig(every=500),
    )
    if arg == "smoke":
        optim = dataclasses.replace(config.optim, warmup_steps=10)
        return dataclasses.replace(
            config, epochs=0.0, steps=30, optim=optim, log_every=10, eval_records=200
        )
    if arg:
        raise ValueError(f"quickstart takes no argument {arg!r}; known: smoke")
    return config
