"""Fine-tune a Hugging Face checkpoint on your own images and conversations.

    jaxvlm train --config=configs/finetune.py:HF_FOLDER --config.data.train=my.jsonl \
        --workdir=runs/tuned
    jaxvlm export --workdir=runs/tuned --output=OUT

Architecture, tokenizer, chat template and image processor are the folder's. The vision encoder is
frozen (no gradient, no optimizer memory): ``--config.optim.frozen='()'`` trains it too.
``--config.mesh.fsdp=-1`` shards weights and optimizer over all devices.
"""

from jaxvlm.config import (
    Config,
    ConfigError,
    DataConfig,
    DecoderConfig,
    ModelConfig,
    OptimConfig,
    VisionConfig,
)


def get_config(arg: str = "") -> Config:
    """``arg``: the checkpoint's folder, or its hub id."""
    if not arg:
        raise ConfigError("give the checkpoint: --config=configs/finetune.py:HF_FOLDER")
    return Config(
        model=ModelConfig(
            checkpoint=arg,
            dtype="bfloat16",
            vision=VisionConfig(remat="full"),
            decoder=DecoderConfig(remat="full"),
        ),
        data=DataConfig(
            batch_size=8,
            max_length=2048,
            max_images_per_sequence=64,  # tiles too; a sequence has no more than fit its tokens
            on_too_long="skip",
        ),
        optim=OptimConfig(learning_rate=1e-5, frozen=("vision/*",)),
        epochs=1.0,
    )
