"""LoRA on a Hugging Face checkpoint: adapters on all linear maps, the weights frozen.

    jaxvlm train --config=configs/lora.py:HF_FOLDER --config.data.train=my.jsonl --workdir=runs/mine
    jaxvlm train --config=configs/lora.py:HF_FOLDER,ADAPTER …   # continue from a PEFT folder
    jaxvlm export --workdir=runs/mine --output=runs/mine-adapter
    jaxvlm export --workdir=runs/mine --output=runs/mine-merged --merged

The weights stay in the checkpoint's dtype (``optim.frozen_dtype``). Where it is bfloat16,
``--config.model.dtype=bfloat16`` computes in it too, and no step casts them.

DoRA: ``--config.model.lora.dora``. The decoder alone:
``--config.model.lora.targets="('decoder/*',)"``.
"""

from jaxvlm.config import Config, ConfigError, DataConfig, LoraConfig, ModelConfig, OptimConfig


def get_config(arg: str = "") -> Config:
    """``arg``: the checkpoint's folder, or its id on the hub; ``,FOLDER`` of a PEFT adapter."""
    if not arg:
        raise ConfigError("give the checkpoint: --config=configs/lora.py:HF_FOLDER")
    checkpoint, _, adapter = arg.partition(",")
    # An adapter's folder sets its rank and everything else.
    lora = LoraConfig(checkpoint=adapter) if adapter else LoraConfig(rank=16, alpha=32.0)
    return Config(
        model=ModelConfig(checkpoint=checkpoint, lora=lora),
        data=DataConfig(
            batch_size=8,
            max_length=2048,
            max_images_per_sequence=64,  # tiles too; a sequence has no more than fit its tokens
            on_too_long="skip",
        ),
        optim=OptimConfig(learning_rate=2e-4),
        epochs=1.0,
    )
