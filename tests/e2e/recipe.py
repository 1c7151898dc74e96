"""A recipe of seconds: a tiny model on a file that the test wrote."""

from jaxvlm.config import default_config


def get_config(data: str):
    config = default_config()
    config.data.train = data
    config.data.batch_size, config.data.max_length, config.data.max_images_per_sequence = 8, 64, 2
    config.data.flip, config.data.max_shift = True, 1
    vision = config.model.vision
    vision.image_size, vision.patch_size, vision.stem = 16, 8, "conv"
    vision.width, vision.depth, vision.num_heads, vision.mlp_dim = 16, 1, 2, 32
    decoder = config.model.decoder
    decoder.width, decoder.depth, decoder.mlp_dim = 16, 1, 32
    decoder.num_heads, decoder.num_kv_heads, decoder.head_dim = 2, 2, 8
    config.optim.warmup_steps, config.optim.schedule = 2, "constant"
    config.optim.learning_rate = 3e-3
    config.steps = 12
    config.log_every = 1
    config.checkpoint.every = 3
    config.tensorboard = False
    return config
