"""A small VLM from scratch on your own pictures and conversations.

    jaxvlm data check my.jsonl --config=configs/own_data.py
    jaxvlm train --config=configs/own_data.py --config.data.train=my.jsonl --workdir=runs/mine

``my.jsonl`` holds one conversation a line, pictures beside it:

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
     {"type": "text", "text": "What is it?"}]}, {"role": "assistant", "content": "a cat"}]}

LLaVA's JSON (``conversations`` with ``<image>``) is read too. Only assistant turns are
trained on.
"""

from jaxvlm.config import default_config


def get_config(arg: str = ""):
    """``arg``: an evaluation file, or ""."""
    config = default_config()
    config.data.eval = arg
    config.data.batch_size = 8
    config.data.max_length = 512
    config.data.max_images = 4
    config.tokenizer.kind = "bpe"
    config.tokenizer.vocab_size = 4096

    vision = config.model.vision
    vision.image_size, vision.patch_size, vision.stem = 128, 16, "conv"
    vision.width, vision.depth, vision.num_heads, vision.mlp_dim = 128, 4, 4, 512
    decoder = config.model.decoder
    decoder.width, decoder.depth, decoder.mlp_dim = 128, 4, 384
    decoder.num_heads, decoder.num_kv_heads, decoder.head_dim = 4, 4, 32

    config.optim.learning_rate = 1e-3
    config.epochs = 10.0
    config.checkpoint.every = 200
    return config
