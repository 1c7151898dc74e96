"""Federated training: several sites train one model, and no image leaves its site.

    jaxvlm federate simulate --config=configs/federated.py --alpha=0.3 --workdir=runs/federation
    jaxvlm federate status runs/federation --plot=federation.png

The first simulates four sites in one process, which divide easy-VQA's images unevenly, and trains
the quickstart's model. Other federations:

``hospitals``: two sites with unlike images. ``python examples/two_hospitals.py OUT`` makes them.

    jaxvlm federate simulate --config=configs/federated.py:hospitals \\
        --site_data=OUT/north.jsonl,OUT/south.jsonl --config.data.eval=OUT/test.jsonl \\
        --workdir=runs/hospitals

``lora,HF_FOLDER``: adapters of a Hugging Face checkpoint, which all sites have; only the second
matrices of the adapters are trained and sent, so that their mean is exact.

``contrastive``: CLIP-like embeddings of images and texts from scratch; give each site its pairs.
"""

import dataclasses

from jaxvlm.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    DualConfig,
    FederateConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    OuterConfig,
    PairLossConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)


def get_config(arg: str = "") -> Config:
    """``arg``: "", hospitals, lora,HF_FOLDER or contrastive; see above."""
    name, _, folder = arg.partition(",")
    if name == "lora":
        return _lora(folder)
    if folder or name not in ("", "hospitals", "contrastive"):
        known = "hospitals; lora,HF_FOLDER; contrastive; or none, for easy-VQA's images"
        raise ConfigError(f"federated takes no argument {arg!r}; known: {known}")
    if name == "contrastive":
        return _contrastive()
    small = _small()
    if name == "hospitals":
        data = dataclasses.replace(small.data, train="", eval="", max_length=48)
        federate, outer = FederateConfig(sites=2, rounds=40), OuterConfig(steps=25)
        return dataclasses.replace(small, data=data, federate=federate, outer=outer, steps=1000)
    return small


def _small() -> Config:
    """The quickstart's model, on four sites."""
    rounds, steps = 30, 20
    return Config(
        federate=FederateConfig(sites=4, rounds=rounds),
        outer=OuterConfig(steps=steps),
        data=DataConfig(
            train="easy-vqa:train",
            eval="easy-vqa:test",
            batch_size=16,
            max_length=144,
            max_images_per_sequence=1,
            flip=True,
            max_shift=4,
        ),
        model=ModelConfig(
            vision=VisionConfig(
                image_size=64,
                patch_size=8,
                stem="conv",
                pixel_mean=(0.9, 0.9, 0.9),
                pixel_std=(0.2, 0.2, 0.2),
                width=64,
                depth=1,
                num_heads=4,
                mlp_dim=256,
            ),
            connector=ConnectorConfig(merge=2),
            decoder=DecoderConfig(
                width=64, depth=2, mlp_dim=192, num_heads=4, num_kv_heads=4, head_dim=16
            ),
        ),
        optim=OptimConfig(learning_rate=1e-3, b2=0.99, warmup_steps=0.08),
        steps=rounds * steps,
        log_every=steps,
        checkpoint=CheckpointConfig(every=0),
    )


def _lora(checkpoint: str) -> Config:
    if not checkpoint:
        raise ConfigError(
            "give the checkpoint: --config=configs/federated.py:lora,HF_FOLDER, the same at all "
            "sites"
        )
    rounds, steps = 20, 25
    return Config(
        federate=FederateConfig(sites=2, rounds=rounds, lora="freeze_a"),
        outer=OuterConfig(steps=steps),
        model=ModelConfig(checkpoint=checkpoint, lora=LoraConfig(rank=16, alpha=32.0)),
        data=DataConfig(
            batch_size=8, max_length=2048, max_images_per_sequence=64, on_too_long="skip"
        ),
        optim=OptimConfig(learning_rate=2e-4),
        steps=rounds * steps,
        checkpoint=CheckpointConfig(every=0),
    )


def _contrastive() -> Config:
    rounds, steps = 20, 25
    return Config(
        federate=FederateConfig(sites=2, rounds=rounds),
        outer=OuterConfig(steps=steps),
        embedder="dual",
        dual=DualConfig(
            embed_dim=64,
            vision=VisionConfig(
                image_size=64,
                patch_size=8,
                stem="conv",
                width=64,
                depth=2,
                num_heads=4,
                mlp_dim=256,
                pool="attention",
            ),
            text=TextConfig(width=64, depth=2, num_heads=4, mlp_dim=256, max_length=32),
        ),
        loss=LossConfig(name="info_nce"),
        pair_loss=PairLossConfig(
            temperature=0.0,  # learned
            directions=("query_to_document", "document_to_query"),
            softmax_scope="each",
        ),
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=1024),
        data=DataConfig(batch_size=64, max_length=32, buckets=1),
        optim=OptimConfig(learning_rate=1e-3),
        steps=rounds * steps,
        checkpoint=CheckpointConfig(every=0),
    )
