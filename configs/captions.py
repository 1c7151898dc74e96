"""A dual encoder on images and their captions: minutes on two CPU cores.

    python -m benchmarks.captions emoji captions/emoji
    jaxvlm train --config=configs/captions.py:captions/emoji --workdir=runs/emoji
    jaxvlm train --config=configs/captions.py:captions/emoji,text=BERT,vision=runs/emoji \\
        --workdir=runs/tuned

The argument is the folder, ``captions/emoji`` or ``captions/stamps``, and options after commas.
Without options both encoders are trained from scratch. ``text=FOLDER`` starts from a trained text
encoder (BERT or a sentence-transformers folder). ``vision=WORKDIR`` takes the vision encoder of a
run and freezes it (LiT, arXiv 2111.07991). ``locked=FOLDER`` freezes a trained text encoder, and
the vision encoder learns its embedding space. docs/embedding.md has results.

The options change single settings, so get_config fills in a ConfigDict; the other recipes return a
``jaxvlm.Config``.
"""

from jaxvlm.config import ConfigError, default_config

OPTIONS = ("text", "vision", "locked")


def get_config(arg: str = "captions/emoji"):
    """``arg``: the folder of train.jsonl and test.jsonl, and options after commas."""
    folder, *given = arg.split(",")
    options = dict(option.partition("=")[::2] for option in given)
    if unknown := [name for name in options if name not in OPTIONS]:
        known = ", ".join(f"{name}=FOLDER" for name in OPTIONS)
        raise ConfigError(f"--config=configs/captions.py: {unknown[0]!r}: known: {known}")
    if empty := [name for name in options if not options[name]]:
        raise ConfigError(f"--config=configs/captions.py: {empty[0]}=FOLDER: no folder is given")
    if "text" in options and "locked" in options:
        raise ConfigError("--config=configs/captions.py: text=FOLDER or locked=FOLDER, not both")
    config = default_config()
    config.loss.name, config.embedder = "info_nce", "dual"
    config.data.train, config.data.eval = f"{folder}/train.jsonl", f"{folder}/test.jsonl"
    config.data.batch_size, config.data.max_length, config.data.buckets = 128, 16, 1
    config.data.max_shift, config.data.flip = 2, True

    dual = config.dual
    dual.embed_dim = 128
    vision, text = dual.vision, dual.text
    if "vision" in options:
        dual.vision_checkpoint = options["vision"]
        config.optim.frozen = ("vision/*",)
    else:
        vision.image_size, vision.patch_size, vision.stem = 32, 8, "conv"
        vision.width, vision.depth, vision.num_heads, vision.mlp_dim = 128, 3, 4, 512
    if checkpoint := options.get("text") or options.get("locked"):
        dual.text_checkpoint = checkpoint
        if "locked" in options:
            config.optim.frozen += ("text/*",)
    else:
        text.width, text.depth, text.num_heads, text.mlp_dim = 128, 2, 4, 512
        text.max_length = 16
        config.tokenizer.kind, config.tokenizer.vocab_size = "bpe", 1024

    config.pair_loss.temperature = 0.0  # learned
    config.pair_loss.matryoshka_dims = (16, 32, 64, 128)
    config.pair_loss.directions = ("query_to_document", "document_to_query")
    config.pair_loss.softmax_scope = "each"
    config.grad_cache.query_mini_batch = config.grad_cache.document_mini_batch = 64
    config.optim.learning_rate, config.optim.weight_decay = 1e-3, 0.1
    config.optim.warmup_steps = 0.05
    config.epochs, config.log_every, config.eval_every = 40.0, 20, 0
    if "text" in options:  # the text encoder is trained already
        config.optim.learning_rate, config.epochs = 1e-4, 8.0
        config.optim.lr_multipliers = (("head/*", 10.0),)
        config.grad_cache.document_mini_batch = 0
    config.checkpoint.every = 0
    return config
