"""LoRA on a Hugging Face checkpoint: adapters on all linear maps, the weights frozen.

    jaxvlm train --config=configs/lora.py:HF_FOLDER --config.data.train=my.jsonl --workdir=runs/mine
    jaxvlm train --config=configs/lora.py:HF_FOLDER,ADAPTER …   # go on from PEFT's folder
    jaxvlm export --workdir=runs/mine --output=runs/mine-adapter
    jaxvlm export --workdir=runs/mine --output=runs/mine-merged --merged

DoRA: ``--config.model.lora.dora``. The decoder alone:
``--config.model.lora.targets="('decoder/*',)"``.
"""

from jaxvlm.config import ConfigError, default_config


def get_config(arg: str = ""):
    """``arg``: the checkpoint's folder, or its id on the hub; ``,FOLDER`` of a PEFT adapter."""
    if not arg:
        raise ConfigError("give the checkpoint: --config=configs/lora.py:HF_FOLDER")
    config = default_config()
    config.model.checkpoint, _, adapter = arg.partition(",")
    lora = config.model.lora
    if adapter:
        lora.checkpoint = adapter  # which says its rank and all else
    else:
        lora.rank, lora.alpha = 16, 32.0
    config.data.batch_size = 8
    config.data.max_length = 2048
    config.data.max_images = 64  # tiles too; a row has no more than it has tokens for
    config.data.on_long = "skip"
    config.optim.learning_rate = 2e-4
    config.epochs = 1.0
    return config
