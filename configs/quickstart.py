"""A VLM from scratch on easy-VQA's real question-picture pairs: minutes on two CPU cores.

    jaxvlm train --config=configs/quickstart.py --workdir=runs/quickstart

0.2 M parameters. Some ten questions share a picture: they are packed in one row, each sees
the picture, none sees another, and the picture is encoded once.
"""

from jaxvlm.config import default_config


def get_config(arg: str = ""):
    """``arg``: "" is the full recipe; "smoke" takes 30 steps."""
    config = default_config()

    config.data.train = "easy-vqa:train"
    config.data.eval = "easy-vqa:test"
    config.data.batch_size = 16
    config.data.max_length = 144
    config.data.max_images = 1
    config.data.flip = True
    config.data.shift = 4

    vision = config.model.vision
    vision.image_size, vision.patch_size, vision.stem = 64, 8, "conv"
    vision.width, vision.depth, vision.num_heads, vision.mlp_dim = 64, 1, 2, 256
    config.model.connector.merge = 2  # 64 patches become 16 tokens
    decoder = config.model.decoder
    decoder.width, decoder.depth, decoder.mlp_dim = 64, 2, 192
    decoder.num_heads, decoder.num_kv_heads, decoder.head_dim = 2, 2, 32

    config.optim.learning_rate = 1e-3
    config.optim.b2 = 0.99
    config.optim.warmup_steps = 100
    config.epochs = 12.0
    config.log_every = 50
    config.eval_every = 0
    config.checkpoint.every = 500

    if arg == "smoke":
        config.epochs, config.steps = 0.0, 30
        config.optim.warmup_steps = 10
        config.log_every, config.eval_records = 10, 200
    elif arg:
        raise ValueError(f"quickstart takes no argument {arg!r}; known: smoke")
    return config
