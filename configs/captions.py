"""A dual encoder from scratch on pictures and their captions: minutes on two CPU cores.

    python -m benchmarks.captions emoji captions/emoji
    jaxvlm train --config=configs/captions.py:captions/emoji --workdir=runs/emoji

The argument is the folder; ``FOLDER,locked=TEXT_FOLDER`` takes a text tower that is trained
already (BERT or a sentence-transformers folder) and leaves it as it is: the pictures learn its
space (LiT, arXiv 2111.07991, the other way round).
"""

from jaxvlm.config import default_config


def get_config(arg: str = "captions/emoji"):
    """``arg``: the folder of train.jsonl and test.jsonl, and what follows a comma."""
    folder, _, option = arg.partition(",")
    config = default_config()
    config.loss, config.encoder = "info_nce", "dual"
    config.data.train, config.data.eval = f"{folder}/train.jsonl", f"{folder}/test.jsonl"
    config.data.batch_size, config.data.max_length = 256, 32
    config.data.shift, config.data.flip = 4, True

    dual = config.dual
    dual.embed_dim = 128
    vision = dual.vision
    vision.image_size, vision.patch_size, vision.stem = 64, 8, "conv"
    vision.width, vision.depth, vision.num_heads, vision.mlp_dim = 128, 3, 4, 512
    if option.startswith("locked="):
        dual.text_checkpoint = option.removeprefix("locked=")
        config.optim.frozen = ("text/*",)
    elif option:
        raise ValueError(f"captions takes no option {option!r}; known: locked=FOLDER")
    else:
        text = dual.text
        text.width, text.depth, text.num_heads, text.mlp_dim = 128, 2, 4, 512
        text.max_length = 32
        config.tokenizer.kind, config.tokenizer.vocab_size = "bpe", 1024

    config.pair_loss.temperature = 0.0  # learned
    config.pair_loss.directions = ("query_to_document", "document_to_query")
    config.pair_loss.partition = "each"
    config.grad_cache.query = config.grad_cache.document = 64
    config.optim.learning_rate, config.optim.weight_decay = 1e-3, 0.1
    config.optim.warmup_steps = 0.05
    config.epochs, config.log_every, config.eval_every = 60.0, 20, 0
    config.checkpoint.every = 0
    return config
