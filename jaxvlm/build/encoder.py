"""An encoder of texts and pictures, ready to make vectors."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxvlm.build import exporting, pretrained, prompts
from jaxvlm.build.described import described
from jaxvlm.build.model import Model, build_model
from jaxvlm.build.process import keep_freed_memory, use_compile_cache
from jaxvlm.build.prompts import Picture
from jaxvlm.config import ConfigError, DataConfig, DualConfig, MeshConfig, TrainConfig
from jaxvlm.data import processor, texts
from jaxvlm.data.batch import Places, lay_pictures
from jaxvlm.io import hf
from jaxvlm.models.families import sentences
from jaxvlm.parallel.mesh import batch_shards, make_mesh
from jaxvlm.parallel.sharding import batch_sharding, replicated
from jaxvlm.types import Params


class Encoder:
    """A dual encoder, or a text encoder, with its parameters.

    Args:
        source: the checkpoint that it came from; ``None``: it was made from scratch, or of several.
        model: on its mesh.
        params: all parameters.
        tokenizer: of its texts; ``None`` where it takes none.
        pictures: what it wants of pictures; ``None`` where it takes none.
        run: the settings of the run that trained it, if it is a run's.
    """

    def __init__(
        self,
        source: pretrained.Source | None,
        model: Model[DualConfig],
        params: Params,
        tokenizer: texts.TextTokenizer | None,
        pictures: processor.Processor | None,
        run: TrainConfig | None = None,
    ):
        self.run, self.name = run, str(source.files) if source else "this run"
        self.source, self.model, self.params = source, model, params
        self.tokenizer, self.pictures = tokenizer, pictures
        whole = replicated(model.mesh)  # each process reads all vectors
        self._texts = jax.jit(self._text_vectors, out_shardings=whole)
        self._images = jax.jit(self._image_vectors, out_shardings=whole)

    @property
    def width(self) -> int:
        """Dims of a vector."""
        return self.model.config.embed_dim

    def encode_text(self, texts: Sequence[str], batch_size: int = 64) -> np.ndarray:
        """Vectors of texts.

        Args:
            texts: what to encode; those that are too long are cut, which is logged.
            batch_size: texts at a time, over all devices.

        Returns:
            f32[N, E], in the order of ``texts``.

        Raises:
            ConfigError: a single string, or a batch size below 1.
        """
        if isinstance(texts, str):
            raise ConfigError("encode_text takes a list of texts, not one text")
        if self.tokenizer is None:
            raise ConfigError(f"{self.name}: this model encodes pictures, no texts")
        words = self.tokenizer
        ids = words.encode(list(texts))
        # Texts of like length share a batch, so that little of it is padding.
        order = np.argsort([len(text) for text in ids], kind="stable")

        def batch(where: Sequence[int], count: int) -> tuple[np.ndarray, ...]:
            tokens, segment = words.rows([ids[i] for i in where], count)
            places = np.arange(tokens.shape[1], dtype=np.int32)
            return tokens, segment, np.broadcast_to(places, tokens.shape)

        return self._run(self._texts, order, batch, batch_size)

    def encode_image(self, pictures: Sequence[Picture], batch_size: int = 32) -> np.ndarray:
        """Vectors of pictures.

        Args:
            pictures: files, PIL pictures or u8[H, W, 3].
            batch_size: pictures at a time, over all devices.

        Returns:
            f32[N, E], in the order of ``pictures``.

        Raises:
            ConfigError: the model takes no pictures, one picture that is in no list, or a batch
                size below 1.
            DataError: a picture can't be read.
        """
        if self.pictures is None:
            raise ConfigError(f"{self.name}: this model encodes texts, no pictures")
        if not isinstance(pictures, list | tuple):
            raise ConfigError("encode_image takes a list of pictures, not one picture")
        prepare = self.pictures

        def batch(where: Sequence[int], count: int) -> tuple[np.ndarray, ...]:
            most = DataConfig().max_pixels
            found = [prompts.load_pixels(pictures[i], prepare.prepare, most) for i in where]
            flat = [pixels.reshape(pixels.shape[-3:]) for pixels in found]
            rows = np.arange(len(flat))
            how = (prepare.size, prepare.patching, prepare.most_patches)
            laid = lay_pictures(flat, Places(rows, np.zeros_like(rows)), (count, 1), *how)
            return (laid["pixels"][:, 0],) if "pixels" in laid else (laid["patches"], laid["grid"])

        return self._run(self._images, np.arange(len(pictures)), batch, batch_size)

    def similarity(self, images: np.ndarray, texts: np.ndarray) -> np.ndarray:
        """The model's logits of pictures against texts.

        Args:
            images: f32[I, E] of :meth:`encode_image`.
            texts: f32[N, E] of :meth:`encode_text`.

        Returns:
            f32[I, N]: ``exp(scale) * cosine + bias``. A softmax over them (CLIP) or a sigmoid of
            them (SigLIP) is what the model was trained to make right.

        Raises:
            ConfigError: the model has one tower, and so no scale.
        """
        if "head/scale" not in self.params:
            raise ConfigError(f"{self.name}: a model with one tower has no logits")
        scale, bias = (np.asarray(self.params.get(f"head/{n}", 0.0)) for n in ("scale", "bias"))
        return np.exp(scale) * images @ texts.T + bias

    def export(self, output: str | os.PathLike[str], dtype: str = "") -> dict[str, Any]:
        """Write the checkpoint again, with these parameters; see ``exporting.write``."""
        if self.source is None:
            raise ConfigError(
                f"{self.name}: its model is not from one Hugging Face checkpoint, so no library "
                "there knows it"
            )
        sentences.check_written(pretrained.modules(self.source.files))
        weights = self.source.family.weights(self.model.config)
        layout = hf.read_layout(self.source.weights)
        out = pathlib.Path(output)
        return exporting.write(self.source.files, out, self.params, weights, layout, dtype)

    def _text_vectors(self, params: Params, *batch: jax.Array) -> jax.Array:
        return self.model.module(params).encode_text(*batch)

    def _image_vectors(self, params: Params, *batch: jax.Array) -> jax.Array:
        return self.model.module(params).encode_image(*batch)

    def _run(
        self,
        verb: Callable[..., jax.Array],
        order: np.ndarray,
        batch: Callable[[Sequence[int], int], tuple[np.ndarray, ...]],
        batch_size: int,
    ) -> np.ndarray:
        """``verb`` on each ``batch`` of the items, rows filled up to a few counts."""
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: at least 1")
        out = np.zeros((len(order), self.model.config.embed_dim), np.float32)
        sharding, parts = batch_sharding(self.model.mesh), batch_shards(self.model.mesh)
        for first in range(0, len(order), batch_size):
            where = order[first : first + batch_size]
            rows = min(batch_size, 1 << (len(where) - 1).bit_length())
            arrays = batch(where.tolist(), -(-rows // parts) * parts)
            vectors = verb(self.params, *(jax.device_put(x, sharding) for x in arrays))
            out[where] = np.asarray(vectors).reshape(-1, out.shape[1])[: len(where)]
        return out


def load(source: pretrained.Source, mesh: MeshConfig | None = None, dtype: str = "") -> Encoder:
    """An encoder from a Hugging Face or sentence-transformers folder.

    Args:
        source: with an ``EncoderFamily``.
        mesh: all devices on ``data`` if ``None``.
        dtype: of the computation; "" is float32.

    Raises:
        ConfigError: a field of one of its files that is not understood, or tensors that do not fit.
        DataError: a tokenizer or processor that can't be read.
    """
    keep_freed_memory()
    use_compile_cache(TrainConfig().compile_cache)
    config, tokenizer, pictures = described(source)
    dtype = dtype or config.dtype
    config = dataclasses.replace(config, checkpoint=str(source.weights), dtype=dtype)
    model = build_model(config, make_mesh(mesh or MeshConfig()))
    params = pretrained.read_params(source, config, model.abstract())
    return Encoder(source, model, params, tokenizer, pictures)
