"""Loads encoders of texts and images, and computes embeddings with them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxvlm.config import Config, ConfigError, DataConfig, DualConfig, MeshConfig
from jaxvlm.data.conversations.collate import Places, collate_images
from jaxvlm.data.images import processor
from jaxvlm.data.tokenizer import text_tokenizer
from jaxvlm.hf import exporter, pretrained, safetensors
from jaxvlm.hf.encoder_folder import described
from jaxvlm.hf.families import sentences
from jaxvlm.inference import input_types
from jaxvlm.inference.prompts import ImageLike, load_pixels
from jaxvlm.parallel.distributed.processes import set_up_process
from jaxvlm.parallel.mesh import batch_shards, make_mesh
from jaxvlm.parallel.sharding import batch_sharding, replicated
from jaxvlm.spmd.model import Model, build_model
from jaxvlm.types import Params


class Encoder:
    """A dual encoder, or a text encoder, with its parameters.

    Args:
        source: checkpoint that the model came from; ``None`` if it was initialized from scratch or
            from several checkpoints.
        model: model on its mesh.
        params: all parameters.
        tokenizer: tokenizer of its texts; ``None`` if it takes no texts.
        image_processor: processor of its images; ``None`` if it takes no images.
        run: settings of the run that trained it; ``None`` if it is no run's.

    Attributes:
        input_types: how it embeds ``query`` and ``document``, as far as its run or folder says.
    """

    def __init__(
        self,
        source: pretrained.Source | None,
        model: Model[DualConfig],
        params: Params,
        tokenizer: text_tokenizer.TextTokenizer | None,
        image_processor: processor.Processor | None,
        run: Config | None = None,
    ):
        self.run, self.name = run, str(source.files) if source else "this run"
        self.input_types = input_types.of(source, run)
        self.source, self.model, self.params = source, model, params
        self.tokenizer, self.image_processor = tokenizer, image_processor
        everywhere = replicated(model.mesh)  # each process reads all embeddings
        self._texts = jax.jit(self._text_embeddings, out_shardings=everywhere)
        self._images = jax.jit(self._image_embeddings, out_shardings=everywhere)

    @property
    def width(self) -> int:
        """Number of dims of an embedding."""
        return self.model.config.embed_dim

    def encode_text(
        self, texts: Sequence[str], batch_size: int = 64, max_length: int = 0
    ) -> np.ndarray:
        """Embeds texts.

        Args:
            texts: texts to embed, with their instruction before them, if any; those that are too
                long are truncated, which is logged.
            batch_size: number of texts per batch, over all devices.
            max_length: maximum number of tokens of a text; 0 is the model's own limit.

        Returns:
            f32[N, E], in the order of ``texts``.

        Raises:
            ConfigError: the model takes no texts, ``texts`` is a single string, or the batch size
                is below 1.
        """
        if isinstance(texts, str):
            raise ConfigError("encode_text takes a list of texts, not one text")
        if self.tokenizer is None:
            raise ConfigError(f"{self.name}: this model encodes images, not texts")
        tokenizer = self.tokenizer
        ids = tokenizer.encode(list(texts), max_length)
        # Texts of similar length share a batch, so that little of it is padding.
        order = np.argsort([len(text) for text in ids], kind="stable")

        def batch(where: Sequence[int], count: int) -> tuple[np.ndarray, ...]:
            tokens, segment = tokenizer.pad([ids[i] for i in where], count)
            places = np.arange(tokens.shape[1], dtype=np.int32)
            return tokens, segment, np.broadcast_to(places, tokens.shape)

        return self._run(self._texts, order, batch, batch_size)

    def encode_image(self, images: Sequence[ImageLike], batch_size: int = 32) -> np.ndarray:
        """Embeds images.

        Args:
            images: files, PIL images or u8[H, W, 3].
            batch_size: number of images per batch, over all devices.

        Returns:
            f32[N, E], in the order of ``images``.

        Raises:
            ConfigError: the model takes no images, ``images`` is not a list, or the batch size is
                below 1.
            DataError: an image can't be read.
        """
        if self.image_processor is None:
            raise ConfigError(f"{self.name}: this model encodes texts, not images")
        if not isinstance(images, list | tuple):
            raise ConfigError("encode_image takes a list of images, not one image")
        prepare = self.image_processor

        def batch(indices: Sequence[int], count: int) -> tuple[np.ndarray, ...]:
            most = self.run.data.max_pixels if self.run else DataConfig().max_pixels
            loaded = [load_pixels(images[i], prepare.prepare, most) for i in indices]
            flat = [pixels.reshape(pixels.shape[-3:]) for pixels in loaded]
            rows = np.arange(len(flat))
            how = (prepare.size, prepare.patching, prepare.max_patches)
            laid = collate_images(flat, Places(rows, np.zeros_like(rows)), (count, 1), *how)
            return (laid["pixels"][:, 0],) if "pixels" in laid else (laid["patches"], laid["grid"])

        return self._run(self._images, np.arange(len(images)), batch, batch_size)

    def similarity(self, images: np.ndarray, texts: np.ndarray) -> np.ndarray:
        """Computes the model's logits of images against texts.

        Args:
            images: f32[I, E] from :meth:`encode_image`.
            texts: f32[N, E] from :meth:`encode_text`.

        Returns:
            f32[I, N]: ``exp(scale) * cosine + bias``. The model was trained for their
            softmax (CLIP) or their sigmoid (SigLIP).

        Raises:
            ConfigError: the model has one tower, and therefore no scale.
        """
        if "head/scale" not in self.params:
            raise ConfigError(f"{self.name}: a model with one tower has no logits")
        numbers = (self.params.get(f"head/{name}", 0.0) for name in ("scale", "bias"))
        scale, bias = (np.asarray(x, np.float32) for x in numbers)
        return np.exp(scale) * images @ texts.T + bias

    def export(self, output: str | os.PathLike[str], dtype: str = "") -> dict[str, Any]:
        """Writes the checkpoint with these parameters; see :func:`jaxvlm.hf.exporter.write`."""
        if self.source is None:
            raise ConfigError(
                f"{self.name}: its model does not come from one Hugging Face checkpoint, so no "
                "library of Hugging Face can load it"
            )
        sentences.check_written(pretrained.modules(self.source.files))
        if self.run is not None:
            length = self.tokenizer.style.max_length if self.tokenizer else 0
            input_types.check_same_as_folder(self.source.files, self.run, length)
        weights = self.source.family.weights(self.model.config)
        layout = safetensors.read_layout(self.source.weights)
        out = pathlib.Path(output)
        return exporter.write(self.source.files, out, self.params, weights, layout, dtype)

    def _text_embeddings(self, params: Params, *batch: jax.Array) -> jax.Array:
        return self.model.module(params).encode_text(*batch)

    def _image_embeddings(self, params: Params, *batch: jax.Array) -> jax.Array:
        return self.model.module(params).encode_image(*batch)

    def _run(
        self,
        encode: Callable[..., jax.Array],
        order: np.ndarray,
        batch: Callable[[Sequence[int], int], tuple[np.ndarray, ...]],
        batch_size: int,
    ) -> np.ndarray:
        """Calls ``encode`` on batches of items, padded to few sizes so that few are compiled."""
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1")
        out = np.zeros((len(order), self.model.config.embed_dim), np.float32)
        sharding, parts = batch_sharding(self.model.mesh), batch_shards(self.model.mesh)
        for first in range(0, len(order), batch_size):
            indices = order[first : first + batch_size]
            rows = min(batch_size, 1 << (len(indices) - 1).bit_length())
            arrays = batch(indices.tolist(), -(-rows // parts) * parts)
            embeddings = encode(self.params, *(jax.device_put(x, sharding) for x in arrays))
            out[indices] = np.asarray(embeddings).reshape(-1, out.shape[1])[: len(indices)]
        return out


def load(source: pretrained.Source, mesh: MeshConfig | None = None, dtype: str = "") -> Encoder:
    """Loads an encoder from a Hugging Face or sentence-transformers folder.

    Args:
        source: checkpoint of an ``EncoderFamily``.
        mesh: mesh to place the model on; all devices on ``data`` if ``None``.
        dtype: dtype of the computation; "" is float32.

    Raises:
        ConfigError: a field of one of its files is not supported, or its tensors do not fit.
        DataError: its tokenizer or processor can't be read.
    """
    set_up_process(Config().compile_cache)
    config, tokenizer, images = described(source)
    dtype = dtype or config.dtype
    config = dataclasses.replace(config, checkpoint=str(source.weights), dtype=dtype)
    model = build_model(config, make_mesh(mesh or MeshConfig()))
    params = pretrained.read_params(source, config, model.abstract())
    return Encoder(source, model, params, tokenizer, images)
