"""Weights and batches for :mod:`benchmarks.step_vs_torch`, the same for every contestant."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from jaxvlm.config import Config, DataConfig
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.dataset import Dataset, load_dataset
from jaxvlm.data.sources import conversation_formats
from jaxvlm.hf.families import clip
from jaxvlm.hf.run_processor import make_tokenizer
from jaxvlm.types import Batch

SMALL = {
    "vision": {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "heads": 3},
    "text": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "heads": 4},
}
QUICKSTART = {
    "vision": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "heads": 2},
    "text": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "heads": 2},
}
DIMS = {"small": SMALL, "quickstart": QUICKSTART}


def model(folder: pathlib.Path, dims: dict, vocab: int, image_id: int, patch: int) -> dict:
    """Write a random LLaVA with an oracle's config and weights; returns what it is.

    Visual tokens are taken behind the last block, so that nobody computes one for nothing.
    """
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    v, t = dict(dims["vision"]), dict(dims["text"])
    vision = CLIPVisionConfig(
        num_attention_heads=v.pop("heads"), image_size=64, patch_size=patch, **v
    )
    text = LlamaConfig(num_attention_heads=t.pop("heads"), vocab_size=vocab, **t)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_id,
        image_seq_length=(64 // patch) ** 2,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    made = LlavaForConditionalGeneration(config)
    made.save_pretrained(folder)
    return {
        **dims,
        "vocab_size": vocab,
        "image": 64,
        "patch": patch,
        "parameters": made.num_parameters(),
    }


def padded(folder: pathlib.Path, rows: int = 8, length: int = 192, vocab: int = 2048) -> dict:
    """One batch of padded rows, an image of 64 tokens first in each."""
    image_id, patches = vocab - 1, 64
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 2, length + 1, rows)
    lengths[0] = length
    real = np.arange(length) < lengths[:, None]
    tokens = np.where(real, rng.integers(1, image_id, (rows, length)), 0)
    tokens[:, 1 : 1 + patches] = image_id
    weight = real & (np.arange(length) > patches)
    batch = Batch(
        tokens=tokens.astype(np.int32),
        loss_weight=weight.astype(np.float32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, 1, length)).copy(),
        segment=real.astype(np.int32),
        pixels=rng.integers(0, 256, (rows, 1, 64, 64, 3), np.uint8),
        image_start=np.ones((rows, 1), np.int32),
    )
    _save_jax(folder / "padded_jax.npz", [batch])
    theirs = {
        "input_ids": batch.tokens,
        "attention_mask": batch.segment,
        "labels": np.where(weight, tokens, -100),
        "pixel_values": batch.pixels[:, 0],
    }
    _save_torch(folder / "padded_torch.npz", [theirs])
    made = model(folder, SMALL, vocab, image_id, 8)
    return {**made, "rows": rows, "length": length, "real_tokens": int(lengths.sum())}


def mix(folder: pathlib.Path, dims: str, steps: int = 4) -> tuple[dict, dict[str, dict]]:
    """``steps`` packed batches with and without sharing, and the first's records for torch."""
    rows, length, patches = 16, 144, 16
    base = Config()
    read = conversation_formats.read("easy-vqa:train", DataConfig())
    tokenizer = make_tokenizer(base, None, lambda: tokenize.texts(read[0]))
    vocab = -(-tokenizer.vocab_size // 64) * 64
    counts = {}
    for name, share in (("mix_shared", True), ("mix_packed", False)):
        config = DataConfig(
            train="easy-vqa:train",
            batch_size=rows,
            max_length=length,
            # A record takes more than 24 tokens, so this never keeps one out of a row.
            max_images_per_sequence=1 if share else length // (patches + 8),
            share_images=share,
        )
        dataset = load_dataset(config, tokenizer, image_size=64, num_patches=patches, read=read)
        taken = dataset.train(np.arange(rows))
        pairs = [next(taken) for _ in range(steps)]
        taken.close()
        _save_jax(folder / f"{name}.npz", [batch for batch, _ in pairs])
        size = {int(s): int(n) for s, n in zip(dataset.corpus.source, dataset.corpus.length)}
        records = [int(record) for _, meta in pairs for record in meta.record]
        counts[name] = _counts([batch for batch, _ in pairs], [size[r] for r in records])
        if share:
            theirs = _length_grouped(dataset, records, tokenizer, rows * length, patches)
            _save_torch(folder / "mix_torch.npz", theirs)
            real = sum(int(batch["attention_mask"].sum()) for batch in theirs)
            counts["mix_torch"] = {
                "batches": len(theirs),
                "records": len(records),
                "record_tokens": real,
                "processed_tokens": real,
                "fill": real / sum(batch["input_ids"].size for batch in theirs),
            }
    return model(folder, DIMS[dims], vocab, tokenizer.image_id, 16), counts


def _counts(batches: list[Batch], lengths: list[int]) -> dict[str, Any]:
    real = sum(int((batch.segment > 0).sum()) for batch in batches)
    return {
        "batches": len(batches),
        "records": len(lengths),
        "record_tokens": sum(lengths),
        "processed_tokens": real,
        "fill": real / sum(batch.tokens.size for batch in batches),
    }


def _length_grouped(
    dataset: Dataset, records: list[int], tokenizer: Any, budget: int, patches: int
) -> list[dict[str, np.ndarray]]:
    """Records by length, as many a batch as ``budget`` padded tokens hold; batches shuffled."""
    corpus = dataset.corpus
    place = {int(s): i for i, s in enumerate(corpus.source)}
    chosen = sorted((place[r] for r in records), key=lambda i: int(corpus.length[i]))
    batches: list[list[int]] = [[]]
    for i in chosen:  # ascending: the last is the longest
        if (len(batches[-1]) + 1) * int(corpus.length[i]) > budget:
            batches.append([])
        batches[-1].append(i)
    order = np.random.default_rng(0).permutation(len(batches))
    return [_pad(dataset, batches[b], tokenizer, patches) for b in order]


def _pad(
    dataset: Dataset, members: list[int], tokenizer: Any, patches: int
) -> dict[str, np.ndarray]:
    corpus = dataset.corpus
    longest = max(int(corpus.length[i]) for i in members)
    shape = (len(members), longest)
    ids, seen = np.full(shape, tokenizer.pad_id), np.zeros(shape, np.int64)
    labels, pixels = np.full(shape, -100), []
    for row, i in enumerate(members):
        part = slice(int(corpus.first[i]), int(corpus.last[i]))
        tokens, loss = corpus.tokens[part], corpus.loss[part]
        wide = np.where(tokens == tokenizer.image_id, patches, 1)
        tokens, loss = np.repeat(tokens, wide), np.repeat(loss, wide)
        ids[row, : len(tokens)], seen[row, : len(tokens)] = tokens, 1
        labels[row, : len(tokens)] = np.where(loss, tokens, -100)
        pixels += [dataset.image_inputs.get(p)[0].pixels for p in corpus.images[i]]
    return {
        "input_ids": ids,
        "attention_mask": seen,
        "labels": labels,
        "pixel_values": np.stack(pixels),
    }


def _save_jax(path: pathlib.Path, batches: list[Batch]) -> None:
    fields = {
        f"{name}{i}": value
        for i, batch in enumerate(batches)
        for name, value in batch._asdict().items()
        if value is not None and name not in ("image_key", "example_id")
    }
    np.savez(path, count=len(batches), **fields)


def _save_torch(path: pathlib.Path, batches: list[dict[str, np.ndarray]]) -> None:
    fields = {}
    for i, batch in enumerate(batches):
        pixels = batch["pixel_values"].astype(np.float32) / 255
        pixels = (pixels - np.float32(clip.PIXEL_MEAN)) / np.float32(clip.PIXEL_STD)
        fields[f"pixel_values{i}"] = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        for name in ("input_ids", "attention_mask", "labels"):
            fields[f"{name}{i}"] = batch[name].astype(np.int64)
    np.savez(path, count=len(batches), **fields)
