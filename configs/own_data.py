"""A small VLM from scratch on your own images and conversations.

    jaxvlm data check my.jsonl --config=configs/own_data.py
    jaxvlm train --config=configs/own_data.py --config.data.train=my.jsonl --workdir=runs/mine

``my.jsonl`` holds one conversation per line; image paths are relative to its folder:

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
     {"type": "text", "text": "What is it?"}]}, {"role": "assistant", "content": "a cat"}]}

LLaVA's JSON (``conversations`` with ``<image>``) is read too, and so are Parquet with image bytes,
folders of Hugging Face's ``save_to_disk``, MDS, CSV and tar shards, in fields of other projects
(docs/data.md). Only assistant turns are trained on.
"""

from jaxvlm.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DecoderConfig,
    ModelConfig,
    OptimConfig,
    TokenizerConfig,
    VisionConfig,
)


def get_config(arg: str = "") -> Config:
    """``arg``: an evaluation file, or ""."""
    return Config(
        data=DataConfig(eval=arg, batch_size=8, max_length=512, max_images_per_sequence=4),
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=4096),
        model=ModelConfig(
            vision=VisionConfig(
                image_size=128,
                patch_size=16,
                stem="conv",
                width=128,
                depth=4,
                num_heads=4,
                mlp_dim=512,
            ),
            decoder=DecoderConfig(
                width=128, depth=4, mlp_dim=384, num_heads=4, num_kv_heads=4, head_dim=32
            ),
        ),
        optim=OptimConfig(learning_rate=1e-3),
        epochs=10.0,
        checkpoint=CheckpointConfig(every=200),
    )
