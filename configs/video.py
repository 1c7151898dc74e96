"""A VLM from scratch on videos: which way does a shape move? Minutes on two CPU cores.

    pip install 'jaxvlm[video]'
    python -m benchmarks.moving_shapes videos
    jaxvlm train --config=configs/video.py:videos --workdir=runs/video

The argument is the folder, and ``,frames=N`` after it shows the model that many frames: 4 by
default, and 1 as a control, which leaves it at chance (a quarter).
"""

from jaxvlm.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    DecoderConfig,
    ModelConfig,
    OptimConfig,
    VideoConfig,
    VisionConfig,
)


def get_config(arg: str = "videos") -> Config:
    """``arg``: the folder of train.jsonl and test.jsonl, and the number of frames."""
    folder, _, option = arg.partition(",")
    name, _, frames = option.partition("=")
    if option and (name != "frames" or not frames.isdigit()):
        raise ConfigError(f"--config=configs/video.py: {option!r}: known: frames=N")
    count = int(frames or 4)
    return Config(
        data=DataConfig(
            train=f"{folder}/train.jsonl",
            eval=f"{folder}/test.jsonl",
            batch_size=16,
            max_length=2 * (16 * count + 16),
            max_images_per_sequence=2 * count,
            video=VideoConfig(num_frames=count),
        ),
        model=ModelConfig(
            vision=VisionConfig(
                image_size=64,
                patch_size=16,
                stem="conv",
                pixel_mean=(0.9, 0.9, 0.9),
                pixel_std=(0.2, 0.2, 0.2),
                width=64,
                depth=1,
                num_heads=4,
                mlp_dim=256,
            ),
            decoder=DecoderConfig(
                width=64, depth=2, mlp_dim=192, num_heads=4, num_kv_heads=4, head_dim=16
            ),
        ),
        optim=OptimConfig(learning_rate=2e-3, b2=0.99, warmup_steps=100),
        epochs=10.0,
        log_every=50,
        eval_every=0,
        checkpoint=CheckpointConfig(every=500),
    )
