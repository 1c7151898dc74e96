"""Fine-tune a Hugging Face checkpoint on your own pictures and conversations.

    jaxvlm train --config=configs/finetune.py:HF_FOLDER --config.data.train=my.jsonl \
        --workdir=runs/tuned
    jaxvlm export --workdir=runs/tuned --output=OUT

The dims, the tokenizer, the chat template and the preparation of pictures are the folder's. The
vision tower stays as it is (no gradient, no optimizer memory): ``--config.optim.frozen='()'``
trains it too. ``--config.mesh.fsdp=-1`` spreads weights and optimizer over all devices.
"""

from jaxvlm.config import ConfigError, default_config


def get_config(arg: str = ""):
    """``arg``: the checkpoint's folder, or its hub id."""
    if not arg:
        raise ConfigError("give the checkpoint: --config=configs/finetune.py:HF_FOLDER")
    config = default_config()
    config.model.checkpoint = arg
    config.model.dtype = "bfloat16"
    config.model.vision.remat = config.model.decoder.remat = "full"
    config.data.batch_size = 8
    config.data.max_length = 2048
    config.data.max_images = 64  # tiles too; a row has no more than it has tokens for
    config.data.on_long = "skip"

    config.optim.learning_rate = 1e-5
    config.optim.frozen = ("vision/*",)
    config.epochs = 1.0
    return config
